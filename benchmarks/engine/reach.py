"""How large a Llama-shaped model is trained in full on one card with a host of so much memory: runs on the virtual GPU, complete, with choices made by hand.

    python -m benchmarks.engine --reach [--layers 32] [--streamed 32] [--width 4096] [--card "RTX 4090"] [--host 64GiB]

bfloat16 weights, gradients and AdamW states (8 bytes for each weight), one sequence, every layer recomputed, and the first ones streamed with `trained_weight_streaming`, the
loss in chunks. The peak of the card and of the host, and the seconds of a step, are those of the traced run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.simulate.peak import estimate_peak
from tightfit.units import format_bytes, format_seconds, to_bytes

_ALIGNMENT = 512
_VOCABULARY = 128_256


def llama(num_layers: int, width: int, num_tokens: int) -> Iterator[Any]:
    """A Llama of Llama-3's proportions in bfloat16, made on the host and moved, with AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 128,
        num_key_value_heads=8,
        vocab_size=_VOCABULARY,
        max_position_embeddings=num_tokens,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    while True:
        ids = torch.randint(0, _VOCABULARY, (1, num_tokens), device="cuda")
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def num_weights(num_layers: int, width: int) -> tuple[int, int]:
    """The weights of all layers, and of the embedding and the head."""
    attention = 2 * width * width + 2 * width * 8 * 128
    layer = attention + 3 * width * (width * 7 // 2) + 2 * width
    return num_layers * layer, 2 * _VOCABULARY * width + width


def reach(num_layers: int, num_streamed: int, width: int, num_tokens: int, card: str, host: str) -> None:
    """Traces one model with everything on it, and prints what it holds and takes."""
    in_layers, others = num_weights(num_layers, width)
    slab_bytes = 2 * num_streamed * (2 * in_layers // num_layers + 16 * _ALIGNMENT)
    paths = [f"model.layers.{number}" for number in range(num_layers)]
    choices = [
        _choice(
            "trained_weight_streaming",
            "LlamaForCausalLM",
            blocks=paths[:num_streamed],
            smallest_bytes=1 << 16,
            host_bytes=slab_bytes,
            kernel="fused",
        ),
        *(_choice("checkpointing", f"LlamaForCausalLM.{path}") for path in paths),
        _choice("chunked_loss", "LlamaForCausalLM.lm_head", num_chunks=16, gradients_in="backward"),
    ]
    traced = trace(
        GeneratorFunction(
            location=str(Path(__file__)),
            function="llama",
            parameters={"num_layers": num_layers, "width": width, "num_tokens": num_tokens},
        ),
        label="reach",
        device=card,
        num_steps=2,
        preparation=Preparation(function="tightfit.runtime.run_script:prepare", argument={"choices": choices}),
    )
    found = estimate_peak(traced.tape, find(card), AllocatorSettings.parse(""))
    fits = found.fits and found.host_peak_bytes <= to_bytes(host, "host")
    print(
        f"{(in_layers + others) / 1e9:.2f} billion weights ({num_layers} layers of {width}, {num_streamed} streamed), {num_tokens:,} tokens, {card}: "
        f"{'fits' if fits else 'does not fit'}; card {format_bytes(found.peak.device_bytes)}, host {format_bytes(found.host_peak_bytes)} of {host}; "
        f"a step {format_seconds(found.seconds_per_step)}, {num_tokens / found.seconds_per_step:,.0f} tokens per second"
    )


def _choice(technique: str, where: str, **settings: Any) -> dict[str, Any]:
    return {
        "technique": technique,
        "where": where,
        "settings": settings,
        "saves_bytes": 0,
        "adds_seconds": 0.0,
        "exact": True,
    }
