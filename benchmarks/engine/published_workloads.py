"""The training steps of published tables, as their sources describe them; what they leave out is said where it is assumed."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

# Hidden size, feed-forward size, layers, heads, key-value heads, size of a head, vocabulary, tied embeddings: of the configs on their hub.
_DECODERS: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936, False),
}


def decoder(*, name: str, batch_size: int, num_tokens: int, lora_rank: int = 0) -> Iterator[Any]:
    """A causal language model in bfloat16 with torch's fused AdamW; with adapters on all its linear layers if `lora_rank` is given."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    width, inner, layers, heads, kv_heads, head_size, vocabulary, is_tied = _DECODERS[name]
    config = (LlamaConfig if name.startswith("llama") else Qwen3Config)(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        vocab_size=vocabulary,
        max_position_embeddings=num_tokens,
        tie_word_embeddings=is_tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5, fused=True)
    while True:
        ids = torch.randint(0, vocabulary, (batch_size, num_tokens), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def vit_huge(*, batch_size: int) -> Iterator[Any]:
    """ViT-H/14 at 224 pixels with ten classes (torchao's script takes EuroSAT), float32 under autocast to bfloat16, fused AdamW."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16, patch_size=14,
        num_labels=10, attn_implementation="sdpa",
    )  # fmt: skip
    model = ViTForImageClassification(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    while True:
        pixels, labels = (
            torch.randn(batch_size, 3, 224, 224, device="cuda"),
            torch.randint(0, 10, (batch_size,), device="cuda"),
        )
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(pixel_values=pixels).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def vit_giant(*, batch_size: int) -> Iterator[Any]:
    """DINOv2's ViT-g/14 in bfloat16, Adam. At 224 pixels: at its own 518 the inputs of its blocks alone would be more than the peak that is published."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(
        hidden_size=1536, num_hidden_layers=40, num_attention_heads=24, patch_size=14, image_size=224, use_swiglu_ffn=True,
        num_labels=10, attn_implementation="sdpa",
    )  # fmt: skip
    model = Dinov2ForImageClassification(config).to(torch.bfloat16).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    while True:
        pixels = torch.randn(batch_size, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        labels = torch.randint(0, 10, (batch_size,), device="cuda")
        loss = functional.cross_entropy(model(pixel_values=pixels).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
