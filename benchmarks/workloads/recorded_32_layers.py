"""The 2.7-billion-parameter language model behind two memory recordings (source: kkaitlyn111/cs336-a2-systems).

32 layers, width 2560, 32 heads, feed-forward 10,240, vocabulary 10,000, batch 4, float32, rotary positions gathered
from a table in every layer, attention and softmax written out, gated SiLU feed-forward, untied head, and an AdamW that
updates its moments in place. What is written in one expression and what gets a name decides when a tensor dies; it
follows the recorded order of allocations and frees.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

VOCABULARY = 10_000


class Linear(nn.Module):
    """y = x W^T without a bias, as an einsum (which runs as a batched matrix product)."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(num_outputs, num_inputs), std=0.02))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", inputs, self.weight)


class Norm(nn.Module):
    """Root-mean-square norm by way of the Euclidean norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        scale = torch.sqrt(length**2 / inputs.shape[-1] + 1e-5)
        scaled = inputs / scale
        return torch.einsum("...d,d->...d", scaled, self.weight)


class Rotary(nn.Module):
    """Rotary positions, each layer with its own table: positions x half of a head x (cosine, sine)."""

    def __init__(self, num_positions: int, head_width: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(num_positions).float(), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin()), dim=-1), persistent=False)

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        table = self.get_buffer("table")
        cosine = table[..., 0][positions].unsqueeze(1)
        sine = table[..., 1][positions].unsqueeze(1)
        even, odd = heads[..., 0::2], heads[..., 1::2]
        rotated = torch.empty_like(heads)
        rotated[..., 0::2] = even * cosine - odd * sine
        rotated[..., 1::2] = even * sine + odd * cosine
        return rotated


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, shifted by the maximum."""
    largest = torch.max(scores, dim=-1, keepdim=True).values
    powers = torch.exp(scores - largest)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


class Attention(nn.Module):
    """Causal self-attention with every intermediate in memory."""

    def __init__(self, width: int, num_heads: int, num_positions: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (Linear(width, width) for _ in range(4))
        self.rotary = Rotary(num_positions, width // num_heads)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("...qd,...kd->...qk", query, key)
        scores = scores / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712 - the comparison makes a tensor, as recorded
        weights = softmax(scores)
        return torch.einsum("...qk,...kd->...qd", weights, value)

    def forward(self, inputs: Tensor) -> Tensor:
        num_items, num_tokens, _ = inputs.shape
        query_rows, key_rows, value_rows = self.query(inputs), self.key(inputs), self.value(inputs)
        query = query_rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key = key_rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        value = value_rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        positions = torch.arange(num_tokens, device=inputs.device).unsqueeze(0).expand(num_items, -1)
        query = self.rotary(query, positions)
        key = self.rotary(key, positions)
        mask = torch.triu(torch.ones(num_tokens, num_tokens, device=inputs.device), diagonal=1).to(torch.bool)
        mask = ~mask
        mask = mask[None, None].expand(num_items, self.num_heads, -1, -1)
        attended = self.attend(query, key, value, mask)
        attended = attended.transpose(1, 2).flatten(2)
        return self.output(attended)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x) with SiLU as x times sigmoid of x, every step named."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = (
            Linear(width, inner_width),
            Linear(inner_width, width),
            Linear(width, inner_width),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        gate = self.gate(inputs)
        up = self.up(inputs)
        active = gate * torch.sigmoid(gate)
        gated = active * up
        return self.down(gated)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input; one name for what passes between them."""

    def __init__(self, width: int, num_heads: int, inner_width: int, num_positions: int) -> None:
        super().__init__()
        self.first_norm, self.attention = Norm(width), Attention(width, num_heads, num_positions)
        self.second_norm, self.feed_forward = Norm(width), FeedForward(width, inner_width)

    def forward(self, hidden: Tensor) -> Tensor:
        change = self.first_norm(hidden)
        change = self.attention(change)
        hidden = hidden + change
        change = self.second_norm(hidden)
        change = self.feed_forward(change)
        return hidden + change


class LanguageModel(nn.Module):
    """Tokens (batch x positions) to logits (batch x positions x vocabulary)."""

    def __init__(self, num_layers: int, width: int, num_heads: int, inner_width: int, num_positions: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(nn.init.normal_(torch.empty(VOCABULARY, width)))
        self.blocks = nn.ModuleList(Block(width, num_heads, inner_width, num_positions) for _ in range(num_layers))
        self.norm, self.head = Norm(width), Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding[tokens]
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log softmax of the targets, from the exponentials."""
    flat, labels = logits.flatten(0, 1), targets.flatten()
    largest = torch.max(flat, dim=-1, keepdim=True).values
    shifted = flat - largest
    powers = torch.exp(shifted)
    total = torch.sum(powers, dim=-1)
    chosen = shifted[torch.arange(len(labels), device=labels.device), labels]
    losses = torch.log(total) - chosen
    return losses.mean()


class InPlaceAdamW(torch.optim.Optimizer):
    """AdamW that updates its moments in place; parameter by parameter, no foreach."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        del closure
        for group in self.param_groups:
            rate, (beta_first, beta_second), decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                gradient, state = parameter.grad.data, self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["first"] = torch.zeros_like(parameter.data)
                    state["second"] = torch.zeros_like(parameter.data)
                state["count"] += 1
                state["first"].mul_(beta_first).add_(gradient, alpha=1 - beta_first)
                state["second"].mul_(beta_second).addcmul_(gradient, gradient, value=1 - beta_second)
                corrected = rate * math.sqrt(1 - beta_second ** state["count"]) / (1 - beta_first ** state["count"])
                change = state["first"] / state["second"].sqrt().add_(group["eps"])
                parameter.data.add_(change, alpha=-corrected)
                parameter.data.mul_(1 - rate * decay)


def train(
    *,
    num_layers: int = 32,
    width: int = 2560,
    num_heads: int = 32,
    inner_width: int = 10_240,
    num_tokens: int = 256,
    batch_size: int = 4,
    device: str = "cuda",
) -> Iterator[Tensor]:
    """Training steps on one batch that is its own target; the recording is of the first."""
    network = LanguageModel(num_layers, width, num_heads, inner_width, num_tokens).to(device)
    optimizer = InPlaceAdamW(network.parameters())
    batch = torch.randint(0, VOCABULARY, (batch_size, num_tokens)).to(device)
    while True:
        optimizer.zero_grad()
        logits = network(batch)
        loss = cross_entropy(logits, batch)
        loss.backward()
        optimizer.step()
        yield loss


def forward_only(
    *,
    num_layers: int = 32,
    width: int = 2560,
    num_heads: int = 32,
    inner_width: int = 10_240,
    num_tokens: int = 128,
    batch_size: int = 4,
    device: str = "cuda",
) -> Iterator[Tensor]:
    """Forward passes that keep their graph; the recording is of the first, from an empty cache."""
    network = LanguageModel(num_layers, width, num_heads, inner_width, num_tokens).to(device)
    batch = torch.randint(0, VOCABULARY, (batch_size, num_tokens)).to(device)
    while True:
        logits = network(batch)
        yield logits
