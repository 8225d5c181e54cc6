"""The 24-layer language model behind two memory recordings (source of the recordings: Wedsonlin/assignment2-systems).

Width 1024, 16 heads, feed-forward 4096, vocabulary 10,000, batch 4, float32. Root-mean-square norm before each half,
rotary positions from one shared table, attention and softmax written out, gated SiLU feed-forward, untied head, log
softmax and gather as the loss, and an AdamW that makes new tensors in every update. What is written in one expression
and what gets a name decides when a tensor dies; it follows the recorded order of allocations and frees.
"""

import itertools
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
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        scale = torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + 1e-5)
        scaled = inputs * scale
        return self.weight * scaled


class Rotary(nn.Module):
    """Rotary positions: a table of cosines and sines, shape 2 x positions x half of a head."""

    def __init__(self, num_positions: int, head_width: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(num_positions).float(), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        first, second = heads.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cosine, sine = self.get_buffer("table")[:, : heads.shape[-2]].unbind(0)
        rotated_first = cosine * first - sine * second
        rotated_second = sine * first + cosine * second
        return torch.cat((rotated_first, rotated_second), dim=-1)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, shifted by the maximum."""
    shifted = scores - scores.max(dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / powers.sum(dim=-1, keepdim=True)


class Attention(nn.Module):
    """Causal self-attention with every intermediate in memory."""

    def __init__(self, width: int, num_heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.num_heads, self.rotary = num_heads, rotary
        self.query, self.key, self.value, self.output = (Linear(width, width) for _ in range(4))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
        scores = torch.where(mask, scores, float("-inf"))
        weights = softmax(scores)
        return torch.einsum("...qk,...kd->...qd", weights, value)

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        mask = (positions[:, None] >= positions[None, :])[None]
        attended = self.attend(query, key, value, mask)
        attended = attended.transpose(1, 2).flatten(2).contiguous()
        return self.output(attended)


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x) with SiLU as x times sigmoid of x."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = (
            Linear(width, inner_width),
            Linear(inner_width, width),
            Linear(width, inner_width),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(silu(self.gate(inputs)) * self.up(inputs))


def silu(inputs: Tensor) -> Tensor:
    """x * sigmoid(x), two tensors."""
    return inputs * torch.sigmoid(inputs)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    def __init__(self, width: int, num_heads: int, inner_width: int, rotary: Rotary) -> None:
        super().__init__()
        self.first_norm, self.attention = Norm(width), Attention(width, num_heads, rotary)
        self.second_norm, self.feed_forward = Norm(width), FeedForward(width, inner_width)

    def forward(self, inputs: Tensor) -> Tensor:
        attended = self.attention(self.first_norm(inputs))
        middle = inputs + attended
        fed = self.feed_forward(self.second_norm(middle))
        return middle + fed


class LanguageModel(nn.Module):
    """Tokens (batch x positions) to logits (batch x positions x vocabulary)."""

    def __init__(self, num_layers: int, width: int, num_heads: int, inner_width: int, num_positions: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(nn.init.normal_(torch.empty(VOCABULARY, width)))
        rotary = Rotary(num_positions, width // num_heads)
        self.blocks = nn.ModuleList(Block(width, num_heads, inner_width, rotary) for _ in range(num_layers))
        self.norm, self.head = Norm(width), Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding[tokens, :]
        hidden = embedded
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log softmax of the targets."""
    negative = -log_softmax(logits)
    return torch.gather(negative, -1, targets.unsqueeze(-1)).mean()


def log_softmax(logits: Tensor) -> Tensor:
    """Log softmax over the last dimension, shifted by the maximum."""
    largest = logits.max(dim=-1, keepdim=True)[0]
    logits = logits - largest
    return logits - torch.log(torch.exp(logits).sum(dim=-1, keepdim=True))


class NewTensorAdamW(torch.optim.Optimizer):
    """AdamW whose moments are new tensors in every step; parameter by parameter, no foreach."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        del closure
        for group in self.param_groups:
            rate, (beta_first, beta_second), decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad.data
                count = state.get("count", 0) + 1
                parameter.data -= rate * decay * parameter.data
                previous_first = state.get("first", torch.zeros_like(gradient))
                previous_second = state.get("second", torch.zeros_like(gradient))
                first = beta_first * previous_first + (1 - beta_first) * gradient
                second = beta_second * previous_second + (1 - beta_second) * torch.pow(gradient, 2)
                corrected = rate * math.sqrt(1 - beta_second**count) / (1 - beta_first**count)
                parameter.data -= corrected * first / (torch.sqrt(second) + group["eps"])
                state["count"], state["first"], state["second"] = count, first, second


def _batches(num_warm_up_steps: int, batch_size: int, num_tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """The tokens of all warm-up steps, and of the recorded one, made on the device."""
    shape = (batch_size, num_tokens)
    warm_up = torch.randint(0, VOCABULARY, (num_warm_up_steps, *shape), device=device)
    return warm_up, torch.randint(0, VOCABULARY, (1, *shape), device=device)


def train(
    *,
    num_layers: int = 24,
    width: int = 1024,
    num_heads: int = 16,
    inner_width: int = 4096,
    num_tokens: int = 256,
    batch_size: int = 4,
    num_warm_up_steps: int = 5,
    device: str = "cuda",
) -> Iterator[None]:
    """Training steps; all batches are made on the card beforehand, gradients are dropped after the optimizer."""
    network = LanguageModel(num_layers, width, num_heads, inner_width, num_tokens).to(device)
    optimizer = NewTensorAdamW(network.parameters())
    inputs, recorded_inputs = _batches(num_warm_up_steps, batch_size, num_tokens, device)
    targets, recorded_targets = _batches(num_warm_up_steps, batch_size, num_tokens, device)
    network.train()
    for tokens, labels in itertools.chain(
        zip(inputs, targets, strict=True), itertools.cycle(zip(recorded_inputs, recorded_targets, strict=True))
    ):
        logits = network(tokens)
        loss = cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        # The recorded step is the one after the last warm-up step, whose outputs had been deleted.
        yield None
        optimizer.zero_grad()
        del logits, loss


def infer(
    *,
    num_layers: int = 24,
    width: int = 1024,
    num_heads: int = 16,
    inner_width: int = 4096,
    num_tokens: int = 128,
    batch_size: int = 4,
    num_warm_up_steps: int = 5,
    device: str = "cuda",
) -> Iterator[None]:
    """Forward passes in inference mode; the logits are dropped at once."""
    network = LanguageModel(num_layers, width, num_heads, inner_width, num_tokens).to(device)
    inputs, recorded_inputs = _batches(num_warm_up_steps, batch_size, num_tokens, device)
    network.eval()
    with torch.inference_mode():
        for tokens in itertools.chain(inputs, itertools.cycle(recorded_inputs)):
            network(tokens)
            yield None
