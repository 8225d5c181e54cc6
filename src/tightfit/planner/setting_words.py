"""The settings of a choice in words: `8 chunks, gradients computed in the forward pass`, and not `num_chunks=8, gradients_in=forward`."""

from collections.abc import Callable, Mapping
from typing import Any

from tightfit.units import format_bytes

_Words = Callable[[Any], str]


def setting_words(settings: Mapping[str, Any]) -> str:
    """Everything that a technique was told, for a person; settings that are not known here are `name=value`."""
    left = dict(settings)
    words = []
    if {"begin", "end"} <= set(left):
        words.append(_layers(left.pop("begin"), left.pop("end")))
    if "keep" in left:
        words.append(_kept(left.pop("keep"), left.pop("outputs", ())))
    words += [_WORDS[name](value) if name in _WORDS else f"{name}={value}" for name, value in left.items()]
    return ", ".join(word for word in words if word)


def _layers(begin: int, end: int) -> str:
    """The layers `[begin, end)` of a sequence."""
    return f"layer {begin}" if end == begin + 1 else f"layers {begin} to {end - 1}"


def _kept(numbers: list[int], outputs: tuple[str, ...] | list[str]) -> str:
    """The outputs that a block saves, by the modules that compute them; plans from before they were named have their numbers only."""
    if not numbers:
        return "keeps no product"
    if not outputs:
        noun = "output of product" if len(numbers) == 1 else "outputs of products"
        return f"keeps the {noun} {', '.join(map(str, numbers))} of its forward pass"
    return f"keeps the output{'s' if len(outputs) > 1 else ''} of {', '.join(f'`{name}`' for name in outputs)}"


def _count(noun: str) -> _Words:
    return lambda number: f"{number} {noun}" + ("" if number == 1 else "s")


def _if_true(words: str) -> _Words:
    return lambda value: words if value in (True, "True", "true") else ""


_WORDS: dict[str, _Words] = {
    "num_chunks": _count("chunk"),
    "gradients_in": lambda which: f"gradients computed in the {which} pass",
    "num_tiles": _count("tile"),
    "recomputed": _if_true("recomputed in backward"),
    "num_parts": lambda number: f"{number} micro-batches",
    "draws_anew": _if_true("random numbers drawn for each part"),
    "loop": lambda name: f"in the loop of {name}",
    "alloc_conf": str,
    "kernel": lambda kernel: {"same": "", "for-loop": "foreach=False, fused=False"}.get(kernel, f"{kernel}=True"),
    "clips": _if_true("gradients are clipped"),
    "in_backward": _if_true("updated in backward"),
    "bits": lambda bits: f"{bits} bits",
    "library": lambda name: f"with {name}",
    "following": lambda _place: "",
    "smallest_bytes": lambda count: f"storages of {format_bytes(int(count))} and more",
    "storages": lambda _sizes: "",
    "share": lambda share: "" if float(share) == 1.0 else f"{float(share):.0%} of what each saves",
    "host_bytes": lambda count: f"{format_bytes(int(count))} of host memory each",
    "card_bytes": lambda count: f"{format_bytes(int(count))} on the GPU" if int(count) else "",
    "tier": lambda tier: f"on {tier}" if tier == "disk" else "",
    "weights": lambda tier: f"weights on {tier}" if tier == "disk" else "",
    "at_once_bytes": lambda count: f"{format_bytes(int(count))} of weights updated at a time",
    "only_above": lambda most: f"for inputs of more than {max(map(int, most)):,} elements",
    "least_elements": lambda number: f"states of {int(number):,} elements and more",
    "disk_bytes": lambda count: f"{format_bytes(int(count))} of disk each",
    "window_bytes": lambda count: f"at most {format_bytes(int(count))} of states on the GPU",
    "executor": lambda which: "updated by the host's processor" if which == "host" else "",
    "border": lambda where: f"cache emptied {where}",
    "dtype": str,
    "rounding": lambda how: f"{how} rounding",
    "modules": ", ".join,
    "num_blocks": lambda number: f"first {number} block{'' if number == 1 else 's'}",
    "before": lambda names: f"and {names.replace(',', ', ')}" if names else "",
}
