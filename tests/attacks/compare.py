"""Compares what a planned run saw with what the plain run saw: bit for bit, up to the order of sums, or, for lossy techniques, roughly."""

import dataclasses
import math
from typing import Any

import torch
from tests.attacks.trial import Snapshot, Values

# Models of attacks train in float64 (lossy techniques: float32); sums in another order differ by far less than this.
_ORDER = {"rtol": 1e-6, "atol": 1e-9}
# Share of the distance that the weights have moved, by which a lossy run may differ.
_LOSSY_SHARE = 0.35
_LOSSY_ROUNDING = 0.01
# Hits that a program counts.
_LOSSY_COUNT = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """How close two runs must be."""

    is_bitwise: bool
    is_lossy: bool

    def difference(self, plain: Any, found: Any, name: str) -> str:
        """In what two values differ, in words; empty where they are close enough."""
        if isinstance(plain, torch.Tensor) and isinstance(found, torch.Tensor):
            return self._of_tensors(plain, found, name)
        if isinstance(plain, list) and isinstance(found, list):
            if len(plain) != len(found):
                return f"{name} has {len(found)} entries instead of {len(plain)}"
            pairs = [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(zip(plain, found, strict=True))]
        elif isinstance(plain, dict) and isinstance(found, dict):
            if plain.keys() != found.keys():
                return f"{name} has {sorted(found)} instead of {sorted(plain)}"
            pairs = [(f"{name}.{key}", a, found[key]) for key, a in plain.items()]
        elif isinstance(plain, float) and isinstance(found, float):
            return self._of_tensors(torch.tensor(plain), torch.tensor(found), name)
        elif self.is_lossy and type(plain) is int and type(found) is int:
            return "" if abs(plain - found) <= _LOSSY_COUNT else f"{name} is {found} instead of {plain}"
        else:
            return "" if bool(plain == found) else f"{name} is {_short(found)} instead of {_short(plain)}"
        return next((told for label, a, b in pairs if (told := self.difference(a, b, label))), "")

    def _of_tensors(self, plain: torch.Tensor, found: torch.Tensor, name: str) -> str:
        if plain.layout != found.layout:
            return f"{name} is {found.layout} instead of {plain.layout}"
        if plain.layout is not torch.strided:
            plain, found = plain.to_dense(), found.to_dense()
        if plain.is_complex() and found.is_complex():
            plain, found = torch.view_as_real(plain), torch.view_as_real(found)
        if plain.shape != found.shape:
            return f"{name} has the shape {list(found.shape)} instead of {list(plain.shape)}"
        if self.is_lossy and plain.dtype in (torch.int32, torch.long):
            same = bool(((plain - found).abs() <= _LOSSY_COUNT).all())
        elif not (plain.is_floating_point() or plain.is_complex()) or self.is_bitwise:
            same = plain.dtype == found.dtype and bool(((plain == found) | ((plain != plain) & (found != found))).all())
        elif self.is_lossy:
            scale = float(plain.double().nan_to_num().abs().max()) if plain.numel() else 0.0
            same = _all_close(found, plain, rtol=0.0, atol=0.2 * scale + 0.05)
        else:
            same = plain.dtype == found.dtype and _all_close(found, plain, **_ORDER)
        if same:
            return ""
        if plain.numel() == 1:
            return f"{name} is {float(found):.6g} instead of {float(plain):.6g}"
        return f"{name} is off by {float((found.double() - plain.double()).abs().max()):.3g}"

    def difference_of_states(self, begin: Snapshot, plain: Snapshot, found: Snapshot) -> str:
        """The same for the states after a step; `begin` is the state before the first."""
        if self.is_lossy:
            told = _moved_elsewhere(begin.weights, plain.weights, found.weights)
        else:
            told = self.difference(plain.weights, found.weights, "weights")
        return (
            told
            or self.difference(plain.buffers, found.buffers, "buffers")
            or self.difference(plain.attributes, found.attributes, "attributes")
            or next((f"the random state of {n} differs" for n, s in plain.random.items() if not _same(s, found.random[n])), "")
        )  # fmt: skip

    def weights_differ(self, begin: Snapshot, plain: Snapshot, found: Snapshot, but: tuple[str, ...] = ()) -> str:
        """Only the weights, but those whose names end with one of `but`, and those of models that were not handed over yet."""
        there = {name.partition(".")[0] for name in found.weights}
        of_plain, of_found = (
            {n: v for n, v in s.weights.items() if not n.endswith(but) and n.partition(".")[0] in there}
            for s in (plain, found)
        )
        if self.is_lossy:
            return _moved_elsewhere(begin.weights, of_plain, of_found)
        return Closeness(is_bitwise=False, is_lossy=False).difference(of_plain, of_found, "weights")


def _moved_elsewhere(begin: Values, plain: Values, found: Values) -> str:
    """Whether the weights as a whole have gone elsewhere than those of the plain run."""
    if plain.keys() != found.keys():
        return f"weights are {sorted(found)} instead of {sorted(plain)}"
    if other := [n for n in plain if found[n].shape != plain[n].shape]:
        return f"{other[0]} has the shape {list(found[other[0]].shape)} instead of {list(plain[other[0]].shape)}"
    # A weight that has grown has no way from where it began.
    there = [n for n in plain if n in begin and begin[n].shape == plain[n].shape]
    off = math.sqrt(sum(_squares(found[n].double() - plain[n].double(), found[n], plain[n]) for n in plain))
    way = math.sqrt(sum(_squares(plain[n].double() - begin[n].double(), plain[n]) for n in there))
    size = math.sqrt(sum(_squares(plain[n].double(), plain[n]) for n in plain))
    if off <= _LOSSY_SHARE * way + _LOSSY_ROUNDING * size:
        return ""
    return f"weights are off by {off:.3g}, having moved by {way:.3g}"


def _squares(values: torch.Tensor, *of: torch.Tensor) -> float:
    """The sum of the squares, without those where all of these tensors are NaN: a plain run may diverge."""
    is_lost = torch.stack([each.isnan() for each in of]).all(0)
    return float(values.masked_fill(is_lost, 0).square().sum())


def _all_close(found: torch.Tensor, plain: torch.Tensor, *, rtol: float, atol: float) -> bool:
    return torch.allclose(found.double(), plain.double(), rtol=rtol, atol=atol, equal_nan=True)


def _same(plain: Any, found: Any) -> bool:
    return torch.equal(plain, found) if isinstance(plain, torch.Tensor) else plain == found


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
