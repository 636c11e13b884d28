"""A Lightning Trainer that starts its second rank itself."""

import sys
import warnings

import lightning as L
import torch
from clock import Clock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return nn.functional.mse_loss(self.layer(x), x[:, :4])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Ticks(L.Callback):
    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.clock.step(outputs["loss"])


def main():
    L.seed_everything(0, verbose=False)
    clock, model = Clock(), Model()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Ticks(clock)],
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(3200, 32)), batch_size=32))
    if trainer.is_global_zero:
        clock.end(model)


if __name__ == "__main__":
    sys.exit(main())
