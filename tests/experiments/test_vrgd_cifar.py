"""The CIFAR-10 task on a few synthetic images: noise of ten colours, so that there is something to learn."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from experiments.vrgd import __main__ as command
from experiments.vrgd.__main__ import main
from experiments.vrgd.cifar import (
    PAD,
    SIDE,
    Augmented,
    CifarSettings,
    Images,
    Normalise,
    load_cifar10,
    make_resnet,
    train_cifar,
)
from experiments.vrgd.trial import Trial
from gradvitals.errors import GradvitalsError

Pixels = npt.NDArray[np.uint8]
TRIAL = Trial(
    task="cifar", model="resnet8-w4", batch=24, optimizer="momentum", arm="base", lr=0.2, seed=0, k=6, epochs=2
)
SETTINGS = CifarSettings(precision="float32")
CPU = torch.device("cpu")


def made_up(count: int, seed: int) -> tuple[Pixels, npt.NDArray[np.int64]]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count)
    colours = np.random.default_rng(0).integers(40, 215, (10, 3))
    noise = generator.normal(0, 20, (count, SIDE, SIDE, 3))
    return np.clip(colours[labels][:, None, None] + noise, 0, 255).astype(np.uint8), labels


def write_tiles(path: Path, pixels: Pixels, columns: int) -> None:
    rows = len(pixels) // columns
    sheet = pixels.reshape(rows, columns, SIDE, SIDE, 3).transpose(0, 2, 1, 3, 4)
    Image.fromarray(sheet.reshape(rows * SIDE, columns * SIDE, 3)).save(path, lossless=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """54 training images in two files of different shape, and 20 test images."""
    home = tmp_path / "data" / "cifar10"
    home.mkdir(parents=True)
    pixels, labels = made_up(54, 0)
    test_pixels, test_labels = made_up(20, 1)
    write_tiles(home / "train_0.webp", pixels[:36], 6)
    write_tiles(home / "train_1.webp", pixels[36:], 9)
    write_tiles(home / "test.webp", test_pixels, 5)
    np.savez(home / "labels.npz", y_train=labels.astype(np.uint8), y_test=test_labels.astype(np.uint8))
    return home.parent


# -- images ---------------------------------------------------------------------------------------------------------


def test_images_come_back_as_they_were_written(data: Path) -> None:
    train, test = load_cifar10(data)
    pixels, labels = made_up(54, 0)
    assert np.array_equal(train.pixels.numpy(), pixels)
    assert np.array_equal(train.labels.numpy(), labels)
    assert np.array_equal(test.pixels.numpy(), made_up(20, 1)[0])


def test_what_is_missing_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(GradvitalsError, match=r"has no test\.webp, labels\.npz, train_\*\.webp; expected FOLDER"):
        load_cifar10(tmp_path)
    (data / "cifar10" / "train_1.webp").unlink()
    with pytest.raises(GradvitalsError, match=r"36 images and labels\.npz 54 labels"):
        load_cifar10(data)


class AsTheyAre(Normalise):
    """Bytes stay bytes, to be compared."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels


def augmented(seed: int = 0, count: int = 40) -> tuple[Images, Augmented]:
    pixels, labels = made_up(count, 0)
    images = Images(torch.from_numpy(pixels), torch.from_numpy(labels))
    return images, Augmented(images, AsTheyAre(CPU, torch.float32), seed)


def test_every_image_is_a_shift_of_itself_perhaps_mirrored() -> None:
    images, batches = augmented()
    found, labels = batches.batch(0, 40)
    padded = np.pad(images.pixels.numpy(), ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    matches = []
    for picture, label in zip(found.numpy(), labels, strict=True):
        candidates = [
            (number, top, left, flip)
            for number in np.flatnonzero(images.labels.numpy() == int(label))
            for top in range(2 * PAD + 1)
            for left in range(2 * PAD + 1)
            for flip in (1, -1)
            if np.array_equal(picture, padded[number, top : top + SIDE, left : left + SIDE][:, ::flip])
        ]
        matches += candidates[:1]
        assert len(candidates) == 1
    numbers, tops, lefts, flips = zip(*matches, strict=True)
    assert sorted(numbers) == list(range(40))
    assert list(numbers) != list(range(40))
    assert len(set(tops)) > 4
    assert len(set(lefts)) > 4
    assert 5 < flips.count(-1) < 35


def test_augmentation_follows_from_the_seed_and_changes_with_the_epoch() -> None:
    one, same, other = (augmented(seed)[1] for seed in (0, 0, 1))
    assert torch.equal(one.batch(0, 40)[0], same.batch(0, 40)[0])
    assert not torch.equal(one.batch(0, 40)[0], other.batch(0, 40)[0])
    assert torch.equal(one.batch(8, 8)[0], same.batch(0, 40)[0][8:16])
    before = one.batch(0, 40)[0]
    one.start_epoch()
    assert not torch.equal(one.batch(0, 40)[0], before)
    same.start_epoch()
    assert torch.equal(one.batch(0, 40)[0], same.batch(0, 40)[0])


# -- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), [("resnet20", 0.27e6), ("resnet56", 0.85e6)])
def test_networks_have_the_published_size(name: str, parameters: float) -> None:
    network = make_resnet(name)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(parameters, rel=0.02)
    layers = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) == int(name.removeprefix("resnet"))


# -- training -------------------------------------------------------------------------------------------------------


def train(data: Path, **changes: Any) -> dict[str, float]:
    return train_cifar(replace(TRIAL, **changes), data=data, settings=SETTINGS)


def test_a_trial_reports_what_it_did(data: Path) -> None:
    result = train(data, epochs=3)
    assert result["steps"] == 6  # 54 images are two batches of 24, and six that are left out
    curve = [name for name in result if name.startswith("score@")]
    assert curve == ["score@0.5", "score@1", "score@1.5", "score@2", "score@2.5", "score@3"]
    assert result["score"] == result["score@3"]
    assert result["score"] % 5 == pytest.approx(0, abs=1e-3)  # of 20 images
    assert result["chance"] == 10
    assert result["seconds"] > 0
    assert result["images_per_second"] > 0


def test_it_learns(data: Path) -> None:
    start = train(data, epochs=1, lr=1e-6)
    result = train(data, epochs=12)
    assert result["loss"] < 0.8 * start["loss"]
    assert result["train_score"] > 20  # running averages of micro-batches of 4 are poor ones


def test_the_same_trial_gives_the_same_and_arms_differ_in_nothing_but_gradients(data: Path) -> None:
    def numbers(**changes: Any) -> tuple[float, float]:
        result = train(data, **changes)
        return result["loss"], result["score"]

    base = numbers()
    assert numbers() == base
    assert numbers(arm="vr", gamma=1.0) == pytest.approx(base, rel=1e-5)
    assert numbers(arm="vr")[0] != pytest.approx(base[0], rel=1e-4)
    assert numbers(seed=1)[0] != pytest.approx(base[0], rel=1e-4)


def test_a_run_that_diverges_stops_at_the_end_of_its_epoch(data: Path) -> None:
    result = train(data, lr=1e30, epochs=6)
    assert math.isnan(result["score"])
    assert math.isnan(result["train_score"])
    assert result["steps"] in (2, 4)


@pytest.mark.parametrize(
    ("changes", "words"), [({"batch": 64, "k": 8}, "54 training images"), ({"k": 7}, "multiple of k, which is 7")]
)
def test_batches_that_do_not_fit_are_refused(data: Path, changes: dict[str, int], words: str) -> None:
    with pytest.raises(GradvitalsError, match=words):
        train(data, **changes)


def test_the_command_sweeps_resumes_and_tells(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "trials.jsonl"
    options = ["--model", "resnet8-w4", "--batch", "24", "--k", "6", "--epochs", "0.5", "--lr", "0.1", "--span", "0"]
    options += ["--reach", "0", "--refine", "0", "--seeds", "1", "--device", "cpu", "--out", str(out)]
    arguments = ["cifar", "--data", str(data), *options]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    (comparison,) = json.loads(result.stdout)["comparisons"]
    assert [(row["arm"], row["n"], row["best_lr"]) for row in comparison["arms"]] == [("base", 1, 0.1), ("vr", 1, 0.1)]
    assert comparison["settings"] == {"warmup": 0.15, "smoothing": 0.1, "precision": "float32"}
    assert len(out.read_text().splitlines()) == 4

    monkeypatch.setattr(command, "train_cifar", print)  # nothing is left to train, and print would fail
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 0
    assert "0.1 edge" in again.stdout
