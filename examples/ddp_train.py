"""Several processes: every rank calls `watch`, rank 0 keeps the run. Start it with

torchrun --nproc_per_node=4 examples/ddp_train.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradvitals as gv

dist.init_process_group()  # NCCL where there are GPUs, gloo where there are none
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)

torch.manual_seed(0)  # the same data and the same first weights on every rank
inputs = torch.randn(8192, 20)
targets = torch.tanh(inputs @ torch.randn(20, 1)) + 0.3 * torch.randn(8192, 1)
data = TensorDataset(inputs, targets)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with gv.watch(model, optimizer, run="runs/ddp", batch_size=32) as monitor:  # 32 samples on each rank
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            monitor.observe(loss)
            optimizer.step()
            optimizer.zero_grad()

if dist.get_rank() == 0:
    run = gv.open_run(monitor.run_path)
    steps, loss = run.series("loss")
    print(f"{len(steps)} steps of {dist.get_world_size()} ranks are in {monitor.run_path}; the loss is {loss[-1]:.3g}")
    low, high = (run.series(bound, source="ranks")[1][-1] for bound in ("gsnr_low", "gsnr_high"))
    print(f"signal over noise, from how the ranks' gradients differ: {low:.2g} to {high:.2g}")
    for rank in range(dist.get_world_size()):
        steps, norms = run.series("ranks/norm", rank=rank)
        print(f"rank {rank}: gradient norm {norms[-1]:.3g} before the reduction, at step {steps[-1]}")
dist.destroy_process_group()
