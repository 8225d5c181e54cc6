"""The weights of a model as rows of plain data, and the cut of its layers for tensor parallelism, both by what the model says of itself.

Which weights tensor parallelism cuts, and along which dimension, is the model's own plan (`base_model_tp_plan` of its config).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from tightfit.errors import UsageError

_BY_OUTPUT = ("colwise", "packed_colwise", "colwise_rep", "colwise_gather_output")
_BY_INPUT = ("rowwise", "packed_rowwise", "rowwise_rep")


def weight_rows(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Each parameter and buffer once, tied ones under their first name: shape, item size, what its module is, and how tensor parallelism cuts it, in how many parts at most."""
    plan = plan_of(model)
    heads = {id(part) for part in (_embeddings(model), _output(model)) if part is not None}
    saved = set(model.state_dict(keep_vars=True))
    seen: set[int] = set()
    rows = []
    for path, module in model.named_modules():
        tensors = (
            ("parameter", module.named_parameters(recurse=False)),
            ("buffer", module.named_buffers(recurse=False)),
        )
        for kind, named in tensors:
            for name, tensor in named:
                full = f"{path}.{name}" if path else name
                if id(tensor) in seen or full not in saved:
                    continue
                seen.add(id(tensor))
                rows.append(
                    {
                        "name": full,
                        "shape": list(tensor.shape),
                        "item_bytes": tensor.element_size(),
                        "kind": kind,
                        "role": _role(module, name, tensor, is_head=id(module) in heads),
                        "cut": _cut(plan, path, full),
                        "parts": _parts(model, tensor, _cut(plan, path, full)),
                    }
                )
    return rows


def rotary_widths(model: torch.nn.Module) -> list[int]:
    """How many numbers a position has in the sines and cosines of each kind of rotary embedding of the text model."""
    found = {}
    for path, buffer in model.named_buffers():
        module, _, name = path.rpartition(".")
        is_copy = "original" in name or any(word in module for word in ("visual", "vision", "audio"))
        if name.endswith("inv_freq") and not is_copy:
            found[name] = 2 * buffer.numel()
    return list(found.values())


def plan_of(model: torch.nn.Module) -> Mapping[str, str]:
    """Patterns of module or parameter names to the styles of the model's tensor-parallel plan; empty where it has none."""
    return dict(getattr(model, "tp_plan", None) or {})


def cut_layers(model: torch.nn.Module, degree: int) -> None:
    """Leaves each weight that the plan cuts with the share of one of `degree` ranks, so that the model computes as one rank does.

    Raises:
        UsageError: a size is not divisible; the message says which.
    """
    plan = plan_of(model)
    for path, module in list(model.named_modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            style = _cut(plan, path, f"{path}.{name}")
            dimension = _dimension(style, weight, is_linear=isinstance(module, torch.nn.Linear))
            if dimension is None or path in ("lm_head", "embed_out"):
                continue
            shape = list(weight.shape)
            parts = min(degree, _parts(model, weight, style) or degree)
            if shape[dimension] % parts or degree % parts:
                raise UsageError(
                    f"--gpus {degree}: {path}.{name} has {shape[dimension]:,} rows or columns, which {degree} does not divide"
                )
            shape[dimension] //= parts
            part = torch.nn.Parameter(weight.new_empty(shape), requires_grad=False)
            setattr(module, name, part)
        if isinstance(module, torch.nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _parts(model: Any, weight: torch.Tensor, style: str) -> int:
    """In how many parts a weight can be cut at most, 0: in any number. Those that make keys and values are cut between heads, which ranks share where there are fewer heads than ranks."""
    config = model.config.get_text_config(decoder=True)
    num_heads, all_heads = (getattr(config, name, None) for name in ("num_key_value_heads", "num_attention_heads"))
    if style not in _BY_OUTPUT or not isinstance(num_heads, int) or not isinstance(all_heads, int):
        return 0
    width = getattr(config, "head_dim", None) or config.hidden_size // all_heads
    return num_heads if num_heads < all_heads and weight.shape[0] == num_heads * width else 0


def _dimension(style: str, weight: torch.Tensor, *, is_linear: bool) -> int | None:
    """The dimension that `style` cuts; weights of experts (experts, outputs, inputs) are cut as those of a linear layer are."""
    if weight.dim() == 1:
        return 0 if style in _BY_OUTPUT and is_linear else None
    if style in _BY_OUTPUT:
        return weight.dim() - 2
    return weight.dim() - 1 if style in _BY_INPUT else None


def _role(module: torch.nn.Module, name: str, tensor: torch.Tensor, *, is_head: bool) -> str:
    """`embedding`, `head`, `linear` (a weight of a matrix product, those of experts too), or `other`."""
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if is_head and tensor.dim() == 2:
        return "head"
    is_product = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    if is_product and name == "weight":
        return "linear"
    # Experts hold the matrices of all of them in one parameter: (experts, outputs, inputs).
    return "linear" if tensor.dim() == 3 and "expert" in type(module).__name__.lower() else "other"


def _cut(plan: Mapping[str, str], path: str, full: str) -> str:
    for pattern, style in plan.items():
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        if re.fullmatch(expression, full) or re.fullmatch(expression, path):
            return style
    return ""


def _embeddings(model: Any) -> torch.nn.Module | None:
    return model.get_input_embeddings()


def _output(model: Any) -> torch.nn.Module | None:
    return model.get_output_embeddings()
