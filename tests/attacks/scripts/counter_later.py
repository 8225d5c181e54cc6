"""Blocks whose output depends on a counter that starts to matter at the fifth step, later than any trace sees."""

import torch
from torch import nn
from torch.nn import functional

device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.calls = 0
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        self.calls += 1
        scale = 1.0 if self.calls < 5 else 1.0 + 0.1 * self.calls
        return x + self.narrow(functional.gelu(scale * self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(7):
    x, y = torch.randn(4096, 64).to(device), torch.randint(0, 10, (4096,)).to(device)
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}")
print(f"weights {sum(float(p.detach().double().abs().sum()) for p in model.parameters()):.6f}")
