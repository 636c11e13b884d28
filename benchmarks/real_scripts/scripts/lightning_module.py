"""A LightningModule and a Trainer."""

import warnings

import lightning as L
import torch
from clock import LONGER, Clock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Ticks(L.Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.clock.step(outputs["loss"])


def main():
    L.seed_everything(0, verbose=False)
    centers = torch.randn(10, 256)
    y = torch.randint(10, (12800,))
    x = centers[y] + 4 * torch.randn(12800, 256)
    clock, model = Clock(), Digits()
    trainer = L.Trainer(
        max_epochs=2 * LONGER,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks(clock)],
    )
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True))
    clock.end(model)


if __name__ == "__main__":
    main()
