"""Trains a small model with torch imported in one of the ways that libraries import it."""

import importlib.machinery
import importlib.util
import sys

way = sys.argv[1]
if way == "find_spec":  # as transformers does
    assert importlib.util.find_spec("torch") is not None
    assert importlib.util.find_spec("torch") is not None
    import torch
elif way == "submodule":
    import torch.nn.functional
elif way == "lazy":
    spec = importlib.util.find_spec("torch")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    torch = sys.modules["torch"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(torch)
elif way == "own_finder":  # a finder of the script that asks none of the others

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.machinery.PathFinder.find_spec(name, path, target) if name == "torch" else None

    sys.meta_path.insert(0, Finder)
    import torch

    sys.modules.pop("this", None)
    importlib.util.find_spec("this")

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
