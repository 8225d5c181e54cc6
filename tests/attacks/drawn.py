"""What a plan may hold at once on an attack's model, drawn by chance: techniques of several kinds at different blocks, with settings of many sizes.

A plan holds at most one option of each slot; the slots here are those that the techniques give their options (`test_drawn.py` compares them).
"""

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import torch
from tests.attacks.dressed import DRESSES
from tests.attacks.places import VARIANTS, Variant, choice
from torch import nn

from tightfit.analysis.updates import BACKWARD_SLOT
from tightfit.planner.plan import Choice
from tightfit.techniques.offload.streamable import streamable

CLASSES = ("bitwise", "exact", "exact", "lossy")
"""Whether all parts of a combination are bit for bit, some up to the order of sums, or some lossy."""
_OF_OPTIMIZERS = "optimizer"
_SMALLEST_DISK = 1 << 16
# How likely it is that a candidate is taken where its slots are free, for those that leave room for others.
_SELDOM = {"empty_cache": 0.3, "zero_grad": 0.4, "micro_batches": 0.35, "trained_weight_streaming": 0.25}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice with its slots; `variant` is the key of `VARIANTS` that it is nearest to, and `weight` says how early it is looked at."""

    choice: Choice
    slots: frozenset[str]
    variant: str
    weight: float = 1.0

    @property
    def key(self) -> str:
        """A name that tells it from the others of its model."""
        settings = {n: v for n, v in self.choice.settings.items() if n not in ("following", "preceding", "host_bytes")}
        return f"{self.choice.technique}@{self.choice.where}{settings or ''}"


@dataclasses.dataclass(slots=True, kw_only=True)
class Combination:
    """Draws the choices of each model that a program hands over, from a seed. `names` are the variants that may take part; `taken` is filled
    with the keys of what was taken, each behind the number of its model. What is in `left_out` is drawn and then dropped.

    With `ignores_slots` one candidate more is taken at a slot that is full, as no plan does.
    """

    seed: str
    names: tuple[str, ...]
    ignores_slots: bool = False
    left_out: frozenset[str] = frozenset()
    taken: list[str] = dataclasses.field(default_factory=list)
    _num_models: int = 0

    def find(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        """The choices for a model and its optimizers."""
        self._num_models += 1
        chance = random.Random(f"{self.seed} {self._num_models}")
        drawn = list(draw(model, optimizers, self.names, chance, ignores_slots=self.ignores_slots))
        kept = [each for each in drawn if f"{self._num_models}:{each.key}" not in self.left_out]
        self.taken += [f"{self._num_models}:{each.key}" for each in kept]
        return [each.choice for each in kept]


def drawn_dresses(chance: random.Random) -> tuple[str, ...]:
    """One or two, of which one at most replaces layers."""
    one, other = chance.sample(DRESSES, 2)
    return (one,) if one == other or {one, other}.isdisjoint({"autocast", "frozen"}) else (one, other)


def combined(name: str, combination: Combination, kind: str, dresses: tuple[str, ...] = ()) -> Variant:
    """The combination as a variant of the class `kind`, on a model with these dresses."""
    return Variant(
        name=name,
        technique="",
        find=combination.find,
        is_bitwise=kind == "bitwise",
        # Sums in another order, with 8 significant bits.
        is_lossy=kind == "lossy" or (kind == "exact" and "autocast" in dresses),
        freezes="weight streaming" in combination.names,
        dresses=dresses,
    )


def names_of(kind: str, only: Sequence[str], refused: Sequence[str] = (), *, freezes: bool) -> tuple[str, ...]:
    """The variants that may take part in a combination of a class, of those that the program is tried with; without some that it `refused` alone."""
    allowed = {
        "bitwise": lambda variant: variant.is_bitwise,
        "exact": lambda variant: not variant.is_lossy,
        "lossy": lambda _: True,
    }[kind]
    return tuple(
        name
        for name, variant in VARIANTS.items()
        if allowed(variant) and (not only or name in only) and name not in refused and (freezes or not variant.freezes)
    )


def draw(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Sequence[str],
    chance: random.Random,
    *,
    ignores_slots: bool = False,
) -> Iterator[Candidate]:
    """Candidates that share no slot, in the order in which they are taken."""
    found = [each for each in candidates(model, optimizers, chance) if each.variant in names]
    found.sort(key=lambda each: chance.random() ** (1 / each.weight), reverse=True)
    taken: set[str] = set()
    places: set[tuple[str, str]] = set()
    left = int(ignores_slots)
    for each in found:
        if chance.random() > _SELDOM.get(each.choice.technique, 0.85):
            continue
        # One option of a technique at a place.
        place = each.choice.technique, each.key
        if place in places:
            continue
        if each.slots & taken:
            if not left or not places:
                continue
            left -= 1
        taken |= each.slots
        places.add(place)
        yield each


def candidates(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], chance: random.Random
) -> Iterator[Candidate]:
    """All that could be taken, with settings that are drawn."""
    at = _Places(model, chance)
    yield from at.of_blocks()
    yield from at.of_containers()
    yield from at.of_ranges()
    yield from at.of_streaming()
    yield from at.of_heads()
    if optimizers:
        yield from _of_optimizers(chance)
        if getattr(model, "returns_loss", False):
            settings = {"num_parts": chance.choice([2, 2, 3, 4]), "draws_anew": False}
            yield _candidate("micro_batches", "batch", "micro-batches", {"batch", BACKWARD_SLOT}, settings)
    border = chance.choice(["before the forward", "after the forward", "before the optimizer", "after the optimizer"])
    yield _candidate("empty_cache", "allocator", "empty_cache", {"allocator"}, {"border": border})


class _Places:
    """The candidates at the modules of one model."""

    def __init__(self, model: nn.Module, chance: random.Random) -> None:
        self._model, self._chance = model, chance
        self._root = type(model).__name__
        # A module that is there under two names has one path in a trace.
        self._paths = {path: module for path, module in model.named_modules() if path}
        self._lists = {
            path: [key for key in module._modules if f"{path}.{key}" in self._paths]
            for path, module in self._paths.items()
            if path.rpartition(".")[2] == "blocks" or isinstance(module, nn.ModuleList | nn.Sequential)
        }

    def of_blocks(self) -> Iterator[Candidate]:
        """Each block and each child of a list: recomputed, offloaded, in tiles."""
        for path, keys in self._lists.items():
            for key, following in itertools.pairwise([*keys, ""]):
                block = f"{path}.{key}"
                yield from self._recomputed(block)
                yield self._tiles(block)
                if self._chance.random() < 0.3:
                    yield from (self._tiles(each, recomputed=True, weight=0.5) for each in self._inside(block))
                if following:
                    yield from self._offloaded(block, f"{path}.{following}")

    def of_containers(self) -> Iterator[Candidate]:
        """Modules inside of blocks, around them and beside them, that are made of others: these are looked at seldom."""
        in_lists = {f"{path}.{key}" for path, keys in self._lists.items() for key in keys}
        for path, module in self._paths.items():
            is_called = type(module).forward is not nn.Module.forward and not isinstance(module, nn.ModuleList)
            if path not in in_lists and module._modules and is_called:
                yield from self._recomputed(path, weight=0.3)

    def of_ranges(self) -> Iterator[Candidate]:
        """Some children of a list, as a segment or as a chain of convolutions."""
        for path, keys in self._lists.items():
            module = self._paths[path]
            for _ in range(2 if len(keys) > 2 else 1):
                if not keys or keys != [str(number) for number in range(len(keys))]:
                    continue
                begin = self._chance.randrange(len(keys))
                end = self._chance.randint(begin + 1, len(keys))
                if self._chance.random() < 0.3:
                    begin, end = 0, len(keys)
                slots = frozenset[str]().union(
                    *(self._slots("activations", f"{path}.{key}") for key in keys[begin:end])
                )
                settings = {"begin": begin, "end": end}
                yield self._candidate("nested_checkpointing", path, "nested checkpointing", slots, settings)
                if type(module) is nn.Sequential:
                    segments = {f"segments@{self._where(f'{path}.{key}')}" for key in keys[begin:end]}
                    yield self._candidate(
                        "sequential_checkpointing", path, "sequential checkpointing", slots | segments, settings
                    )
                if any(isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d) for each in module.modules()):
                    settings = {**settings, "num_tiles": self._chance.choice([2, 2, 3])}
                    tiles = {slot.replace("activations@", "tiles@", 1) for slot in slots}
                    yield self._candidate(
                        "tiled_convolutions", path, "tiled convolutions", slots | tiles, settings, weight=2.0
                    )

    def of_streaming(self) -> Iterator[Candidate]:
        """The weights of blocks, one by one where they are frozen, and of all or some blocks where they are trained."""
        every = [(path, key) for path, keys in self._lists.items() if path.endswith("blocks") for key in keys]
        paths = [f"{path}.{key}" for path, key in every]
        for before, path, after in zip(["", *paths], paths, [*paths[1:], ""], strict=False):
            if streamable(self._model, self._paths[path], 1):
                beside = {"preceding": self._where(before), "following": self._where(after), "smallest_bytes": 1}
                yield self._candidate(
                    "weight_streaming",
                    path,
                    "weight streaming",
                    self._slots("weights", path),
                    {**beside, **self._tier(1 << 14)},
                )
        some = paths[: self._chance.randint(1, len(paths))] if paths else []
        if any(streamable(self._model, self._paths[path], 1, with_trained=True) for path in some):
            slots = frozenset({"optimizer"}).union(*(self._slots("weights", path) for path in some))
            settings = {"blocks": some, "smallest_bytes": 1, "host_bytes": 1 << 17}
            yield self._candidate("trained_weight_streaming", "", "trained weight streaming", slots, settings)

    def of_heads(self) -> Iterator[Candidate]:
        """Loss heads, and attention by hand."""
        for path in self._paths:
            if path.rpartition(".")[2] == "head":
                where = self._chance.choice(["forward", "backward"])
                settings = {"num_chunks": self._chance.randint(2, 5), "gradients_in": where}
                slots = {f"loss head@{self._where(path)}"}
                yield self._candidate("chunked_loss", path, f"chunked loss, gradients in {where}", slots, settings)
        modules = [self._where(path) for path, module in self._paths.items() if hasattr(module, "is_attention")]
        if modules:
            slots = {f"attention@{module}" for module in modules}
            yield _candidate("attention", "attention", "attention", slots, {"modules": modules}, weight=2.0)

    def _recomputed(self, path: str, weight: float = 1.0) -> Iterator[Candidate]:
        slots = self._slots("activations", path)
        yield self._candidate("checkpointing", path, "checkpointing", slots, weight=weight)
        keep = sorted(self._chance.sample(range(6), self._chance.randint(1, 3)))
        yield self._candidate(
            "selective_checkpointing", path, "selective checkpointing", slots, {"keep": keep}, weight=weight
        )

    def _offloaded(self, path: str, following: str) -> Iterator[Candidate]:
        slots, settings = (
            self._slots("activations", path),
            {"following": self._where(following), "smallest_bytes": self._chance.choice([1, 1, 512])},
        )
        some = {"storages": [[3, 1]], "share": self._chance.choice([0.3, 0.5, 0.8])}
        yield self._candidate("activation_offload", path, "activation offload", slots, settings | self._tier(1 << 14))
        yield self._candidate(
            "activation_offload", path, "activation offload, partly", slots, settings | some | {"host_bytes": 1 << 14}
        )
        keep = {"keep": [self._chance.randrange(4)]} if self._chance.random() < 0.5 else {}
        name = "offloaded checkpointing, selective" if keep else "offloaded checkpointing"
        yield self._candidate("offloaded_checkpointing", path, name, slots, {**settings, **keep, "host_bytes": 1 << 14})

    def _tiles(self, path: str, *, recomputed: bool = False, weight: float = 1.0) -> Candidate:
        settings = {"num_tiles": self._chance.choice([2, 2, 3, 4]), **({"recomputed": True} if recomputed else {})}
        slots = self._slots("tiles", path) | (frozenset() if recomputed else self._slots("activations", path))
        slots |= {f"segments@{self._where(p)}" for p in self._paths if p.rpartition(".")[0] == path}
        return self._candidate("tiled_tokens", path, "tiled tokens", slots, settings, weight=weight)

    def _inside(self, path: str) -> Iterable[str]:
        """Modules below a block that are made of others or have weights."""
        inside = [p for p, module in self._paths.items() if p.startswith(f"{path}.") and [*module.parameters()]]
        return self._chance.sample(inside, min(2, len(inside)))

    def _tier(self, host_bytes: int) -> dict[str, object]:
        if self._chance.random() < 0.15:
            return {"host_bytes": 1 << 20, "tier": "disk", "disk_bytes": 1 << 20}
        return {"host_bytes": host_bytes}

    def _slots(self, kind: str, path: str) -> frozenset[str]:
        inside = (p for p in self._paths if p == path or p.startswith(f"{path}."))
        return frozenset(f"{kind}@{self._where(p)}" for p in inside)

    def _where(self, path: str) -> str:
        return f"{self._root}.{path}" if path else ""

    def _candidate(
        self,
        technique: str,
        path: str,
        variant: str,
        slots: Iterable[str],
        settings: dict[str, object] | None = None,
        weight: float = 1.0,
    ) -> Candidate:
        return _candidate(technique, self._where(path) or self._root, variant, slots, settings, weight)


def _of_optimizers(chance: random.Random) -> Iterator[Candidate]:
    own, backward = {"optimizer"}, {"optimizer", BACKWARD_SLOT}
    kernel = chance.choice(["same", "same", "fused"])
    at_host = {"host_bytes": 1 << 20, "window_bytes": chance.choice([1 << 10, 1 << 12, 1 << 16]), "least_elements": 1}
    given: list[tuple[str, str, set[str], dict[str, object]]] = [
        ("update_in_backward", "update in backward", backward, {"kernel": "same", "clips": False}),
        ("update_in_backward", "update in backward, clips", backward, {"kernel": kernel, "clips": True}),
        ("optimizer_kernel", "optimizer kernel", own, {"kernel": chance.choice(["for-loop", "foreach", "fused"])}),
        ("low_bit_states", "8-bit states", own, {"bits": 8}),
        ("low_bit_states", "8-bit states in backward", backward, {"bits": 8, "in_backward": True, "clips": False}),
        ("optimizer_offload", "optimizer offload", own, at_host),
        ("optimizer_offload", "optimizer offload on the host", own, {**at_host, "executor": "host"}),
        (
            "optimizer_offload",
            "optimizer offload in backward",
            backward,
            {**at_host, "in_backward": True, "clips": False},
        ),
        (
            "low_bit_offload",
            "8-bit states at the host",
            own,
            {"format": chance.choice(["8-bit", "bf16"]), "host_bytes": 1 << 20, "window_bytes": 1 << 18},
        ),
    ]
    # Each takes the optimizer: so that all are met alike, one is looked at first.
    first = chance.randrange(len(given))
    for number, (technique, variant, slots, settings) in enumerate(given):
        yield _candidate(technique, _OF_OPTIMIZERS, variant, slots, settings, 2.0 if number == first else 0.5)
    rounding = chance.choice(["compensated", "stochastic"])
    yield _candidate("pure_bf16", "precision", "pure bf16", {"precision", *own}, {"rounding": rounding})
    # No variant has these alone: they are drawn where any lossy one is.
    yield _candidate("autocast", "precision", "pure bf16", {"precision"}, {"dtype": "bfloat16"})
    yield _candidate("zero_grad", "gradients", "zero_grad", {"zero_grad"}, {})


def _candidate(
    technique: str,
    where: str,
    variant: str,
    slots: Iterable[str],
    settings: dict[str, object] | None = None,
    weight: float = 1.0,
) -> Candidate:
    made = choice(technique, where, **(settings or {}))
    return Candidate(choice=made, slots=frozenset(slots), variant=variant, weight=weight)
