"""REINFORCE: one backward pass per episode, in the manner of the reinforcement learning examples."""

import random

import torch
from clock import LONGER, Clock
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 128)
        self.dropout = nn.Dropout(p=0.1)
        self.affine2 = nn.Linear(128, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return self.affine2(torch.relu(self.dropout(self.affine1(x)))).softmax(dim=1)


def main():
    random.seed(0)
    torch.manual_seed(0)
    clock, policy = Clock(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(150 * LONGER):
        x, v = random.uniform(-1, 1), 0.0
        for _ in range(20):
            m = Categorical(policy(torch.tensor([[x, v]])))
            action = m.sample()
            policy.saved_log_probs.append(m.log_prob(action))
            v = 0.9 * v + (0.2 if action.item() else -0.2)
            x += 0.2 * v
            policy.rewards.append(1 - min(1.0, abs(x)))
        total, returns = 0.0, []
        for reward in reversed(policy.rewards):
            total = reward + 0.9 * total
            returns.insert(0, total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        policy_loss = [-log * value for log, value in zip(policy.saved_log_probs, returns, strict=True)]
        optimizer.zero_grad()
        policy_loss = torch.cat(policy_loss).sum()
        policy_loss.backward()
        optimizer.step()
        clock.step(policy_loss.detach())
        del policy.rewards[:], policy.saved_log_probs[:]
    clock.end(policy)


if __name__ == "__main__":
    main()
