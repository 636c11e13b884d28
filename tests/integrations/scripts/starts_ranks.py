"""Starts the second of two ranks as another process that runs this script, as Lightning does, and trains with DDP."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

store = os.environ.get("OUR_STORE")
child = None
rank = 0 if store is None else 1
if store is None:
    store = str(Path(tempfile.mkdtemp()) / "store")
    child = subprocess.Popen([sys.executable, str(Path(sys.argv[0]).resolve())], env={**os.environ, "OUR_STORE": store})
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
if child is None:
    os._exit(0)  # at exit, torch sometimes ends a process with a thread of gloo that still runs: "terminate called"
assert child.wait() == 0
print("trained")
