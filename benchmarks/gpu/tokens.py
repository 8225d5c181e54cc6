"""Networks on tokens: encoder, decoder, encoder-decoder and mixture of experts of transformers, from configs, and a state space model of our own.

The state space model is the chunked form of Mamba-2 (Dao and Gu 2024, section 6): inside a chunk a masked product, between chunks a short recurrence.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.gpu.images import run_blocks

_CHUNK = 64
_HEAD = 64
_STATE = 64


class FromConfig(nn.Module):
    """A model of transformers whose output is its loss."""

    def __init__(self, model: Any, recompute: bool) -> None:
        super().__init__()
        self.model = model
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


def encoder(*, depth: int, width: int, vocabulary: int, recompute: bool) -> nn.Module:
    """BERT with a masked language model's head."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    return FromConfig(BertForMaskedLM(config), recompute)


def decoder(*, depth: int, width: int, vocabulary: int, recompute: bool) -> nn.Module:
    """Llama."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        intermediate_size=round(8 / 3 * width / 64) * 64,
        use_cache=False,
    )
    return FromConfig(LlamaForCausalLM(config), recompute)


def encoder_decoder(*, depth: int, width: int, vocabulary: int, recompute: bool) -> nn.Module:
    """T5, as many layers on each side; its position bias keeps it from flash attention."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        num_layers=depth,
        num_heads=width // 64,
        d_ff=4 * width,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return FromConfig(T5ForConditionalGeneration(config), recompute)


def experts(*, depth: int, width: int, vocabulary: int, recompute: bool) -> nn.Module:
    """Mixtral: eight experts in each layer, two of them for each token."""
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        intermediate_size=2 * width,
        num_local_experts=8,
        use_cache=False,
    )
    return FromConfig(MixtralForCausalLM(config), recompute)


class StateSpaceBlock(nn.Module):
    """Projections, a depthwise convolution over time and a selective state space, beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 2 * width
        self.num_heads = inner // _HEAD
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 2 * inner + 2 * _STATE + self.num_heads)
        self.mixing = nn.Conv1d(inner + 2 * _STATE, inner + 2 * _STATE, 4, padding=3, groups=inner + 2 * _STATE)
        self.decay = nn.Parameter(torch.zeros(self.num_heads))
        self.output = nn.Linear(inner, width)
        self.sizes = [inner, inner + 2 * _STATE, self.num_heads]

    def forward(self, values: Tensor) -> Tensor:
        batch, length, _ = values.shape
        gate, mixed, rate = self.inputs(self.norm(values)).split(self.sizes, -1)
        mixed = functional.silu(self.mixing(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        inner, write, read = mixed.split([self.sizes[0], _STATE, _STATE], -1)
        step = functional.softplus(rate)
        found = _scan(
            inner.view(batch, length, self.num_heads, _HEAD) * step.unsqueeze(-1),
            -step * self.decay.exp(),
            write,
            read,
        )
        return values + self.output(found.reshape(batch, length, -1) * functional.silu(gate))


def _scan(values: Tensor, decays: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """The state space model over `values` (batch, time, heads, head), with log decays (batch, time, heads), writes and reads (batch, time, state)."""
    batch, length, heads, head = values.shape
    num_chunks = length // _CHUNK
    values = values.view(batch, num_chunks, _CHUNK, heads, head)
    write, read = (part.view(batch, num_chunks, _CHUNK, _STATE) for part in (write, read))
    total = decays.view(batch, num_chunks, _CHUNK, heads).permute(0, 1, 3, 2).cumsum(-1)
    future = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=values.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, float("-inf")).exp()
    inside = torch.einsum("bcis,bcjs,bchij,bcjhp->bcihp", read, write, between.to(values.dtype), values)
    to_end = (total[..., -1:] - total).exp().to(values.dtype)
    states = torch.einsum("bcjs,bchj,bcjhp->bchps", write, to_end, values)
    fades = total[..., -1].exp().to(values.dtype)
    state, before = torch.zeros_like(states[:, 0]), []
    for chunk in range(num_chunks):
        before.append(state)
        state = state * fades[:, chunk, :, None, None] + states[:, chunk]
    carried = torch.einsum("bcis,bchi,bchps->bcihp", read, total.exp().to(values.dtype), torch.stack(before, 1))
    return (inside + carried).reshape(batch, length, heads, head)


class StateSpace(nn.Module):
    """A language model of state space blocks."""

    def __init__(self, *, depth: int, width: int, vocabulary: int, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(StateSpaceBlock(width) for _ in range(depth))
        self.norm, self.head, self.recompute = nn.LayerNorm(width), nn.Linear(width, vocabulary), recompute

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        values = run_blocks(self.blocks, self.embedding(tokens), recompute=self.recompute)
        return functional.cross_entropy(self.head(self.norm(values)).flatten(0, 1), labels.flatten())
