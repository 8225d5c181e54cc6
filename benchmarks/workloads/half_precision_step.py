"""The training step behind the T4 measurements (source: highwaterlabs/torch-preflight, tests/calibration/measure_cuda.py).

Autocast around forward and loss, no GradScaler, AdamW, inputs made once on the card. The step is a function of its own:
loss and outputs (logits, and the key-value cache of a language model) live until it returns, through backward and
optimizer; gradients are set to none at its start. One warm-up step, then the peak
statistics are reset and the second step is measured.

The script takes bfloat16 where `torch.cuda.is_bf16_supported()` says yes, and that function counts emulation: a T4, which
has no bfloat16 units, says yes. It names no attention function, so the library's default ran,
scaled_dot_product_attention; for bfloat16 below compute capability 8.0 neither flash nor the memory-efficient kernel
runs, so it was the plain one, in float32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.workloads import torchvision_without_kernels

LANGUAGE_MODELS = {
    "gpt2": ("GPT2Config", "AutoModelForCausalLM"),
    "distilbert-base-uncased": ("DistilBertConfig", "AutoModel"),
    "bert-base-uncased": ("BertConfig", "AutoModel"),
}


def language_config(model: str, num_layers: int = 0, width: int = 0, num_heads: int = 0) -> Any:
    """The default configuration of the family, which is that of the named checkpoint; sizes of 0 keep its own."""
    import transformers

    sizes = {"num_hidden_layers": num_layers, "hidden_size": width, "num_attention_heads": num_heads}
    return getattr(transformers, LANGUAGE_MODELS[model][0])(**{name: size for name, size in sizes.items() if size})


def train_language_model(
    *,
    model: str = "gpt2",
    batch_size: int = 4,
    num_tokens: int = 128,
    attention: str = "sdpa",
    num_layers: int = 0,
    width: int = 0,
    num_heads: int = 0,
    device: str = "cuda",
) -> Iterator[None]:
    """gpt2 with its language-modelling loss, or an encoder with a mean-square loss over its last hidden state."""
    import transformers

    config = language_config(model, num_layers, width, num_heads)
    network = getattr(transformers, LANGUAGE_MODELS[model][1]).from_config(config, attn_implementation=attention)
    network.to(device)
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)
    tokens = torch.randint(0, config.vocab_size - 1, (batch_size, num_tokens), device=device)

    def run_batch() -> tuple[torch.Tensor, Any]:
        if model == "gpt2":
            outputs = network(input_ids=tokens, labels=tokens)
            return outputs.loss, outputs
        outputs = network(input_ids=tokens)
        return outputs.last_hidden_state.float().pow(2).mean(), outputs

    yield from _steps(optimizer, run_batch, device)


def train_images(
    *,
    model: str = "resnet50",
    batch_size: int = 16,
    image_size: int = 224,
    device: str = "cuda",
) -> Iterator[None]:
    """A torchvision classifier with cross entropy on one batch that stays on the card."""
    network = getattr(torchvision_without_kernels.models(), model)().to(device)
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    labels = torch.randint(0, 1000, (batch_size,), device=device)
    yield from _steps(optimizer, lambda: (torch.nn.functional.cross_entropy(network(images), labels), None), device)


def _steps(
    optimizer: torch.optim.Optimizer, run_batch: Callable[[], tuple[torch.Tensor, Any]], device: str
) -> Iterator[None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
            loss, outputs = run_batch()
        loss.backward()
        optimizer.step()
        del outputs

    while True:
        step()
        yield None
