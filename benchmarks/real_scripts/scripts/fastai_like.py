"""A Learner with callbacks and fit_one_cycle, in the manner of fastai, which needs torchvision to be installed."""

import torch
from clock import LONGER, Clock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Callback:
    def __getattr__(self, name):
        if name.startswith(("before_", "after_")):
            return lambda learn: None
        raise AttributeError(name)


class Recorder(Callback):
    def __init__(self, clock):
        self.clock = clock

    def after_batch(self, learn):
        self.clock.step(learn.loss)


class Learner:
    def __init__(self, loader, model, loss_func, lr, cbs):
        self.loader, self.model, self.loss_func, self.lr, self.cbs = loader, model, loss_func, lr, cbs

    def __call__(self, event):
        for callback in self.cbs:
            getattr(callback, event)(self)

    def one_batch(self):
        self.pred = self.model(self.xb)
        self.loss = self.loss_func(self.pred, self.yb)
        self("before_backward")
        self.loss.backward()
        self("before_step")
        self.opt.step()
        self.sched.step()
        self("after_batch")
        self.opt.zero_grad()

    def fit_one_cycle(self, epochs):
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=self.lr, betas=(0.95, 0.99), weight_decay=0.01)
        steps = epochs * len(self.loader)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, self.lr, total_steps=steps, cycle_momentum=False)
        for _ in range(epochs):
            self.model.train()
            for batch in self.loader:
                self.xb, self.yb = batch
                self.one_batch()


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


def main():
    torch.manual_seed(0)
    centers = torch.randn(6, 3, 16, 16)
    y = torch.randint(6, (6400,))
    x = centers[y] + 3 * torch.randn(6400, 3, 16, 16)
    clock = Clock()
    model = nn.Sequential(block(3, 16), block(16, 32), block(32, 64), nn.Flatten(), nn.Linear(256, 6))
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    Learner(loader, model, nn.CrossEntropyLoss(), 3e-3, [Recorder(clock)]).fit_one_cycle(2 * LONGER)
    clock.end(model)


if __name__ == "__main__":
    main()
