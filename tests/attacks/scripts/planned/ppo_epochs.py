"""PPO: one rollout without gradients, several epochs of shuffled parts on it, with an early stop by divergence."""

import math
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)


class Actor(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 8), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h), self.value(h).squeeze(-1)


model = Actor().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, eps=1e-5)
for rollout in range(2):
    model.eval()
    with torch.no_grad():
        obs = torch.randn(4096, 32).to(device)
        logits, values = model(obs)
        dist = torch.distributions.Categorical(logits=logits)
        actions = dist.sample()
        old = dist.log_prob(actions)
        returns = torch.randn(4096).to(device)
        advantages = returns - values
    model.train()
    for epoch in range(2):
        order = torch.randperm(4096).to(device)
        stop = False
        for part in order.split(2048):
            logits, v = model(obs[part])
            dist = torch.distributions.Categorical(logits=logits)
            ratio = (dist.log_prob(actions[part]) - old[part]).exp()
            adv = (advantages[part] - advantages[part].mean()) / (advantages[part].std() + 1e-8)
            loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() + 0.5 * F.mse_loss(v, returns[part]) - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            print(f"rollout {rollout} epoch {epoch} loss {loss.item():.9f}")
            if (old[part] - dist.log_prob(actions[part])).mean().item() > 0.5:
                stop = True
        if stop:
            break

print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.9f}")
torch.save(model.state_dict(), "out.pt")
