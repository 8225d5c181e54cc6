"""Recognises the two products of an attention: `matmul`, `@`, `bmm`, and `einsum` with any order of the leading dimensions."""

from collections.abc import Callable
from typing import Any

import torch

_MATMUL = ("matmul", "__matmul__", "bmm")


def scores_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Queries `(..., T, D)` and keys `(..., S, D)` of a call that returns `(..., T, S)`; None if it is no such product, or broadcasts."""
    if name in _MATMUL and len(args) == 2 and not kwargs:
        query, key = args[0], args[1].transpose(-2, -1) if args[1].dim() > 1 else args[1]
    elif name == "einsum":
        read = _read_einsum(args)
        if read is None:
            return None
        (first, second, out), left, right = read
        query = _ordered(left, first, out[:-2] + out[-2] + _missing(first, out))
        key = _ordered(right, second, out[:-2] + out[-1] + _missing(second, out))
    else:
        return None
    if query is None or key is None or query.dim() not in (3, 4) or query.dim() != key.dim():
        return None
    fits = query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1]
    is_plain = query.dtype == key.dtype and query.is_floating_point() and not query.is_complex()
    return (query, key) if fits and is_plain else None


def apply_weights(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], weights: torch.Tensor
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]] | None:
    """Values `(..., S, D)` of a call that multiplies `weights`, `(..., T, S)`, with them, and a function from `(..., T, D)` to its result."""
    if name in _MATMUL and len(args) == 2 and not kwargs and args[0] is weights:
        return args[1], lambda out: out
    read = _read_einsum(args) if name == "einsum" else None
    if read is None or read[1] is not weights:
        return None
    (first, second, out), _, right = read
    leading, inner = first[:-2], first[-1]
    width = _missing(second, first)
    value = _ordered(right, second, leading + inner + width)
    result = leading + first[-2] + width
    if value is None or sorted(result) != sorted(out):
        return None
    return value, lambda attended: attended.permute([result.index(letter) for letter in out])


def _read_einsum(args: tuple[Any, ...]) -> tuple[tuple[str, str, str], torch.Tensor, torch.Tensor] | None:
    # torch.functional.einsum still takes its operands as one list too, its older interface.
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if len(operands) != 2 or not isinstance(args[0], str):
        return None
    inputs, arrow, out = args[0].replace(" ", "").partition("->")
    first, comma, second = inputs.partition(",")
    # An ellipsis, a repeated letter or an implicit output: not read here, and not seen in models' attention.
    if (
        not arrow
        or not comma
        or "." in inputs
        or len(out) < 3
        or any(len(set(t)) != len(t) for t in (first, second, out))
    ):
        return None
    return (first, second, out), operands[0], operands[1]


def _missing(letters: str, there: str) -> str:
    return "".join(letter for letter in letters if letter not in there)


def _ordered(tensor: torch.Tensor, letters: str, wanted: str) -> torch.Tensor | None:
    if sorted(letters) != sorted(wanted):
        return None
    return tensor.permute([letters.index(letter) for letter in wanted])
