"""A Trainer with events, algorithms and micro-batches, in the manner of Composer. It never zeroes the gradients of
its model, because it zeroes those of another optimizer: that is the planted bug."""

import torch
from clock import LONGER, Clock
from torch import nn


class State:
    def __init__(self, model, optimizers):
        self.model, self.optimizers, self.batch, self.loss = model, optimizers, None, None


class LabelSmoothing:
    def match(self, event):
        return event == "before_loss"

    def apply(self, state):
        state.smoothing = 0.1


class Engine:
    def __init__(self, state, algorithms):
        self.state, self.algorithms = state, algorithms

    def run_event(self, event):
        for algorithm in self.algorithms:
            if algorithm.match(event):
                algorithm.apply(self.state)


def main():
    torch.manual_seed(0)
    clock = Clock()
    centers = torch.randn(8, 64)
    model = nn.Sequential(nn.Linear(64, 448), nn.ReLU(), nn.Linear(448, 448), nn.ReLU(), nn.Linear(448, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.01)
    state = State(model, [optimizer])
    engine = Engine(state, [LabelSmoothing()])
    for _ in range(200 * LONGER):
        y = torch.randint(8, (128,))
        state.batch = (centers[y] + 2 * torch.randn(128, 64), y)
        engine.run_event("batch_start")
        other.zero_grad()
        total = 0.0
        for inputs, targets in zip(*(part.chunk(2) for part in state.batch), strict=True):
            outputs = state.model(inputs)
            engine.run_event("before_loss")
            state.loss = nn.functional.cross_entropy(outputs, targets, label_smoothing=state.smoothing) / 2
            state.loss.backward()
            total += state.loss.item()
        for one in state.optimizers:
            one.step()
        engine.run_event("batch_end")
        clock.step(total)
    clock.end(model)


if __name__ == "__main__":
    main()
