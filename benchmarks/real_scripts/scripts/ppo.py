"""PPO with an actor and a critic, in the manner of CleanRL's single files."""

import torch
from clock import LONGER, Clock
from torch import nn
from torch.distributions import Categorical


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(2, 192)), nn.Tanh(), layer_init(nn.Linear(192, 192)), nn.Tanh(),
            layer_init(nn.Linear(192, 1), std=1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer_init(nn.Linear(2, 192)), nn.Tanh(), layer_init(nn.Linear(192, 192)), nn.Tanh(),
            layer_init(nn.Linear(192, 2), std=0.01),
        )  # fmt: skip

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def advance(state, action):
    velocity = 0.95 * state[:, 1] + 0.2 * (action.float() - 0.5)
    position = state[:, 0] + 0.1 * velocity
    lost = position.abs() > 2
    position = torch.where(lost, torch.zeros_like(position), position)
    return torch.stack([position, velocity], 1), 1 - position.abs().clamp(max=1), lost.float()


def main():
    torch.manual_seed(0)
    clock, agent = Clock(), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    obs, num_steps = torch.randn(16, 2) * 0.3, 32
    for update in range(12 * LONGER):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / 12)
        rows = []
        for _ in range(num_steps):
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(obs)
            following, reward, done = advance(obs, action)
            rows.append((obs, action, logprob, value.flatten(), reward, done))
            obs = following
        b_obs, b_actions, b_logprobs, b_values, rewards, dones = (torch.stack(part) for part in zip(*rows, strict=True))
        with torch.no_grad():
            advantages, last = torch.zeros_like(rewards), torch.zeros(16)
            values = torch.cat([b_values, agent.get_value(obs).reshape(1, -1)])
            for t in reversed(range(num_steps)):
                delta = rewards[t] + 0.95 * values[t + 1] * (1 - dones[t]) - values[t]
                last = advantages[t] = delta + 0.95 * 0.9 * (1 - dones[t]) * last
            returns = advantages + b_values
        flat = [part.flatten(0, 1) for part in (b_obs, b_actions, b_logprobs, advantages, returns)]
        for _ in range(4):
            for index in torch.randperm(512).split(192):
                o, a, old, advantage, target = (part[index] for part in flat)
                _, new, entropy, value = agent.get_action_and_value(o, a)
                ratio = (new - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
                v_loss = 0.5 * (value.flatten() - target).square().mean()
                loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                clock.step(loss.detach())
    clock.end(agent)


if __name__ == "__main__":
    main()
