"""An actor and a critic that share a layer, in the manner of the reinforcement learning examples."""

import random

import torch
from clock import LONGER, Clock
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)

    def forward(self, x):
        x = torch.relu(self.affine1(x))
        return self.action_head(x).softmax(dim=-1), self.value_head(x)


def main():
    random.seed(0)
    torch.manual_seed(0)
    clock, model = Clock(), Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150 * LONGER):
        x, v, saved, rewards = random.uniform(-1, 1), 0.0, [], []
        for _ in range(20):
            probs, value = model(torch.tensor([x, v]))
            m = Categorical(probs)
            action = m.sample()
            saved.append((m.log_prob(action), value))
            v = 0.9 * v + (0.2 if action.item() else -0.2)
            x += 0.2 * v
            rewards.append(1 - min(1.0, abs(x)))
        total, returns = 0.0, []
        for reward in reversed(rewards):
            total = reward + 0.9 * total
            returns.insert(0, total)
        policy_losses, value_losses = [], []
        for (log_prob, value), target in zip(saved, returns, strict=True):
            policy_losses.append(-log_prob * (target - value.item()))
            value_losses.append(nn.functional.smooth_l1_loss(value, torch.tensor([target])))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        clock.step(loss.detach())
    clock.end(model)


if __name__ == "__main__":
    main()
