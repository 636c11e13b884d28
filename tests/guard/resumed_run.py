"""A run of its own process: resumes if it can, trains up to a step, and prints a digest of everything it holds.

python resumed_run.py FOLDER STEPS
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))
from snapshot_runs import Run, seed_all


def make(folder: Path | None, every: int) -> Run:
    return Run(
        lambda net: [
            torch.optim.SGD(net[0].parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW([*net[1].parameters(), *net[3].parameters(), *net[4].parameters()], lr=0.01),
        ],
        lambda both: [
            lr_scheduler.OneCycleLR(both[0], 0.1, total_steps=99),
            lr_scheduler.CosineAnnealingLR(both[1], 50),
        ],
        folder=folder,
        every=every,
        settle=2,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
    )


def trained(folder: Path | None, steps: int) -> tuple[int, str]:
    """Where a run began, and the digest of what it came to."""
    run = make(folder, 4)
    seed_all(1)
    restored = run.snapshots.resume()
    if restored is not None:
        assert restored.extra == {"step": restored.step}
        run.step = restored.step
    began = run.step
    run.train(steps - run.step, snapshots=True)
    assert run.snapshots.close()
    assert not run.snapshots.problems
    return began, hashlib.sha256(repr(run.all_bits()).encode()).hexdigest()


if __name__ == "__main__":
    print(*trained(Path(sys.argv[1]), int(sys.argv[2])))
