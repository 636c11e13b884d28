"""Two processes that train one model, sharded or replicated, and resume it: run by test_snapshots_of_ranks.py.

python snapshot_ranks.py RANK PORT_FILE FOLDER KIND
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from gradvitals.guard import RollBack
from gradvitals.guard.snapshot import SnapshotManager
from gradvitals.guard.training_state import TrainingState


class Trained:
    def __init__(self, kind: str, folder: Path | None) -> None:
        torch.manual_seed(0)
        net: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Linear(7, 3))
        if kind == "sharded":
            from torch.distributed.fsdp import fully_shard

            fully_shard(net)
        elif kind == "replicated":
            net = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=kind != "sharded")
        self.snapshots = SnapshotManager(
            TrainingState(net, self.optimizer, data=(lambda: 0, print)),
            RollBack(mode="on", every=3, settle=1),
            folder=folder,
        )
        self.step = 0
        torch.manual_seed(10 + (dist.get_rank() if dist.is_initialized() else 0))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.net(torch.randn(6, 5)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.snapshots.complete()
            self.optimizer.step()
            self.step += 1
            self.snapshots.settle(self.step)
            if self.snapshots.due(self.step):
                assert self.snapshots.take(self.step, {"rank": dist.get_rank()})

    def bits(self) -> list[object]:
        _, named = self.snapshots.state.read()
        tensors = [getattr(one, "to_local", lambda one=one: one)() for one in named.values()]
        return [*[one.detach().flatten().view(torch.uint8).tolist() for one in tensors], torch.get_rng_state().tolist()]


def main(rank: int, meeting: str, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    first = Trained(kind, folder)
    first.train(8)
    assert first.snapshots.close()
    assert not first.snapshots.problems, first.snapshots.problems
    second = Trained(kind, folder)
    restored = second.snapshots.resume()
    assert restored is not None
    assert restored.step == 6
    assert restored.extra == {"rank": rank}
    named = {name.removeprefix("module."): one for name, one in second.net.state_dict().items()}
    full = {name: getattr(one, "full_tensor", lambda one=one: one)().clone() for name, one in named.items()}
    if rank == 0:
        torch.save(full, f"{meeting}.pt")
    second.step = 6
    second.train(2)
    assert second.bits() == first.bits()
    second.snapshots.settle(8)
    assert second.snapshots.restore() == restored  # from disk: this process has none in memory
    second.snapshots.spoil()
    assert second.snapshots.close()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["snapshot-00000001", "snapshot-00000002"], names
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
