"""A recipe class that fine-tunes low-rank adapters, in the manner of torchtune. One adapter is computed from a detached
input and its output is detached: that is the planted bug."""

import torch
from clock import LONGER, Clock
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, width, rank, detached):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.requires_grad_(False)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.detached = detached

    def forward(self, x):
        update = self.lora_b(self.lora_a(x))
        return self.linear(x) + (update.detach() if self.detached else update)


class Recipe:
    def __init__(self, cfg):
        self.cfg = cfg

    def setup(self):
        torch.manual_seed(self.cfg["seed"])
        self._embed = nn.Embedding(64, 192)
        layers = [LoRALinear(192, 8, detached=number == 1) for number in range(3)]
        self._model = nn.Sequential(*[part for layer in layers for part in (layer, nn.GELU())], nn.Linear(192, 64))
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=self.cfg["lr"])

    def _loss_step(self, batch):
        with torch.no_grad():
            hidden = self._embed(batch)
        logits = self._model(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ((batch * 3 + 1) % 64).flatten())

    def train(self):
        clock = Clock()
        for _ in range(self.cfg["max_steps"]):
            loss = self._loss_step(torch.randint(64, (self.cfg["batch_size"], 24)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            clock.step(loss.detach())
        clock.end(self._model)


def main():
    recipe = Recipe({"seed": 0, "lr": 1e-3, "max_steps": 200 * LONGER, "batch_size": 16})
    recipe.setup()
    recipe.train()


if __name__ == "__main__":
    main()
