"""Eight small models of different kinds, each with its batch and its loss, for the virtual card and for the host alike.

`MODELS[name](device)` gives the model and a function that makes the loss of step `i`. The data is made from a seed on the host, so that two runs
see the same.
"""

import os
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

Loss = Callable[[int], torch.Tensor]
Made = tuple[nn.Module, Loss]


def _seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def gpt(device: str) -> Made:
    """A decoder of Hugging Face with tied weights and dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=3,
            n_embd=48,
            n_head=3,
            vocab_size=4003,
            n_positions=96,
            attn_implementation="sdpa",
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
        )
    ).to(device)

    def loss(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 4003, (3, 96), generator=_seeded(step)).to(device)
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss


def llama(device: str) -> Made:
    """A decoder of Hugging Face without dropout, with grouped queries and a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=3001,
        max_position_embeddings=128,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(device)

    def loss(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 3001, (2, 128), generator=_seeded(step)).to(device)
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return model, loss


def t5(device: str) -> Made:
    """An encoder and a decoder of Hugging Face, with dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=2003, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(device)

    def loss(step: int) -> torch.Tensor:
        source = torch.randint(0, 2003, (2, 48), generator=_seeded(step)).to(device)
        return model(input_ids=source, labels=source[:, :32].contiguous(), use_cache=False).loss

    return model, loss


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_1, self.norm_2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.norm_1(self.first(images)))
        return functional.relu(self.norm_2(self.second(hidden)) + images)


class ResidualNet(nn.Module):
    """A convolutional net with batch norms."""

    def __init__(self, num_blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(_Residual(width) for _ in range(num_blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def convolutions(device: str) -> Made:
    """`ResidualNet` on small images."""
    model = ResidualNet().to(device)

    def loss(step: int) -> torch.Tensor:
        images = torch.randn(4, 3, 32, 32, generator=_seeded(step)).to(device)
        return functional.cross_entropy(model(images), (torch.arange(4) % 10).to(device))

    return model, loss


class _Layer(nn.Module):
    """An encoder layer written by hand, with the scores of its attention in full."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length, width = tokens.shape
        split = self.qkv(self.norm_1(tokens)).view(batch, length, 3, self.num_heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) / (width // self.num_heads) ** 0.5
        mixed = (scores.softmax(dim=-1) @ values).transpose(1, 2).reshape(batch, length, width)
        tokens = tokens + self.out(mixed)
        return tokens + self.mlp(self.norm_2(tokens))


class VisionTransformer(nn.Module):
    """Patches, layers in a list, a class for each image."""

    def __init__(self, num_layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.layers = nn.ModuleList(_Layer(width, 4) for _ in range(num_layers))
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(dim=1))


def vision(device: str) -> Made:
    """`VisionTransformer`, with its patches frozen."""
    model = VisionTransformer().to(device)
    model.patches.requires_grad_(False)

    def loss(step: int) -> torch.Tensor:
        images = torch.randn(3, 3, 64, 64, generator=_seeded(step)).to(device)
        return functional.cross_entropy(model(images), (torch.arange(3) % 10).to(device))

    return model, loss


class PlainLanguageModel(nn.Module):
    """A recurrent stack with a large head, and a spectral norm whose buffers a forward changes."""

    def __init__(self, vocabulary: int = 5003, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mixers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.utils.parametrizations.spectral_norm(nn.Linear(width, 4 * width)),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for mixer in self.mixers:
            hidden = hidden + mixer(hidden)
        return self.head(hidden)


def plain_language(device: str) -> Made:
    """`PlainLanguageModel`, its loss written out with an index that is ignored."""
    model = PlainLanguageModel().to(device)

    def loss(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 5003, (4, 64), generator=_seeded(step)).to(device)
        targets = tokens.roll(-1, dims=1).masked_fill(tokens % 7 == 0, -1)
        return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)

    return model, loss


class _Mixer(nn.Module):
    """A residual layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.dropout(functional.gelu(self.linear(self.norm(tokens))))


class Volumes(nn.Module):
    """A chain of 3-D convolutions without norms, and a deep stack of layers on what it makes."""

    def __init__(self, num_layers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.chain = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)
        )
        self.enter = nn.Linear(16, width)
        self.stack = nn.ModuleList(_Mixer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 10)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(self.chain(volumes).reshape(volumes.shape[0], -1, 16))
        for layer in self.stack:
            hidden = layer(hidden)
        return self.head(hidden.mean(dim=1))


def volumes(device: str) -> Made:
    """`Volumes` on one small volume."""
    model = Volumes().to(device)

    def loss(step: int) -> torch.Tensor:
        images = torch.randn(1, 1, 32, 32, 32, generator=_seeded(step)).to(device)
        return functional.cross_entropy(model(images), torch.zeros(1, dtype=torch.int64).to(device))

    return model, loss


class _Adapted(nn.Module):
    """A linear layer that is not trained, with two factors beside it that are."""

    def __init__(self, linear: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.first = nn.Linear(linear.in_features, rank, bias=False)
        self.second = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.second(self.first(inputs))


def adapted(device: str) -> Made:
    """A decoder of Hugging Face whose weights are not trained, with low-rank adapters on two layers of each block."""
    model, loss = llama(device)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.o_proj = _Adapted(layer.self_attn.o_proj).to(device)
        layer.mlp.down_proj = _Adapted(layer.mlp.down_proj).to(device)
    return model, loss


MODELS: dict[str, Callable[[str], Made]] = {
    made.__name__: made for made in (gpt, llama, t5, convolutions, vision, plain_language, volumes, adapted)
}
if "CONFORMANCE_MODELS" in os.environ:
    # For a technique of somebody else's that has a place on some of them only.
    MODELS = {name: MODELS[name] for name in os.environ["CONFORMANCE_MODELS"].split(",")}


# These loops fill their gradients with zeros instead of dropping them.
ZEROING = frozenset({"vision"})


def workload(model: str, foreach: bool = True) -> Iterator[torch.Tensor]:
    """One of the models, trained on the virtual card."""
    made, loss_of = MODELS[model]("cuda")
    trained = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=foreach)
    step = 0
    while True:
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=model not in ZEROING)
        step += 1
        yield loss
