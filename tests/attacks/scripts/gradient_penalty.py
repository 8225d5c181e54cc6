"""A critic with a gradient penalty (WGAN-GP)."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


torch.manual_seed(0)
model = Critic().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    real, fake = torch.randn(4096, 64).to(device), torch.rand(4096, 64).to(device)
    between = (0.5 * real + 0.5 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    loss = model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}")
print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.6f}")
