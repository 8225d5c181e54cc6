"""The steps whose milliseconds others have published: timm's `benchmark.py`, and the transformers of NeuSight (Lee et al., ASPLOS 2025).

Settings are those of the sources (see the functions). Weights are random, as they were there.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import benchmarks.workloads.torchvision_without_kernels  # noqa: F401 - timm imports torchvision

_CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "bert_large": (
        "Bert",
        {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "gpt2_large": ("GPT2", {"n_layer": 36, "n_embd": 1280, "n_head": 20}),
    "gpt2_xl": ("GPT2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "gpt3_xl": ("GPT2", {"n_layer": 24, "n_embd": 3072, "n_head": 24, "n_positions": 2048}),
    "gpt3_27": ("GPT2", {"n_layer": 32, "n_embd": 2560, "n_head": 32, "n_positions": 2048}),
    "opt_13": (
        "OPT",
        {
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "word_embed_proj_dim": 2048,
        },
    ),
}


def transformer(
    *, model: str = "bert_large", mode: str = "inf", sequence: int = 512, batch: int = 8, device: str = "cuda"
) -> Iterator[Any]:
    """float32, TF32 off, attention not fused, ids of ones. `inf` is a forward pass without gradients (BERT as a classifier); `train` a forward
    and a backward pass of the model with its head, gradients accumulated, without loss and optimizer in the timing.
    """
    import transformers

    family, sizes = _CONFIGS[model]
    config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager", use_cache=False)
    head = {
        "Bert": "ForSequenceClassification" if mode == "inf" else "ForPreTraining",
        "GPT2": "LMHeadModel",
        "OPT": "ForCausalLM",
    }
    network = getattr(transformers, family + head[family])(config).to(device)
    network.train(mode == "train")
    ids = torch.ones(batch, sequence, dtype=torch.long, device=device)
    while True:
        if mode == "inf":
            with torch.no_grad():
                yield network(input_ids=ids)[0]
            continue
        outputs = network(input_ids=ids)
        # The source times `torch.autograd.backward` from given gradients of the outputs.
        scores = [value for value in outputs.values() if isinstance(value, torch.Tensor)]
        torch.autograd.backward(scores, [torch.empty_like(value) for value in scores])
        yield scores[0]


def timm_step(
    *,
    model: str = "resnet50",
    mode: str = "infer",
    batch: int = 256,
    image_size: int = 224,
    layout: str = "nchw",
    device: str = "cuda",
) -> Iterator[Any]:
    """timm's `benchmark.py --amp`: float16 autocast without a scaler; `train` with SGD (momentum 0.9), cross entropy on random classes, gradients
    cleared at the start of a step (torch 1.12, attention not fused); `infer` under `inference_mode`, attention fused.
    """
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(enable=mode == "infer")
    torch.backends.cudnn.benchmark = True
    kwargs = {"img_size": image_size} if _takes_image_size(model) else {}
    network = timm.create_model(model, pretrained=False, num_classes=1000, **kwargs)
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    network = network.to(device, memory_format=memory_format)
    images = torch.randn(batch, 3, image_size, image_size, device=device).contiguous(memory_format=memory_format)
    autocast = torch.autocast(device.partition(":")[0], dtype=torch.float16)
    if mode == "infer":
        network.eval()
        while True:
            with torch.inference_mode(), autocast:
                outputs = network(images)
            yield outputs
    network.train()
    target = torch.randint(0, 1000, (batch,), device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    while True:
        optimizer.zero_grad()
        with autocast:
            outputs = network(images)
        loss = criterion(outputs, target)
        loss.backward()
        optimizer.step()
        yield loss


def _takes_image_size(model: str) -> bool:
    """Whether the model is built for one image size: vision transformers and their kin, which refuse others."""
    import inspect

    import timm

    with contextlib.suppress(TypeError, ValueError):
        module = inspect.getmodule(timm.models.model_entrypoint(model))
        return "img_size" in inspect.getsource(module) if module else False
    return False
