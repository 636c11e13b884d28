"""Scripts in the style of well-known examples, which know nothing of gradvitals, are watched without being changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_python
from click.testing import CliRunner
from processes import SCRIPTS, Ended, in_this_process, python, same_weights, watched
from safetensors.torch import load_file

import gradvitals as gv
from gradvitals.cli import main
from gradvitals.integrations.zero_code.watcher import Watcher

GPT_BLOCK = ["ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_proj.weight"]
GPT_BLOCK += ["ln_2.weight", "ln_2.bias", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]


def names(run: gv.Run) -> list[str]:
    return [tensor.name for tensor in run.layout.tensors]


def test_mnist_style(tmp_path: Path) -> None:
    script = SCRIPTS / "mnist_style.py"
    args = ("--epochs", "2", "--size", "352", "--save-model")
    bare = in_this_process(script, *args, str(tmp_path / "bare.pt"))
    run = watched("--run", "run", str(script), *args, str(tmp_path / "run.pt"), cwd=tmp_path)
    assert run.status == 0, run.err
    assert run.out == bare
    assert same_weights(tmp_path / "bare.pt", tmp_path / "run.pt")

    found = gv.open_run(tmp_path / "run")
    assert names(found) == [
        f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias")
    ]
    steps, losses = found.series("loss")
    assert steps.tolist() == list(range(22))  # two epochs of 11 batches, none of them from the test set
    printed = [float(line.rpartition(" ")[2]) for line in bare.splitlines() if line.startswith("Train")]
    np.testing.assert_allclose(losses[[0, 10, 11, 21]], printed, atol=1e-6)
    np.testing.assert_allclose(found.series("lr")[1][[0, -1]], [1.0, 0.7], rtol=1e-6)
    assert found.batch_sizes("grad/norm")[1][-1] == 32
    assert set(found.stage("grad/norm")[1]) == {"raw"}


def test_nanogpt_style(tmp_path: Path) -> None:
    script = SCRIPTS / "nanogpt_style.py"
    args = ("--max_iters=20", "--eval_interval=10", "--log_interval=1", "--grad_clip=0.05")
    bare = in_this_process(script, *args, f"--out_file={tmp_path / 'one.pt'}")
    run = watched(
        "--run",
        "run",
        "--every",
        "5",
        str(script),
        *args,
        f"--out_file={tmp_path / 'two.pt'}",
        cwd=tmp_path,
        program=warm_python.executable(),
    )
    assert run.status == 0, run.err
    assert run.out.replace("two.pt", "one.pt") == bare
    assert same_weights(tmp_path / "one.pt", tmp_path / "two.pt")

    found = gv.open_run(tmp_path / "run")
    blocks = [f"h.{block}.{name}" for block in range(2) for name in GPT_BLOCK]
    assert names(found) == ["wte.weight", "wpe.weight", *blocks, "ln_f.weight", "ln_f.bias"]  # a tied weight once
    steps, losses = found.series("loss")
    printed = [float(line.rpartition(" ")[2]) for line in bare.splitlines() if line.startswith("iter")]
    assert steps.tolist() == list(range(20))
    np.testing.assert_allclose(losses, printed, atol=1e-4)  # of four micro-batches, each divided by four
    assert (found.series("grad/norm")[1] > 0.1).all()  # before the loop clipped it to 0.05
    assert set(found.stage("grad/norm")[1]) == {"raw"}
    assert found.batch_sizes("grad/norm")[1][-1] == 32
    assert np.isfinite(found.series("gsnr", source="microbatch")[1]).all()
    assert found.heads == tuple(f"h.{block}.attn/head{head}" for block in range(2) for head in range(2))


def test_transformers_trainer(tmp_path: Path, zero_code: Callable[..., Watcher]) -> None:
    script = SCRIPTS / "hf_trainer.py"
    args = ("--num_sequences", "160", "--logging_steps", "1", "--max_grad_norm", "0.5", "--output_dir")
    bare = in_this_process(script, *args, str(tmp_path / "bare"))
    watcher = zero_code()
    out = in_this_process(script, *args, str(tmp_path / "out"))
    watcher.close(None)
    timeless = [line for line in bare.splitlines() if "train_runtime" not in line]
    assert [line for line in out.splitlines() if "train_runtime" not in line] == timeless
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("bare", "out"))
    assert all(torch.equal(one[name], two[name]) for name in one)

    found = gv.open_run(tmp_path / "run")
    assert names(found)[:3] == ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"]
    logs = [json.loads(line.replace("'", '"')) for line in timeless if line.startswith("{'loss'")]
    steps, norms = found.series("grad/norm")
    assert steps.tolist() == list(range(20))
    np.testing.assert_allclose(norms, [float(log["grad_norm"]) for log in logs], rtol=1e-3)  # before clipping
    np.testing.assert_allclose(found.series("loss")[1], [float(log["loss"]) for log in logs], rtol=1e-3)
    assert set(found.stage("grad/norm")[1]) == {"raw"}
    assert found.batch_sizes("grad/norm")[1][-1] == 16


def test_lightning_trainer(tmp_path: Path, zero_code: Callable[..., Watcher]) -> None:
    script = SCRIPTS / "lightning_script.py"
    args = ("--max-epochs", "2", "--clip", "0.1", "--save")
    bare = in_this_process(script, *args, str(tmp_path / "bare.pt"))
    watcher = zero_code(every=10)
    assert in_this_process(script, *args, str(tmp_path / "run.pt")) == bare
    watcher.close(None)
    assert same_weights(tmp_path / "bare.pt", tmp_path / "run.pt")

    found = gv.open_run(tmp_path / "run")
    parts = [f"{part}.{layer}" for part in ("encoder", "decoder") for layer in (0, 2)]
    assert names(found) == [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    assert found.series("loss")[0].tolist() == list(range(28))
    assert (found.series("grad/norm")[1] > 0.1).all()
    assert set(found.stage("grad/norm")[1]) == {"raw"}


def test_a_learning_rate_far_too_high_is_found(tmp_path: Path, zero_code: Callable[..., Watcher]) -> None:
    watcher = zero_code(every=50)
    in_this_process(SCRIPTS / "mnist_style.py", "--size", "1024", "--epochs", "2", "--optimizer", "sgd", "--lr", "20")
    watcher.close(None)
    result = CliRunner().invoke(main, ["doctor", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.output)["verdict"]["level"] != "healthy"


def torchrun(script: Path, *args: str, ours: tuple[str, ...], cwd: Path) -> Ended:
    command = ("-m", "torch.distributed.run", "--nproc_per_node=2", *ours, str(script), *args)
    return python(*command, cwd=cwd, program=warm_python.executable())


@pytest.mark.slow
def test_under_torchrun_two_ranks_make_one_run(tmp_path: Path) -> None:
    ours = ("-m", "gradvitals", "run", "--out", "run")
    done = torchrun(SCRIPTS / "nanogpt_style.py", "--max_iters=20", ours=ours, cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.err.count("gradvitals: details: gradvitals doctor run") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    found = gv.open_run(tmp_path / "run")
    assert found.meta["ranks"] == 2
    assert names(found)[:2] == ["wte.weight", "wpe.weight"]
    assert found.series("loss")[0].tolist() == list(range(20))
    assert found.batch_sizes("grad/norm")[1][-1] == 32
    assert found.series("gsnr", source="ranks")[0].size


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_is_kept_with_all_steps_before_the_others_are_ended(rank: int, tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "one_rank_raises.py"
    ours = ("-m", "gradvitals", "run", "--out", "run")
    done = torchrun(script, str(rank), ours=ours, cwd=tmp_path)
    assert done.status != 0
    found = gv.open_run(tmp_path / "run")
    assert found.series("grad/norm")[0].tolist() == list(range(21))
    stops = [finding for finding in found.findings if finding.id in ("training_stopped", "ranks_lost")]
    assert [(stop.id, stop.rank, stop.first_step, stop.title) for stop in stops] == [
        ("training_stopped", rank, 21, "Training stopped with ValueError: bad sample")
    ]
    line = f"Unhealthy: stopped at step 21 on rank {rank} by ValueError: bad sample."
    assert "gradvitals: Unhealthy" not in done.err  # the traceback shows what went wrong
    assert done.err.count("gradvitals: details: gradvitals doctor run") == 1
    doctor = CliRunner(env={"COLUMNS": "300"}).invoke(main, ["doctor", str(tmp_path / "run")])
    assert doctor.output.startswith(line)


@pytest.mark.slow
def test_a_sharded_model_is_found_as_it_is_stepped(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "sharded.py"
    ours = ("-m", "gradvitals", "run", "--out", "run", "--every", "1")
    done = torchrun(script, ours=ours, cwd=tmp_path)
    assert done.status == 0, done.err
    found = gv.open_run(tmp_path / "run")
    assert found.meta["extra"]["model"] == "Net"
    assert names(found) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    norms = [float(line) for line in done.out.split()]
    np.testing.assert_allclose(found.series("grad/norm")[1][1:], norms[1:], rtol=1e-5)
    assert found.stage("grad/norm")[1].tolist() == ["clipped", *["raw"] * 5]  # found when it stepped, and says so
    assert found.series("loss")[0].tolist() == list(range(6))
