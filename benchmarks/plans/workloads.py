"""The workloads of the grid: a target each, with its card and what may be lossy. No torch here."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, Target

_MODELS = "benchmarks.plans.models"
_CONFIGS = Path(__file__).parent / "configs"
_DRAWS = ("micro_batches",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training run. `source` is a Hugging Face preset or config file, or `:FUNCTION` of `benchmarks.plans.models`; `settings` are its own.

    `allow` names lossy techniques that its plans may take: half a batch draws other random numbers, so where a model draws (dropout, noise), splitting
    the batch is allowed to the plans as it is to that remedy. `half_differs` says why half the batch is another training, if it is.
    """

    name: str
    source: str
    batch_size: int
    device: str
    settings: Mapping[str, Any]
    allow: tuple[str, ...] = ()
    half_differs: str = ""

    def target(self, batch_size: int | None = None) -> Target:
        """What is traced, with its own batch or another."""
        settings = {**self.settings, "batch_size": batch_size or self.batch_size}
        if self.source.startswith(":"):
            return GeneratorFunction(location=_MODELS, function=self.source[1:], parameters=settings)
        return HuggingFaceConfig(source=self.source, options=settings)


def _config(name: str) -> str:
    return str(_CONFIGS / f"{name}.json")


def _tokens(num_tokens: int, dtype: str, task: str = "causal-lm", **others: Any) -> dict[str, Any]:
    return {"task": task, "sequence_length": num_tokens, "dtype": dtype, **others}


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        name="gpt2-124m",
        source="gpt2",
        batch_size=8,
        device="RTX 4090",
        settings=_tokens(1024, "float32"),
        allow=_DRAWS,
    ),
    Workload(
        name="resnet-152",
        source=":resnet",
        batch_size=64,
        device="RTX 4090",
        settings={"depths": (3, 8, 36, 3), "width": 64, "side": 224},
        half_differs="its batch norms take their statistics from the batch",
    ),
    Workload(
        name="llama-1b",
        source="llama-3.2-1b",
        batch_size=4,
        device="A100-SXM4-80GB",
        settings=_tokens(4096, "bfloat16"),
    ),
    Workload(
        name="bert-large",
        source="bert-large-uncased",
        batch_size=32,
        device="A100-SXM4-80GB",
        settings=_tokens(512, "float32", "masked-lm", autocast="bfloat16"),
        allow=_DRAWS,
    ),
    Workload(
        name="t5-base",
        source="t5-base",
        batch_size=16,
        device="RTX 4090",
        settings=_tokens(512, "float32", "seq2seq"),
        allow=_DRAWS,
    ),
    Workload(
        name="vit-large",
        source="vit-large",
        batch_size=64,
        device="A100-SXM4-40GB",
        settings={"task": "image-classification", "dtype": "float32"},
    ),
    Workload(
        name="convnext-base",
        source="convnext-base",
        batch_size=64,
        device="A100-SXM4-40GB",
        settings={"task": "image-classification", "dtype": "float32"},
    ),
    Workload(
        name="diffusion-unet",
        source=":diffusion",
        batch_size=8,
        device="A100-SXM4-80GB",
        settings={"side": 64, "autocast": "float16"},
    ),
    Workload(
        name="unet-3d",
        source=":volumes",
        batch_size=2,
        device="A100-SXM4-80GB",
        settings={"side": 128, "width": 32},
        allow=_DRAWS,
    ),
    Workload(
        name="experts-1b",
        source=_config("mixtral-8x1b"),
        batch_size=4,
        device="A100-SXM4-80GB",
        settings=_tokens(1024, "bfloat16"),
    ),
    Workload(
        name="clip-two-towers",
        source="clip-vit-base-patch32",
        batch_size=512,
        device="A100-SXM4-40GB",
        settings={"task": "contrastive", "dtype": "float32", "autocast": "bfloat16", "sequence_length": 77},
        half_differs="its loss compares all pairs of the batch",
    ),
    Workload(name="llama-8b", source="llama-3-8b", batch_size=4, device="H200", settings=_tokens(4096, "bfloat16")),
    Workload(
        name="llama-8b-lossy",
        source="llama-3-8b",
        batch_size=4,
        device="H200",
        settings=_tokens(4096, "bfloat16"),
        allow=("low_bit_states",),
    ),
    Workload(
        name="qwen-32b-lora",
        source=_config("qwen2.5-32b"),
        batch_size=2,
        device="H200",
        settings=_tokens(4096, "bfloat16", lora_rank=16),
    ),
)


def named(name: str) -> Workload:
    """The workload `name`.

    Raises:
        SystemExit: there is none.
    """
    found = next((w for w in WORKLOADS if w.name == name), None)
    if found is None:
        raise SystemExit(f"no workload {name}; there are {', '.join(w.name for w in WORKLOADS)}")
    return found
