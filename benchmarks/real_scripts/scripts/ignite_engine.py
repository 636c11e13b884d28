"""An Ignite engine from create_supervised_trainer. One batch in the middle holds a NaN: that is the planted bug."""

import torch
from clock import Clock
from ignite.engine import Events, create_supervised_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    centers = torch.randn(10, 1, 16, 16)
    y = torch.randint(10, (12800,))
    x = centers[y] + 2 * torch.randn(12800, 1, 16, 16)
    x[6666, 0, 3, 3] = float("nan")
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 144, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device="cpu")
    clock = Clock()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        clock.step(engine.state.output)

    trainer.run(DataLoader(TensorDataset(x, y), batch_size=64), max_epochs=1)
    clock.end(model)


if __name__ == "__main__":
    main()
