"""What users reckon with, as reference formulas: bytes of a model for inference, from its config alone.

* `accelerate`: accelerate estimate-memory (accelerate/commands/estimate.py of 1.15, gather_data): the bytes of all parameters and buffers of the empty model in float32 (utils/modeling.py, compute_module_sizes;
  tied weights once), halved for 16 bits, divided by 4 for int8 and by 8 for int4. It knows no cache, and one card.
* `parameters x bytes`: parameters times the bytes of one, 0.5 for 4 bits.
* `parameters x bytes x 1.2`: the same and a fifth more for all else (transformer-math of EleutherAI, 2023: "total inference memory is about 1.2 x model memory"). What is left of the share is cache, as its users say.

Tokens of cache: the share of the card minus that, over 2 x layers x heads of keys and values x size of a head x bytes.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

CALCULATORS = ("accelerate", "parameters x bytes", "parameters x bytes x 1.2")
_BITS = {"bitsandbytes": 4, "awq": 4, "gptq": 4, "marlin": 4, "fbgemm_fp8": 8, "fp8": 8, "compressed-tensors": 8}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calculated:
    """Elements of a model's parameters, the bytes of parameters and buffers in float32, bits of a weight, and bytes of cache for a token."""

    num_parameters: int
    float32_bytes: int
    bits: int
    token_bytes: int

    @classmethod
    def of_config(cls, path: Path) -> Self:
        """From a config alone."""
        import torch
        import transformers

        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.AutoConfig.from_pretrained(path.parent / path.name, local_files_only=True)
        auto = (
            transformers.AutoModelForImageTextToText
            if hasattr(config, "vision_config")
            else transformers.AutoModelForCausalLM
        )
        config.dtype = torch.float32
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            model = auto.from_config(config)
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        tensors = [*model.parameters(), *model.buffers()]
        method = (fields.get("quantization_config") or {}).get("quant_method")
        return cls(
            num_parameters=sum(each.numel() for each in model.parameters()),
            float32_bytes=sum(each.numel() * each.element_size() for each in tensors),
            bits=_BITS.get(method, 16),
            token_bytes=2 * text.num_hidden_layers * heads * width * 2,
        )

    def weights(self, name: str) -> float:
        """Bytes of the weights on one card."""
        if name == "accelerate":
            return self.float32_bytes * self.bits / 32
        return self.num_parameters * self.bits / 8 * (1.2 if name.endswith("1.2") else 1.0)

    def tokens(self, name: str, share: float, num_gpus: int) -> float:
        """Tokens of cache on `num_gpus`, with that share of each in bytes."""
        return max(0.0, share * num_gpus - self.weights(name)) / self.token_bytes
