"""Plain decoders by their sizes: MPT as llm-foundry trains it, and Llama as torchtitan does, each as a generator for tracing.

Two blocks are enough: `benchmarks.shard` counts one of them as often as the model has layers. Weights are in bfloat16, as FSDP's mixed precision gathers them.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class MptBlock(nn.Module):
    """Low-precision layer norm, fused query-key-value, flash attention, a GELU feed-forward layer four times as wide; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.gelu = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.down(self.gelu(self.up(self.norm_2(x))))


class ComposedRMSNorm(nn.RMSNorm):
    """RMS norm as torch composed it until 2.8, in the kernels and with the tensors of `rms_norm` in its layer_norm.cpp."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(1e-5))
        return (wide * inverse).type_as(x) * self.weight


class LlamaBlock(nn.Module):
    """RMS norm, grouped-query attention, a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, norm: type[nn.RMSNorm]) -> None:
        super().__init__()
        self.heads, self.kv_heads, size = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, kv_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        y = self.norm_1(x)
        q, k, v = (
            f(y).view(b, t, n, d // self.heads).transpose(1, 2)
            for f, n in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        # Rotary embedding, in the arithmetic of torchtitan: complex numbers of float32.
        q, k = (_rotated(z) for z in (q, k))
        k, v = (z.repeat_interleave(self.heads // self.kv_heads, 1) for z in (k, v))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mix(self.norm_2(x))

    def mix(self, y: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(y)) * self.up(y))


class ExpertsBlock(LlamaBlock):
    """A Llama block whose feed-forward layer are `experts`, of which each token uses `chosen`, and one that all tokens use."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__(width, heads, kv_heads, hidden, nn.RMSNorm)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, hidden, experts)
        self.chosen = chosen

    def mix(self, y: torch.Tensor) -> torch.Tensor:
        rows = y.flatten(0, 1)
        weights, chosen = self.router(rows).float().softmax(-1).topk(self.chosen)
        of_expert = chosen.flatten().argsort()
        ends = chosen.flatten().bincount(minlength=len(self.experts.up)).cumsum(0).int()
        found = self.experts(rows[of_expert // self.chosen], ends)
        found = found * weights.flatten()[of_expert, None].to(y.dtype)
        mixed = torch.zeros_like(rows).index_add_(0, of_expert // self.chosen, found)
        return super().mix(y) + mixed.view_as(y)


class Experts(nn.Module):
    """Gated feed-forward layers side by side, multiplied group by group."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        inner = silu(torch._grouped_mm(x, self.gate, offs=ends)) * torch._grouped_mm(x, self.up, offs=ends)
        return torch._grouped_mm(inner, self.down, offs=ends)


def _rotated(z: torch.Tensor) -> torch.Tensor:
    halves = z.float().unflatten(-1, (-1, 2))
    turned = torch.stack((halves[..., 0] - halves[..., 1], halves[..., 0] + halves[..., 1]), -1)
    return turned.flatten(-2).to(z.dtype)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head; `tied`: the head is the embedding."""

    def __init__(self, blocks: list[nn.Module], width: int, vocabulary: int, norm: nn.Module, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class FusedCrossEntropy(torch.autograd.Function):
    """The bytes that flash-attn's cross entropy moves and keeps, which llm-foundry uses: the logits are read once, and become their gradient in place."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        largest = logits.amax(-1).float()
        ctx.save_for_backward(logits, largest)
        return (largest - targets).mean()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, _ = ctx.saved_tensors
        return logits.mul_(gradient.to(logits.dtype)), None


def mpt(
    width: int, heads: int, batch: int = 1, sequence: int = 2048, vocabulary: int = 50368
) -> Iterator[torch.Tensor]:
    """Steps of an MPT of two layers."""
    blocks: list[nn.Module] = [MptBlock(width, heads) for _ in range(2)]
    yield from _steps(
        Decoder(blocks, width, vocabulary, nn.LayerNorm(width, bias=False), tied=True),
        batch,
        sequence,
        vocabulary,
        is_fused=True,
    )


def llama(
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    batch: int = 1,
    sequence: int = 8192,
    vocabulary: int = 128256,
    fused: int = 1,
) -> Iterator[torch.Tensor]:
    """Steps of a Llama of two layers; `fused`: its norms are one kernel."""
    norm = nn.RMSNorm if fused else ComposedRMSNorm
    blocks: list[nn.Module] = [LlamaBlock(width, heads, kv_heads, hidden, norm) for _ in range(2)]
    yield from _steps(
        Decoder(blocks, width, vocabulary, norm(width), tied=False), batch, sequence, vocabulary, is_fused=False
    )


def experts(
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    number: int,
    chosen: int,
    batch: int = 1,
    sequence: int = 4096,
    vocabulary: int = 163840,
) -> Iterator[torch.Tensor]:
    """Steps of a decoder of two layers with experts."""
    blocks: list[nn.Module] = [ExpertsBlock(width, heads, kv_heads, hidden, number, chosen) for _ in range(2)]
    yield from _steps(
        Decoder(blocks, width, vocabulary, nn.RMSNorm(width), tied=False), batch, sequence, vocabulary, is_fused=False
    )


def _steps(model: nn.Module, batch: int, sequence: int, vocabulary: int, *, is_fused: bool) -> Iterator[torch.Tensor]:
    model = model.to(torch.bfloat16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    while True:
        tokens = torch.randint(0, vocabulary, (batch, sequence), device="cuda")
        logits = model(tokens).flatten(0, 1)
        loss = (
            FusedCrossEntropy.apply(logits, tokens.flatten())
            if is_fused
            else cross_entropy(logits.float(), tokens.flatten())
        )
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
