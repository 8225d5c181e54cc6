"""Attentions as models write them, and one of them as a workload for the virtual GPU."""

import math
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from tightfit.planner.plan import Choice
from tightfit.techniques.attention.attention_kernels import Attention
from tightfit.techniques.session import Session

Heads = Callable[["Layer", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(torch.nn.Module):
    """One attention with a causal mask in a buffer; `way` says how it is written."""

    def __init__(
        self, way: str = "masked fill", width: int = 32, num_heads: int = 4, length: int = 12, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.way, self.num_heads, self.dropout = way, num_heads, torch.nn.Dropout(dropout)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(length, length).tril().bool())
        self.bias = torch.nn.Parameter(torch.randn(num_heads, length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, length, width)` to the same."""
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.num_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = WAYS[self.way](self, q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _masked_fill(layer, q, k, v):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(layer.mask == 0, float("-inf"))
    return layer.dropout(functional.softmax(scores, dim=-1)) @ v


def _added(layer, q, k, v):
    mask = torch.zeros(layer.mask.shape).masked_fill(~layer.mask, torch.finfo(torch.float32).min)
    weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(k.size(-1)) + mask
    weights = functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(functional.dropout(weights, p=0.0, training=layer.training), v)


def _in_place(layer, q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores /= math.sqrt(k.size(-1))
    scores += layer.bias
    scores.masked_fill_(~layer.mask, -1e9)
    return torch.matmul(scores.float().softmax(-1).type_as(scores), v)


def _einsum(layer, q, k, v):
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.3
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(torch.where(layer.mask, scores, float("-inf")), -1), v)


def _einsum_time_first(layer, q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.einsum("bthd,bshd->bhts", q, k * 0.2).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).transpose(1, 2)


def _batched(layer, q, k, v):
    flat = [t.reshape(-1, *t.shape[-2:]) for t in (q * 0.4, k, v)]
    scores = torch.bmm(flat[0], flat[1].transpose(1, 2)) + layer.mask.float().sub(1).mul(1e9)
    return torch.bmm(functional.softmax(scores, -1), flat[2]).view_as(q)


def _padding(layer, q, k, v):
    padding = (torch.arange(12) < torch.tensor([[12], [9], [4]]))[:, None, None, :]
    scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(~layer.mask, float("-inf")) + (~padding) * -1e30
    return layer.dropout(torch.nn.Softmax(dim=-1)(scores.masked_fill(~padding, float("-inf")))) @ v


def _looked_at(layer, q, k, v):
    weights = (q @ k.transpose(-2, -1) * 0.3).softmax(-1)
    return weights @ v + weights.mean() + weights.amax(-1, keepdim=True)


def _sharpened(layer, q, k, v):
    weights = torch.tanh(q @ k.transpose(-2, -1)).softmax(-1)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def _over_queries(layer, q, k, v):
    return (q @ k.transpose(-2, -1) * 0.3).softmax(-2) @ v


WAYS: dict[str, Heads] = {
    "masked fill": _masked_fill,
    "added mask": _added,
    "in place": _in_place,
    "einsum": _einsum,
    "einsum, time first": _einsum_time_first,
    "batched": _batched,
    "padding": _padding,
}

WHOLE_WAYS: dict[str, Heads] = {
    "looked at": _looked_at,
    "sharpened": _sharpened,
    "over queries": _over_queries,
}
WAYS |= WHOLE_WAYS


def choice(*modules: str) -> Choice:
    """A choice as a plan carries it."""
    where = modules[0].partition(".")[0]
    return Choice(
        technique="attention", where=where, settings={"modules": modules}, saves_bytes=0, adds_seconds=0.0, exact=True
    )


def workload(
    applied: int = 0, dropout: float = 0.0, num_layers: int = 3, dtype: str = "float32"
) -> Iterator[torch.Tensor]:
    """A stack of layers on the virtual GPU."""
    layers = (Layer(width=256, num_heads=8, length=512, dropout=dropout) for _ in range(num_layers))
    model = torch.nn.Sequential(*layers).to(getattr(torch, dtype)).cuda()
    for layer in model:
        layer.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    if applied:
        modules = [f"Sequential.{i}" for i in range(num_layers)]
        Attention().apply(Session(model=model, optimizers=[optimizer]), [choice(*modules)])
    while True:
        loss = model(torch.randn(4, 512, 256, device="cuda", dtype=getattr(torch, dtype))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
