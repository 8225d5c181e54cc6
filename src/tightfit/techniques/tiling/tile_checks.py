"""Proofs and value checks for one module that runs in tiles: repeated after any change of shape, mode or module."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.effects.call_trails import WRITTEN_OUTSIDE
from tightfit.effects.code import Code
from tightfit.effects.independence.rows import Mixes, Unsteady
from tightfit.effects.random_states import TorchRandom
from tightfit.effects.state import RegionState, Snapshot, differences, restore, structural_differences
from tightfit.effects.values.fingerprints import paused
from tightfit.effects.values.value_checks import halves_differ, has_values
from tightfit.techniques.tiling.first_state import FirstState
from tightfit.techniques.tiling.tile_function import Tile, TileRuns
from tightfit.techniques.tiling.token_wise_check import check_token_wise
from tightfit.techniques.wrappers.first_order import Refuse
from tightfit.techniques.wrappers.repeated_proofs import RepeatedProofs

_MAX_SHAPES = 64


class _Known:
    """What is proved, with the calls that are still compared by value and what the runs of its tiles have been like."""

    def __init__(self, check_steps: int) -> None:
        self.checks_left = check_steps
        self.runs = TileRuns()


class TileProofs:
    """The proofs for one module, which it refers to weakly. `refuse` makes the error to raise; `check_steps` calls are compared by value."""

    def __init__(self, module: torch.nn.Module, refuse: Refuse, check_steps: int, repeats: RepeatedProofs) -> None:
        self._module = weakref.ref(module)
        self._refuse = refuse
        self._check_steps = check_steps
        self._repeats = repeats
        self._state = RegionState()
        # By what Python code may branch on.
        self._known: dict[Any, _Known] = {}
        # Whether the last call is one of those that are compared by value.
        self.is_checked = False
        self._before: Snapshot | None = None
        self._at_call: Snapshot | None = None
        self._random: TorchRandom | None = None
        self._code: Code | None = None
        self._is_unsteady = False
        # What tiles have been like that went as the last call did.
        self.runs = TileRuns()

    @property
    def names_outside(self) -> bool:
        """Whether code of the module names something by which it may reach outside of the process's memory, or was not looked at yet."""
        return self._before is None or self._before.reach.names_outside

    def prove(
        self, run: Callable[[torch.Tensor], Any], value: torch.Tensor, dim: int, tiles: Sequence[Tile], others: Any
    ) -> FirstState:
        """Proves that `value` may be run in `tiles` along `dim`; the state in which they run.

        Raises:
            ApplyError: it may not be run in tiles.
        """
        module = self._owner()
        self.runs.latest = None
        self._random = TorchRandom.now()
        now = self._at_call = self._state.snapshot(module, is_kept=True)
        # Everything that Python code may branch on: shapes, dtype, device, the other arguments, and autocast,
        # which adds casts.
        key = _key(value, dim, tiles, others)
        hooked = [name for name, p in module.named_parameters() if p._backward_hooks]
        if hooked:
            raise self._refuse(f"has a hook on the gradient of {hooked[0]}, which would see each tile's")
        is_new = self._code is None or not self._code.is_same()
        if is_new or self._before is None or structural_differences(self._before, now):
            self._known.clear()
        known = self._known.get(key)
        if known is None:
            self.prove_again(run, dim, tiles, value)
            before, now = self._before, self._state.snapshot(module, is_kept=True)
            # Padded text has a new length in nearly every batch. What is left behind by the first call of one may be
            # another state for the others.
            if len(self._known) >= _MAX_SHAPES or (before is not None and structural_differences(before, now)):
                self._known.clear()
            self._before, self._code = now, now.reach.code
            # Others: backward passes of earlier calls are compared with what was proved for those.
            known = self._known[key] = _Known(self._check_steps)
        self.runs = known.runs
        self.runs.latest = None
        self.is_checked = known.checks_left > 0 and has_values(value)
        if self.is_checked:
            known.checks_left -= 1
            self._compare_halves(run, dim, tiles, value)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return FirstState(self._owner, self._state, now, code=self._code, trained=trained)

    def forget(self) -> None:
        """Drops the state that `put_back` puts back, and the calls of tiles, whose weak references to tensors would be in the way of `torch.utils.swap_tensors`."""
        self._at_call = self.runs.latest = None

    def put_back(self) -> str:
        """Puts the state back to that of when `prove` was called, since `forget`; the first change that stays, in words, or nothing."""
        before, self._at_call = self._at_call, None
        if before is None or self._random is None:
            return ""
        if self._is_unsteady:
            return "state that a snapshot does not cover"
        calls, self.runs.latest = self.runs.latest, None
        if calls is not None and calls.written_outside(before.reach.tensors):
            return WRITTEN_OUTSIDE
        del calls
        module = self._owner()
        found = differences(before, self._state.snapshot(module))
        if found and not before.gone():
            restore(before)
            found = differences(before, self._state.snapshot(module))
        self._random.put()
        return str(found[0]) if found else ""

    def prove_again(
        self, run: Callable[[torch.Tensor], Any], dim: int, tiles: Sequence[Tile], value: torch.Tensor
    ) -> None:
        """The proof alone, for the way through the code that it takes now.

        Raises:
            ApplyError: it may not be run in tiles.
        """
        with paused():
            part = tiles[0].of(value.detach(), dim)

        def first_call() -> Any:
            with torch.no_grad(), paused():
                return run(part)

        parts = [t.end - t.begin for t in tiles]
        try:
            with self._repeats.counted((id(self), value.shape)):
                check_token_wise(self._owner(), run, value, dim, parts, first_call=first_call)
        except Mixes as error:
            self._is_unsteady = isinstance(error, Unsteady)
            raise self._refuse(f"cannot be run in tiles: {error}") from None

    def prove_other_way(
        self, run: Callable[[torch.Tensor], Any], dim: int, tiles: Sequence[Tile], value: torch.Tensor
    ) -> None:
        """The proof and the comparison of values, for a tile that called other functions than the run that was proved.

        Raises:
            ApplyError: it may not be run in tiles.
        """
        self.prove_again(run, dim, tiles, value)
        if self._check_steps:
            self._compare_halves(run, dim, tiles, value)

    def _compare_halves(
        self, run: Callable[[torch.Tensor], Any], dim: int, tiles: Sequence[Tile], value: torch.Tensor
    ) -> None:
        with paused():
            told = halves_differ(self._owner(), run, tiles[0].of(value.detach(), dim), dim)
        if told:
            raise self._refuse(f"cannot be run in tiles: {told}")

    def _owner(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None
        return module


def _key(value: torch.Tensor, dim: int, tiles: Sequence[Tile], others: Any) -> Any:
    device = value.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return value.shape, value.dtype, value.device, dim, len(tiles), repr(others), autocast
