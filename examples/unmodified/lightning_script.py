"""An autoencoder as a LightningModule, trained and validated by a Trainer on data made up here.

The script knows nothing of gradvitals:

    python examples/unmodified/lightning_script.py --max-epochs 2
    gradvitals run examples/unmodified/lightning_script.py --max-epochs 2
"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class AutoEncoder(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self(x), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", metavar="FILE", help="where to keep the weights")
    args = parser.parse_args()

    L.seed_everything(7, verbose=False)
    data = torch.randn(1024, 4) @ torch.randn(4, 32) + 0.1 * torch.randn(1024, 32)
    train_set, val_set = random_split(TensorDataset(data), [896, 128])
    model = AutoEncoder(args.lr)
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        precision=args.precision,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train_set, args.batch_size, shuffle=True), DataLoader(val_set, 128))
    print(f"{trainer.global_step} steps, validation loss {trainer.callback_metrics['val_loss']:.4f}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
