"""Ten small workloads that take their device, for comparing a real run with a virtual one.

They keep to operators that torch takes apart alike for the host and for a card; dropout, SiLU and attention kernels it does not.
"""

import torch
from torch import nn
from torch.nn import functional


def _loop(model, make_batch, loss_of, optimizer, num_steps=2):
    for _ in range(num_steps):
        batch = make_batch()
        loss = loss_of(model(*batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def perceptron(device):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
    _loop(
        model,
        lambda: (torch.randn(32, 64, device=device),),
        lambda out: functional.cross_entropy(out, torch.randint(0, 10, (32,), device=device)),
        torch.optim.AdamW(model.parameters(), foreach=False),
    )


def convolutional(device):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.Flatten(),
        nn.Linear(32 * 36, 5),
    ).to(device)
    _loop(
        model,
        lambda: (torch.randn(4, 3, 16, 16, device=device),),
        lambda out: out.square().mean(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    )


class _Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return x + self.out(weights @ v)


def attention(device):
    model = nn.Sequential(*(_Block(64) for _ in range(3))).to(device)
    _loop(
        model,
        lambda: (torch.randn(2, 40, 64, device=device),),
        lambda out: out.sum(),
        torch.optim.Adam(model.parameters(), foreach=False),
    )


def checkpointed(device):
    blocks = nn.ModuleList(_Block(32) for _ in range(4)).to(device)

    def forward(x):
        for block in blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x

    _loop(
        forward,
        lambda: (torch.randn(2, 24, 32, device=device),),
        lambda out: out.sum(),
        torch.optim.SGD(blocks.parameters(), lr=0.1, foreach=False),
    )


def embedding_tied(device):
    table = nn.Embedding(100, 48).to(device)
    head = nn.Linear(48, 100, bias=False).to(device)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Tanh(), head)
    _loop(
        model,
        lambda: (torch.randint(0, 100, (4, 12), device=device),),
        lambda out: functional.cross_entropy(out.view(-1, 100), torch.zeros(48, dtype=torch.long, device=device)),
        torch.optim.Adagrad(model.parameters(), foreach=False),
    )


def residual_groups(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(4, 8, 3, padding=1, groups=2)
            self.second = nn.Conv2d(8, 8, 3, padding=1)
            self.norm = nn.GroupNorm(2, 8)
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)

        def forward(self, x):
            x = functional.relu(self.norm(self.first(x)))
            return self.up(functional.avg_pool2d(x + self.second(x), 2))

    model = Net().to(device)
    _loop(
        model,
        lambda: (torch.randn(2, 4, 16, 16, device=device),),
        lambda out: out.pow(2).sum(),
        torch.optim.RMSprop(model.parameters(), foreach=False),
    )


def accumulated_and_clipped(device):
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    average = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        for _ in range(3):
            (model(torch.randn(8, 32, device=device)).mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for held, now in zip(average, model.parameters(), strict=True):
                held.mul_(0.9).add_(now, alpha=0.1)


def custom_function(device):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient * weight, (gradient * x).sum(0)

    weight = nn.Parameter(torch.ones(16, device=device))
    _loop(
        lambda x: Scale.apply(x, weight),
        lambda: (torch.randn(4, 16, device=device),),
        lambda out: out.sum(),
        torch.optim.SGD([weight], lr=0.1, foreach=False),
    )


def experts(device):
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))

    model = Mixture().to(device)
    _loop(
        model,
        lambda: (torch.randn(8, 16, device=device),),
        lambda out: out.sum(),
        torch.optim.NAdam(model.parameters(), foreach=False),
    )


def indexing_and_sorting(device):
    weight = nn.Parameter(torch.randn(20, 8, device=device))

    def forward(rows):
        picked = weight[rows]
        top = picked.topk(3, dim=1).values
        return torch.cat([top, picked.cumsum(1)], 1).masked_fill(torch.arange(11, device=device) > 8, 0.0)

    _loop(
        forward,
        lambda: (torch.randint(0, 20, (6,), device=device),),
        lambda out: out.sum(),
        torch.optim.SGD([weight], lr=0.1, foreach=False),
    )


MODELS = {
    f.__name__: f
    for f in (
        perceptron,
        convolutional,
        attention,
        checkpointed,
        embedding_tied,
        residual_groups,
        accumulated_and_clipped,
        custom_function,
        experts,
        indexing_and_sorting,
    )
}
