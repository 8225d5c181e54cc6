"""Six small models of different kinds with their losses, for real numbers on the host: two decoders, one of them with tied weights and dropout, an encoder with
a decoder, a vision transformer, a mixture of experts, and a convolutional net with batch norms."""

from collections.abc import Callable
from typing import Any

import torch
from tests.conformance.models import ResidualNet
from torch import nn
from torch.nn import functional

Loss = Callable[[int], torch.Tensor]
Made = tuple[nn.Module, Loss]
_VOCABULARY = 211


def _seeded(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + step)


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (2, 24), generator=_seeded(step))


def _decoder(model: nn.Module, **arguments: Any) -> Made:
    def loss(step: int) -> torch.Tensor:
        tokens = _tokens(step)
        return model(input_ids=tokens, labels=tokens, **arguments).loss

    return model, loss


def gpt2() -> Made:
    """Tied weights, dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=32, n_head=2, vocab_size=_VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return _decoder(GPT2LMHeadModel(config), use_cache=False)


def llama() -> Made:
    """Grouped queries, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_VOCABULARY,
    )
    return _decoder(LlamaForCausalLM(config), use_cache=False)


def mixtral() -> Made:
    """Experts that tokens are routed to."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=_VOCABULARY,
    )
    return _decoder(MixtralForCausalLM(config), use_cache=False)


def t5() -> Made:
    """An encoder and a decoder that reads it in every block."""
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=_VOCABULARY, decoder_start_token_id=0
        )
    )

    def loss(step: int) -> torch.Tensor:
        tokens = _tokens(step)
        return model(input_ids=tokens, labels=tokens[:, :16].contiguous(), use_cache=False).loss

    return model, loss


def vit() -> Made:
    """Patches of images."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=10,
        )
    )

    def loss(step: int) -> torch.Tensor:
        images = torch.randn(3, 3, 16, 16, generator=_seeded(step))
        return model(pixel_values=images, labels=torch.arange(3)).loss

    return model, loss


def resnet() -> Made:
    """Convolutions, running means."""
    model = ResidualNet()

    def loss(step: int) -> torch.Tensor:
        images = torch.randn(3, 3, 12, 12, generator=_seeded(step))
        return functional.cross_entropy(model(images), torch.arange(3))

    return model, loss


ARCHITECTURES: dict[str, Callable[[], Made]] = {made.__name__: made for made in (gpt2, llama, t5, vit, mixtral, resnet)}
