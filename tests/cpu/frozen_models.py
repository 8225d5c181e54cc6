"""A decoder that is trained whole or with adapters, and a vision transformer with parameters of its own before its blocks."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional


def causal(rank: int = 0, batch: int = 8) -> Iterator[torch.Tensor]:
    """Hugging Face's Llama with eight layers; with `rank`, adapters of peft on all its linear layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4, vocab_size=4096
    )
    model = LlamaForCausalLM(config).cuda()
    if rank:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    while True:
        tokens = torch.randint(0, 4096, (batch, 256), device="cuda")
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


class Vision(nn.Module):
    """Patches, a token and positions, blocks, a head."""

    def __init__(self, width: int = 32, num_blocks: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden[:, 0])


def vision(batch: int = 64) -> Iterator[torch.Tensor]:
    """`Vision` on the card."""
    model = Vision().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        images = torch.randn(batch, 3, 16, 16, device="cuda")
        loss = functional.cross_entropy(model(images), torch.zeros(batch, dtype=torch.int64, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
