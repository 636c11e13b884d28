# ruff: noqa: D102, D103 - the name of a case says what it is
"""Healthy trainings that do not look like supervised learning, or are hard on a monitor: none should be alarming."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.real_bugs.cases import Transformer, language_loss
from benchmarks.real_bugs.data import images, mlp, regression, tabular, text
from benchmarks.real_bugs.loop import Knobs, adam, batches, fit, sgd

CONTROLS: dict[str, Callable[[], None]] = {}


def control(train: Callable[[], None]) -> Callable[[], None]:
    """Register a control."""
    CONTROLS[train.__name__] = train
    return train


class Cart:
    """Carts on a line, pushed left or right; the reward is high near the middle."""

    def __init__(self, count: int) -> None:
        self.state = torch.cat([2 * torch.rand(count, 1) - 1, torch.zeros(count, 1)], 1)

    def step(self, push: Tensor) -> Tensor:
        """Push each cart by -1 to 1; returns the rewards."""
        position, speed = self.state[:, :1], self.state[:, 1:]
        speed = 0.9 * speed + 0.1 * push[:, None]
        self.state = torch.cat([(position + speed).clamp(-2, 2), speed], 1)
        return 1 - self.state[:, 0].abs()


def returns_of(rewards: list[Tensor], discount: float = 0.95) -> Tensor:
    """Returns the discounted sums of the rewards to come, one row per step."""
    total, found = torch.zeros_like(rewards[0]), []
    for reward in reversed(rewards):
        total = reward + discount * total
        found.append(total)
    return torch.stack(found[::-1])


def _rollout(policy: nn.Module, length: int = 20, count: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    cart, states, actions, rewards = Cart(count), [], [], []
    for _ in range(length):
        states.append(cart.state)
        with torch.no_grad():
            actions.append(torch.distributions.Categorical(logits=policy(cart.state)).sample())
        rewards.append(cart.step(2.0 * actions[-1] - 1))
    return torch.stack(states), torch.stack(actions), returns_of(rewards)


@control
def reinforce() -> None:
    policy = mlp(2, 32, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(250):
        states, actions, returns = _rollout(policy)
        log_probs = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
        loss = -(log_probs * (returns - returns.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class ActorCritic(nn.Module):
    """A policy and a value with a common body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(2, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.policy(h), self.value(h).squeeze(-1)


@control
def actor_critic() -> None:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        states, actions, returns = _rollout(lambda s: model(s)[0])  # type: ignore[arg-type]
        logits, values = model(states)
        advantage = returns - values
        chosen = torch.distributions.Categorical(logits=logits)
        policy_loss = -(chosen.log_prob(actions) * advantage.detach()).mean()
        loss = policy_loss + 0.5 * advantage.square().mean() - 0.01 * chosen.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@control
def ppo() -> None:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        states, actions, returns = _rollout(lambda s: model(s)[0])  # type: ignore[arg-type]
        with torch.no_grad():
            logits, values = model(states)
            before = torch.distributions.Categorical(logits=logits).log_prob(actions)
            advantage = returns - values
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        for _ in range(5):
            logits, values = model(states)
            ratio = (torch.distributions.Categorical(logits=logits).log_prob(actions) - before).exp()
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = -clipped + 0.5 * (returns - values).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@control
def dqn() -> None:
    network = mlp(2, 32, 2)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    cart = Cart(64)
    for step in range(500):
        state = cart.state
        with torch.no_grad():
            greedy = network(state).argmax(1)
        action = torch.where(torch.rand(64) < 0.2, torch.randint(2, (64,)), greedy)
        reward = cart.step(2.0 * action - 1)
        with torch.no_grad():
            goal = reward + 0.9 * target(cart.state).max(1).values
        value = network(state).gather(1, action[:, None]).squeeze(1)
        loss = functional.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            target.load_state_dict(network.state_dict())
            cart = Cart(64)


@control
def soft_actor_critic() -> None:
    actor, critic = mlp(2, 32, 2), mlp(3, 32, 1)
    target = copy.deepcopy(critic)
    of_actor, of_critic = (torch.optim.Adam(one.parameters(), lr=3e-3) for one in (actor, critic))
    cart = Cart(64)

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(state).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-4, 1).exp())
        raw = normal.rsample()
        push = torch.tanh(raw)
        return push, (normal.log_prob(raw) - (1 - push.square() + 1e-6).log()).sum(1, keepdim=True)

    for step in range(400):
        state = cart.state
        with torch.no_grad():
            push, _ = act(state)
            reward = cart.step(push[:, 0])[:, None]
            then, log_prob = act(cart.state)
            goal = reward + 0.9 * (target(torch.cat([cart.state, then], 1)) - 0.1 * log_prob)
        value_loss = functional.mse_loss(critic(torch.cat([state, push], 1)), goal)
        of_critic.zero_grad()
        value_loss.backward()
        of_critic.step()
        push, log_prob = act(state)
        loss = (0.1 * log_prob - critic(torch.cat([state, push], 1))).mean()
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
        if step % 50 == 49:
            cart = Cart(64)


@control
def gan() -> None:
    generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    score = functional.binary_cross_entropy_with_logits
    for _ in range(400):
        angle = 2 * math.pi * torch.rand(64, 1)
        real = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
        fake = generator(torch.randn(64, 4))
        loss = score(critic(real), torch.ones(64, 1)) + score(critic(fake.detach()), torch.zeros(64, 1))
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        loss = score(critic(fake), torch.ones(64, 1))
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()


@control
def contrastive() -> None:
    encoder = mlp(16, 64, 16)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    for _ in range(400):
        x = torch.randn(64, 16)
        views = [functional.normalize(encoder(x + 0.3 * torch.randn_like(x)), dim=1) for _ in range(2)]
        loss = functional.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@control
def distillation_from_a_moving_average() -> None:
    student = mlp(16, 64, 32)
    teacher = copy.deepcopy(student).requires_grad_(False)
    predictor = mlp(32, 32, 32)
    optimizer = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=2e-3)
    for _ in range(400):
        x = torch.randn(64, 16)
        views = [x + 0.3 * torch.randn_like(x) for _ in range(2)]
        loss = 2 - 2 * functional.cosine_similarity(predictor(student(views[0])), teacher(views[1])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.01)


@control
def tiny_batches() -> None:
    train, _ = tabular(3)
    model = mlp(8, 24, 3)
    fit(model, adam(model, Knobs(), 1e-3), functional.cross_entropy, train, Knobs(), steps=800, batch=2)


@control
def fine_tuning_with_a_frozen_body() -> None:
    (x, y), _ = images(6)
    body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(256, 6))
    with torch.no_grad():  # pretrained weights are no longer uniform
        for weight in body.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    body.requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
    fit(model, optimizer, functional.cross_entropy, (x, y), Knobs(), steps=400)


@control
def language_model_with_warmup() -> None:
    tokens = text()
    model = Transformer(layers=3, pre=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 40, 1) * 0.5 * (1.02 + math.cos(math.pi * min(s / 400, 1)))
    )
    data = (tokens[:, :-1], tokens[:, 1:])
    fit(model, optimizer, language_loss, data, Knobs(), steps=400, clip=1.0, schedule=schedule)


@control
def variational_autoencoder() -> None:
    (x, _), _ = images(6)
    x = x.flatten(1)
    encoder, decoder = mlp(100, 32, 8), mlp(4, 32, 100)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    for step in range(400):
        batch = x[torch.randint(len(x), (32,))]
        mean, log_variance = encoder(batch).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        fit_loss = functional.binary_cross_entropy_with_logits(decoder(code), batch, reduction="sum") / 32
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        loss = fit_loss + min(step / 100, 1) * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@control
def full_batch_least_squares() -> None:
    (x, y), _ = regression(4)
    model = nn.Linear(4, 1)
    fit(model, sgd(model, Knobs(), 0.1), functional.mse_loss, (x, y), Knobs(), steps=300, batch=1000)


@control
def noisy_labels() -> None:
    (x, y), _ = tabular(4)
    y = torch.where(torch.rand(len(y)) < 0.4, torch.randint(4, (len(y),)), y)
    model = mlp(8, 24, 4)
    source = batches((x, y), 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(500):
        inputs, labels = next(source)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
