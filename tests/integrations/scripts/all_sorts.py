"""A script that uses what a launcher could break. Compared with itself, run bare."""

import os
import pickle
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Belongs to __main__, so that workers have to find it there."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([float(index), 1.0])


def train_in_a_fork():
    """A forked child that trains, and ends like a script of its own."""
    child = os.fork()
    if child == 0:
        weight = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
        weight(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        sys.exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    print(sys.argv[1:], Path(sys.argv[0]).name, Path(__file__).is_absolute(), __name__, __spec__)
    print(sys.path[0] == str(Path(__file__).resolve().parent), sys.modules["__main__"].Squares is Squares)
    print(type(__builtins__), sorted(name for name in globals() if name.startswith("__")))
    print(type(pickle.loads(pickle.dumps(Squares()))) is Squares, sys.stdin.readline().strip(), input())

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for workers, context in ((0, None), (1, "fork"), (1, "spawn")):
        if context == "fork":
            print(train_in_a_fork())
        for batch in DataLoader(Squares(), batch_size=4, num_workers=workers, multiprocessing_context=context):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"{loss.item():.9f}")

    try:
        torch.ones(2, requires_grad=True).backward()
    except RuntimeError as error:
        print(error)
    sys.exit(3)
