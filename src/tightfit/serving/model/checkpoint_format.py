"""The weight format that a checkpoint's `quantization_config` names: bits, size of a group, and the layers that its publisher left as they were."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tightfit.errors import UsageError
from tightfit.serving.model.weight_formats import WeightFormat, format_named

# Where the writers of checkpoints list modules that are not quantised: llm-compressor, transformers, AutoAWQ, bitsandbytes.
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
# Formats of llm-compressor by the type and the bits of their weights.
_COMPRESSED = {("int", 8): "int8", ("float", 8): "fp8", ("int", 4): "gptq", ("float", 4): "nvfp4"}
_OF_FOUR_BITS = ("awq", "gptq")


def checkpoint_format(quantization: Mapping[str, Any]) -> WeightFormat | None:
    """The format that `quantization` (a config's `quantization_config`) describes; None where it is empty.

    Raises:
        UsageError: the format or its number of bits is not known.
    """
    if not quantization:
        return None
    found = format_named(_name(quantization))
    if found is None:
        return None
    group = quantization.get("group_size")
    if found.group and isinstance(group, int) and found.name in _OF_FOUR_BITS:
        # -1: one group for all inputs of an output, which is longer than any row.
        found = dataclasses.replace(found, group=group if group > 0 else 1 << 30)
    left_out = [name for key in _LISTS for name in quantization.get(key) or ()]
    return dataclasses.replace(found, left_out=tuple(left_out))


def _name(quantization: Mapping[str, Any]) -> str:
    # transformers before 4.31 named no method: it had that of bitsandbytes alone.
    is_of_bitsandbytes = quantization.get("load_in_8bit") or quantization.get("load_in_4bit")
    method = str(quantization.get("quant_method") or ("bitsandbytes" if is_of_bitsandbytes else "")).lower()
    if not method:
        raise UsageError("quantization_config names no quant_method: give --quantization")
    bits = quantization.get("bits", quantization.get("w_bit"))
    if method in _OF_FOUR_BITS and bits is None:
        raise UsageError(f"quantization_config: {method} without bits: its size is not known; give --quantization")
    if method in _OF_FOUR_BITS and bits != 4:
        raise UsageError(f"quantization_config: {method} with {bits} bits: its size is not known; give --quantization")
    if method == "bitsandbytes" and quantization.get("load_in_8bit"):
        return "int8"
    if method == "fp8" and quantization.get("weight_block_size"):
        return "fp8-block"
    if method == "compressed-tensors":
        return _of_groups(quantization.get("config_groups") or {})
    return method


def _of_groups(groups: Mapping[str, Any]) -> str:
    kinds = {
        (str(of["weights"]["type"]), int(of["weights"]["num_bits"])) for of in groups.values() if of.get("weights")
    }
    named = {_COMPRESSED.get(kind) for kind in kinds}
    if len(named) != 1 or None in named:
        listed = ", ".join(f"{kind} of {bits} bits" for kind, bits in sorted(kinds))
        raise UsageError(
            f"quantization_config: weights of {listed or 'no type'}: their size is not known; give --quantization"
        )
    return str(named.pop())
