"""DQN with a target network and a replay buffer on a small control task, in the manner of CleanRL's single files."""

import random

import torch
from clock import LONGER, Clock
from torch import nn


class Cart:
    """A point on a line that is pushed left or right, and should stay near 0."""

    def reset(self):
        self.x, self.v, self.t = random.uniform(-0.5, 0.5), 0.0, 0
        return [self.x, self.v]

    def step(self, action):
        self.v = 0.95 * self.v + (0.1 if action else -0.1) + random.gauss(0, 0.01)
        self.x, self.t = self.x + 0.1 * self.v, self.t + 1
        return [self.x, self.v], 1.0 - min(1.0, abs(self.x)), self.t >= 50 or abs(self.x) > 2


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 2))

    def forward(self, x):
        return self.network(x)


def main():
    random.seed(0)
    torch.manual_seed(0)
    clock = Clock()
    q_network, target_network = QNetwork(), QNetwork()
    optimizer = torch.optim.Adam(q_network.parameters(), lr=5e-4)
    target_network.load_state_dict(q_network.state_dict())
    envs, buffer = Cart(), []
    obs = envs.reset()
    for global_step in range(3000 * LONGER):
        epsilon = max(0.05, 1.0 - global_step / 1500)
        explores = random.random() < epsilon
        action = random.randrange(2) if explores else int(torch.argmax(q_network(torch.tensor([obs]))))
        following, reward, done = envs.step(action)
        buffer.append((obs, action, reward, following, float(done and envs.t < 50)))
        obs = envs.reset() if done else following
        if global_step > 500 and global_step % 8 == 0:
            batch = random.sample(buffer, 128)
            states, actions, rewards, nexts, dones = (torch.tensor(column) for column in zip(*batch, strict=True))
            with torch.no_grad():
                target_max, _ = target_network(nexts).max(dim=1)
                td_target = rewards + 0.95 * target_max * (1 - dones)
            old_val = q_network(states).gather(1, actions[:, None]).squeeze(1)
            loss = nn.functional.mse_loss(td_target, old_val)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clock.step(loss.detach())
            if global_step % 80 == 0:
                for target, value in zip(target_network.parameters(), q_network.parameters(), strict=True):
                    target.data.copy_(value.data)
    clock.end(q_network)


if __name__ == "__main__":
    main()
