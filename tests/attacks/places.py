"""Where each technique is put on an attack's model: choices made by hand, at every place that the technique could take.

Models of attacks follow a convention. `blocks` holds blocks of the same kind, `chain` is a Sequential that ends where an image does, `head` is the
linear layer before a cross-entropy, a module with `is_attention` computes attention by hand, and one with `returns_loss` returns its loss.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from tightfit.planner.plan import Choice
from tightfit.techniques.offload.streamable import streamable
from tightfit.techniques.registry import technique

Find = Callable[[nn.Module, Sequence[torch.optim.Optimizer]], list[Choice]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A technique with one of its settings. `find` gives its choices for a model and its optimizers, none where it has no place.

    `freezes`: the matrices in blocks are not trained, in the plain run neither; `dresses` are those of `dressed` that both runs wear.
    """

    name: str
    technique: str
    find: Find
    is_bitwise: bool
    is_lossy: bool
    freezes: bool = False
    dresses: tuple[str, ...] = ()

    @property
    def worn(self) -> tuple[str, ...]:
        """All that is done to the model of both runs."""
        return (*self.dresses, "frozen") if self.freezes and "frozen" not in self.dresses else self.dresses


def choice(name: str, where: str, **settings: object) -> Choice:
    """A choice as a plan has it."""
    exact = technique(name).exact
    return Choice(technique=name, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=exact)


def _path(model: nn.Module, path: str) -> str:
    return f"{type(model).__name__}.{path}" if path else type(model).__name__


def held(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules that somebody inside `model` calls `name`, with their paths."""
    return [(path, module) for path, module in model.named_modules() if path.rpartition(".")[2] == name]


def _each_block(name: str, **settings: object) -> Find:
    def find(model: nn.Module, _: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        return [
            choice(name, _path(model, f"{path}.{key}"), **settings)
            for path, blocks in held(model, "blocks")
            for key in blocks._modules
        ]

    return find


def _all_but_the_last(name: str, **settings: object) -> Find:
    def find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        # As a plan mixes them: what the last block does to a state that all share is not seen by a second run of its own.
        last = {
            _path(model, f"{path}.{list(blocks._modules)[-1]}")
            for path, blocks in held(model, "blocks")
            if len(blocks._modules)
        }
        return [each for each in _each_block(name, **settings)(model, optimizers) if each.where not in last]

    return find


def _range(name: str, holder: str, *, needs_sequential: bool, **settings: object) -> Find:
    def find(model: nn.Module, _: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        return [
            choice(name, _path(model, path), begin=0, end=len(blocks._modules), **settings)
            for path, blocks in held(model, holder)
            if not needs_sequential or type(blocks) is nn.Sequential
        ]

    return find


def _offload(name: str, **settings: object) -> Find:
    def find(model: nn.Module, _: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        # Each but the last, whose saved tensors no block would hide the way of; and every storage, however small.
        return [
            choice(
                name,
                _path(model, f"{path}.{key}"),
                following=_path(model, f"{path}.{following}"),
                smallest_bytes=1,
                host_bytes=1 << 14,
                **settings,
            )
            for path, blocks in held(model, "blocks")
            for key, following in itertools.pairwise(blocks._modules)
        ]

    return find


def _offloaded_checkpointing(beside: str, **settings: object) -> Find:
    def find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        # The last block, whose input no block would hide the way of, is recomputed alone: in a plan both are mixed.
        moved = _offload("offloaded_checkpointing", **settings)(model, optimizers)
        places = {each.where for each in moved}
        return [*moved, *(c for c in _each_block(beside, **settings)(model, optimizers) if c.where not in places)]

    return find


def freeze(model: nn.Module) -> None:
    """Has the matrices in blocks not trained."""
    for _, blocks in held(model, "blocks"):
        for parameter in blocks.parameters():
            if parameter.dim() > 1 and parameter.is_leaf:
                parameter.requires_grad_(False)


def _streaming(model: nn.Module, _: Sequence[torch.optim.Optimizer]) -> list[Choice]:
    found = []
    for path, blocks in held(model, "blocks"):
        keys = list(blocks._modules)
        places = [_path(model, f"{path}.{key}") for key in keys]
        for before, place, key, after in zip(["", *places], places, keys, [*places[1:], ""], strict=False):
            block = blocks.get_submodule(key)
            if streamable(model, block, 1):
                settings = {"preceding": before, "following": after, "smallest_bytes": 1, "host_bytes": 1 << 14}
                found.append(choice("weight_streaming", place, **settings))
    return found


def _trained_streaming(model: nn.Module, _: Sequence[torch.optim.Optimizer]) -> list[Choice]:
    paths = [f"{path}.{key}" for path, blocks in held(model, "blocks") for key in blocks._modules]
    if not any(streamable(model, model.get_submodule(path), 1, with_trained=True) for path in paths):
        return []
    settings = {"blocks": paths, "smallest_bytes": 1, "host_bytes": 1 << 17}
    return [choice("trained_weight_streaming", type(model).__name__, **settings)]


def _chunked_loss(gradients_in: str) -> Find:
    def find(model: nn.Module, _: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        return [
            choice("chunked_loss", _path(model, path), num_chunks=2, gradients_in=gradients_in)
            for path, _ in held(model, "head")
        ]

    return find


def _attention(model: nn.Module, _: Sequence[torch.optim.Optimizer]) -> list[Choice]:
    modules = [_path(model, path) for path, module in model.named_modules() if hasattr(module, "is_attention")]
    return [choice("attention", "attention", modules=modules)] if modules else []


def _micro_batches(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Choice]:
    if not (optimizers and getattr(model, "returns_loss", False)):
        return []
    return [choice("micro_batches", "batch", num_parts=2, draws_anew=False)]


def _of_optimizer(name: str, where: str = "optimizer", **settings: object) -> Find:
    def find(_: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        return [choice(name, where, **settings)] if optimizers else []

    return find


def _of_model(name: str, where: str, **settings: object) -> Find:
    return lambda _, __: [choice(name, where, **settings)]


def _variants() -> list[Variant]:
    found: list[tuple[str, str, Find]] = [
        ("checkpointing", "checkpointing", _each_block("checkpointing")),
        ("checkpointing, all but the last", "checkpointing", _all_but_the_last("checkpointing")),
        ("selective checkpointing", "selective_checkpointing", _each_block("selective_checkpointing", keep=[0])),
        ("nested checkpointing", "nested_checkpointing", _range("nested_checkpointing", "blocks", needs_sequential=False)),
        ("sequential checkpointing", "sequential_checkpointing", _range("sequential_checkpointing", "blocks", needs_sequential=True)),
        ("weight streaming", "weight_streaming", _streaming),
        ("trained weight streaming", "trained_weight_streaming", _trained_streaming),
        ("offloaded checkpointing", "offloaded_checkpointing", _offloaded_checkpointing("checkpointing")),
        ("offloaded checkpointing, selective", "offloaded_checkpointing", _offloaded_checkpointing("selective_checkpointing", keep=[0])),
        ("activation offload", "activation_offload", _offload("activation_offload")),
        # Of sizes that no program has, so that each call is unlike the plan, and moves the largest half of what it saves.
        ("activation offload, partly", "activation_offload", _offload("activation_offload", storages=[[3, 1]], share=0.5)),
        ("tiled tokens", "tiled_tokens", _each_block("tiled_tokens", num_tiles=2)),
        ("tiled convolutions", "tiled_convolutions", _range("tiled_convolutions", "chain", needs_sequential=True, num_tiles=2)),
        ("chunked loss, gradients in forward", "chunked_loss", _chunked_loss("forward")),
        ("chunked loss, gradients in backward", "chunked_loss", _chunked_loss("backward")),
        ("attention", "attention", _attention),
        ("micro-batches", "micro_batches", _micro_batches),
        ("update in backward", "update_in_backward", _of_optimizer("update_in_backward", kernel="same", clips=False)),
        ("update in backward, clips", "update_in_backward", _of_optimizer("update_in_backward", kernel="same", clips=True)),
        ("optimizer kernel", "optimizer_kernel", _of_optimizer("optimizer_kernel", kernel="for-loop")),
        ("zero_grad", "zero_grad", _of_optimizer("zero_grad", "gradients")),
        ("empty_cache", "empty_cache", _of_model("empty_cache", "allocator", border="before the forward")),
        ("8-bit states", "low_bit_states", _of_optimizer("low_bit_states", bits=8)),
        ("8-bit states in backward", "low_bit_states", _of_optimizer("low_bit_states", bits=8, in_backward=True, clips=False)),
        ("optimizer offload", "optimizer_offload", _of_optimizer("optimizer_offload", host_bytes=1 << 20, window_bytes=1 << 12, least_elements=1)),
        ("optimizer offload in backward", "optimizer_offload", _of_optimizer("optimizer_offload", host_bytes=1 << 20, window_bytes=1 << 12, least_elements=1, in_backward=True, clips=False)),
        ("optimizer offload on the host", "optimizer_offload", _of_optimizer("optimizer_offload", host_bytes=1 << 20, window_bytes=1 << 12, least_elements=1, executor="host")),
        ("8-bit states at the host", "low_bit_offload", _of_optimizer("low_bit_offload", format="8-bit", host_bytes=1 << 20, window_bytes=1 << 18)),
        ("pure bf16", "pure_bf16", _of_optimizer("pure_bf16", "precision", rounding="compensated")),
    ]  # fmt: skip
    return [
        Variant(
            name=name,
            technique=known,
            find=find,
            # With the optimizer's own implementation.
            is_bitwise=(known == "trained_weight_streaming" or technique(known).exactness.startswith("bit for bit"))
            and not name.endswith(("clips", "on the host")),
            is_lossy=not technique(known).exact,
            freezes=known == "weight_streaming",
        )
        for name, known, find in found
    ]


VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _variants()}
# For programs that count hits, draw lines or use operators that another precision lacks.
EXACT = tuple(name for name, variant in VARIANTS.items() if not variant.is_lossy)
# For programs in half precision, where sums in another order are as far off as half precision is.
BITWISE = tuple(name for name, variant in VARIANTS.items() if variant.is_bitwise)
# For clean programs whose blocks mix tokens, which tiles by hand are rightly refused on.
WITHOUT_TILES = tuple(name for name in VARIANTS if name != "tiled tokens")
