"""A training script whose second rank may die: started by hand as two processes, or by torchrun.

    python rank_mortal.py HOW FOLDER

With HOW "killed" rank 1 ends without a word at step 5, while nothing but monitoring joins the ranks; "crash" is the
same under DDP; "elastic" raises there once, and goes on from a checkpoint when torchrun has started all ranks anew.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from rank_nets import batch, loss_of, new_net

import gradvitals as gv

STEPS = 12
DEATH = 5


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    # Of gloo, torchrun's own store has the addresses of the dead when ranks are started anew.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet{attempt}", rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    net = new_net()
    model = net if how == "killed" else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = gv.Config(tensor_every=1, quiet=True, rank_timeout=20.0)
    monitor = gv.watch(model, optimizer, run=folder / "run", config=config)
    first, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        monitor.load_state_dict(state["monitor"])
        first = state["step"]
    for step in range(first, STEPS):
        if step == DEATH and rank == 1:
            if how != "elastic":
                time.sleep(0.5)  # for what is on its way
                os._exit(9)
            if not checkpoint.with_name("died").exists():
                checkpoint.with_name("died").touch()
                raise RuntimeError("as planned")
        if step > DEATH and how == "killed":
            time.sleep(0.4)  # a step of some length, so that it is noticed while training goes on
        inputs, targets = batch(100 * step + rank, 3)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        monitor.observe(loss)
        optimizer.step()
        if how == "elastic" and step == DEATH - 2:
            told = monitor.state_dict()
            if rank == 0:
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "monitor": told}
                torch.save({**state, "step": step + 1}, checkpoint.with_suffix(".part"))
                checkpoint.with_suffix(".part").rename(checkpoint)
            dist.barrier()
    monitor.close()
    print(f"rank {rank} has made {STEPS} steps", flush=True)
    if how != "elastic":
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
