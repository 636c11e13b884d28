"""A skorch classifier, fit as scikit-learn does. Its learning rate is far too high: that is the planted bug."""

import numpy as np
import torch
from clock import Clock
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(128, 512)
        self.middle = nn.Linear(512, 512)
        self.output = nn.Linear(512, 5)

    def forward(self, x):
        return self.output(torch.relu(self.middle(torch.relu(self.hidden(x)))))


class Ticks(Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_batch_end(self, net, batch=None, training=None, loss=None, **kwargs):
        if training:
            self.clock.step(loss)


def main():
    torch.manual_seed(0)
    numbers = np.random.default_rng(0)
    y = numbers.integers(0, 5, 6400)
    centers = numbers.normal(size=(5, 128))
    x = (centers[y] + 3 * numbers.normal(size=(6400, 128))).astype(np.float32)
    clock = Clock()
    net = NeuralNetClassifier(
        Module,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        max_epochs=2,
        lr=1.0,
        batch_size=64,
        train_split=None,
        verbose=0,
        iterator_train__shuffle=True,
        callbacks=[("ticks", Ticks(clock))],
    )
    net.fit(x, y.astype(np.int64))
    clock.end(net.module_)


if __name__ == "__main__":
    main()
