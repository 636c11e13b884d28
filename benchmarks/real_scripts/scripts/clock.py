"""What every script of this folder ends with: one line with its steps, its losses and a checksum of its weights."""

import hashlib
import json
import os
import time

import torch

LONGER = int(os.environ.get("LONGER", "1"))
"""How many times as long to train as usual."""


class Clock:
    """Notes when each optimizer step ended, and the loss that the script would print for it."""

    def __init__(self):
        self.wall, self.cpu, self.losses = [], [], []

    def step(self, loss):
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.losses.append(float(loss))

    def end(self, *models):
        digest = hashlib.sha256()
        for model in models:
            tensors = model.state_dict().values() if isinstance(model, torch.nn.Module) else [model]
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    digest.update(tensor.detach().double().contiguous().numpy().tobytes())
        result = {"wall": self.wall, "cpu": self.cpu, "losses": self.losses, "checksum": digest.hexdigest()[:16]}
        print("\nRESULT " + json.dumps(result), flush=True)
