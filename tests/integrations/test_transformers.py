"""The callback for the Trainer of transformers, in real Trainers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

import gradvitals as gv
from gradvitals.integrations.transformers import GradvitalsCallback

QUIET = gv.Config(quiet=True, tensor_every=1)


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


@pytest.fixture(autouse=True)
def third_party_warnings() -> Iterator[None]:
    """Transformers warns of settings and deprecations of its own, which are not what is tested here."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(
    folder: Path, callback: GradvitalsCallback | None, steps: int, resume: bool = False, **options: Any
) -> Trainer:
    set_seed(0)
    small = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    settings = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "save_steps": 4, "learning_rate": 1e-2}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{**settings, **options},
    )
    model = GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0))
    callbacks = [callback] if callback is not None else []
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    return trainer


def logged(trainer: Trainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if "loss" in log]


def test_loss_and_norms_are_those_the_trainer_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train(tmp_path / "out", GradvitalsCallback(tmp_path / "run", config=QUIET), 6)
    alone = train(tmp_path / "alone", None, 6)
    run = gv.open_run(tmp_path / "run")
    steps, losses = run.series("loss")
    assert steps.tolist() == list(range(6))
    np.testing.assert_allclose(losses, logged(trainer, "loss"), rtol=1e-6)
    np.testing.assert_allclose(run.series("grad/norm")[1], logged(trainer, "grad_norm"), rtol=1e-5)  # before clipping
    assert set(run.stage("grad/norm")[1]) == {"raw"}
    assert set(run.batch_sizes("grad/norm")[1]) == {8.0}
    assert run.series("gsnr", source="microbatch")[0].size
    assert [tensor.name for tensor in run.layout.tensors][:1] == ["transformer.wte.weight"]
    assert run.meta["finished_at"] is not None
    pairs = zip(trainer.model.parameters(), alone.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_resumed_trainer_continues_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(tmp_path / "out", GradvitalsCallback(tmp_path / "run", config=QUIET), 6)
    resumed = train(tmp_path / "out", GradvitalsCallback(config=QUIET), 8, resume=True)
    run = gv.open_run(tmp_path / "run")
    assert run.series("loss")[0].tolist() == list(range(8))
    np.testing.assert_allclose(run.series("loss")[1], logged(resumed, "loss"), rtol=1e-6)
    assert [segment.first_step for segment in run.segments] == [0, 4]
    assert logged(whole, "loss")[:4] == logged(resumed, "loss")[:4]


def test_a_state_file_cut_short_does_not_stop_a_resumed_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "out", GradvitalsCallback(tmp_path / "first", config=QUIET), 4)
    (file,) = (tmp_path / "out" / "checkpoint-4").glob("gradvitals*")
    file.write_bytes(file.read_bytes()[:200])  # as a process leaves it that is killed while it writes
    callback = GradvitalsCallback(tmp_path / "second")
    train(tmp_path / "out", callback, 8, resume=True)
    assert "cannot be read, so the record starts anew" in capsys.readouterr().err
    with gv.open_run(tmp_path / "second") as run:
        assert run.series("loss")[0].tolist() == [4, 5, 6, 7]


def test_a_checkpoint_without_our_file_still_gives_the_right_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "out", None, 4)
    train(tmp_path / "out", GradvitalsCallback(tmp_path / "run", config=QUIET), 6, resume=True)
    assert gv.open_run(tmp_path / "run").series("loss")[0].tolist() == [4, 5]


def test_values_go_into_the_logs_where_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Flushed(GradvitalsCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            assert self.monitor is not None
            self.monitor.flush()
            super().on_log(*args, **kwargs)

    trainer = train(tmp_path / "out", Flushed(tmp_path / "run", config=QUIET, log=True), 2, save_strategy="no")
    np.testing.assert_allclose(logged(trainer, "gradvitals/grad/norm"), logged(trainer, "grad_norm"), rtol=1e-5)
    assert "gradvitals/grad/norm" in capsys.readouterr().out


def test_a_guard_leaves_a_bad_step_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class BadStep(GradvitalsCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            factor = torch.nan if state.global_step == 2 else 1.0
            self.hook = kwargs["model"].lm_head.register_forward_hook(lambda module, args, output: output * factor)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.hook.remove()

    callback = BadStep(tmp_path / "run", config=QUIET, guard=gv.Guard(mode="act"))
    trainer = train(tmp_path / "out", callback, 4, save_strategy="no")
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    actions = gv.open_run(tmp_path / "run").actions
    assert [(action.kind, action.step, action.taken) for action in actions][:1] == [("skip", 2, True)]


def test_the_verdict_and_the_default_folder_are_said_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = GradvitalsCallback()
    train(tmp_path / "out", callback, 3)
    assert callback.monitor is not None
    verdict, where = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradvitals: ")][-2:]
    assert ": 3 steps" in verdict
    assert where == f"gradvitals: details: gradvitals doctor {callback.monitor.run_path}"
    assert [path.parent.name for path in tmp_path.glob("gradvitals_runs/*")] == ["gradvitals_runs"]
