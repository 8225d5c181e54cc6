"""Puts `tiled_tokens` on live objects: see `tightfit.techniques.tiling.tiled_tokens` for what it is and where it comes from."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.effects.ambient import modes_of_program
from tightfit.effects.holders import PLAIN
from tightfit.effects.outside_calls import without_outside_calls
from tightfit.effects.values.fingerprints import paused
from tightfit.effects.values.value_checks import has_values
from tightfit.errors import ApplyError, TightfitError, apply_errors_said, forget_apply_errors_since
from tightfit.errors.faults import is_ours
from tightfit.techniques.session import Session, Verdict, without_numbers
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.techniques.tiling.tile_checks import TileProofs
from tightfit.techniques.tiling.tile_function import Tile, Tiling, run_tiled
from tightfit.techniques.wrappers.first_order import are_transforms_active
from tightfit.techniques.wrappers.forwards import plain_forwards
from tightfit.techniques.wrappers.repeated_proofs import RepeatedProofs
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.techniques.wrappers.unwrap_model import module_of
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself
from tightfit.torch_hooks.weak_references import WeakTable

_NAME = "tiled_tokens"
_graph_task: Callable[[], int] = GRAPH_TASK_ID.value()

# Modules that are known to mix tokens, to refuse them before anything runs.
_MIXES = (
    torch.nn.modules.conv._ConvNd,
    torch.nn.modules.batchnorm._BatchNorm,
    torch.nn.GroupNorm,
    torch.nn.RNNBase,
    torch.nn.MultiheadAttention,
)


def apply_tiled_tokens(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the forward of each module; that it is token-wise is proved on its first tile, before any result is used."""

    def check(choice: ChosenOption) -> torch.nn.Module:
        module = session.module(choice.where)
        for name, part in module.named_modules():
            if isinstance(part, _MIXES):
                raise ApplyError(
                    f"{choice.where} contains {name or 'itself'}, a {type(part).__name__}, which mixes tokens; leave it out"
                )
        return module

    for choice, module in zip(chosen, check_each(chosen, check), strict=True):
        session.wrap_forward(
            module,
            _Tiles(
                choice.where,
                choice.settings["num_tiles"],
                verdict=session.verdict,
                check_steps=session.check_steps,
                notes=session.notes,
            ),
        )


class _Tiles:
    """The wrapper around the forward of one module."""

    def __init__(self, where: str, num_tiles: int, *, verdict: Verdict, check_steps: int, notes: list[str]) -> None:
        self._where = where
        self._num_tiles = num_tiles
        self._verdict = verdict
        self._check_steps = check_steps
        self._proofs: WeakTable[torch.nn.Module, TileProofs] = WeakTable()
        self._repeats = RepeatedProofs(_NAME, notes)
        self._notes = notes
        self._said: set[str] = set()
        self._has_run = False
        self._has_reached_outside = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tiles":
        return _Tiles(self._where, self._num_tiles, verdict=Verdict(), check_steps=self._check_steps, notes=[])

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # Before all else: a mode is given each look at a tensor too.
        if modes_of_program():
            return forward(*args, **kwargs)
        value = args[0] if args else None
        if not torch.is_grad_enabled() or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling() or are_transforms_active() or packs_by_itself() or is_looked_at(args, kwargs):
            # Code that is compiled or traced runs whole; so does a call that is differentiated by itself, or with others at once: it keeps nothing for the backward pass of the step.
            # And hooks of the program's own are to be given all that is saved.
            return forward(*args, **kwargs)
        failure, said = self._verdict.failure, apply_errors_said()
        try:
            return self._proved(forward, value, args, kwargs)
        except ApplyError as error:
            if self._may_run_whole(error, module_of(forward), value):
                self._verdict.failure = failure
                forget_apply_errors_since(said)
            elif not self._may_go_on(error, value):
                raise
            return forward(*args, **kwargs)

    def _may_run_whole(self, error: ApplyError, module: torch.nn.Module, value: torch.Tensor) -> bool:
        """Whether a call that cannot be in tiles may run whole: if others were, and its tiles and proofs have left nothing behind. In a trace it is refused: the next plan is made without."""
        proofs = self._proofs.get(module)
        is_own = error.technique == _NAME and self._where in error.places
        if self._has_reached_outside or not (is_own and self._has_run and has_values(value)):
            return False
        if proofs is not None and proofs.put_back():
            return False
        note = f"tiled_tokens: a later call ran whole: {str(error).partition('; leave it out')[0]}"
        if without_numbers(note) not in self._said:
            self._said.add(without_numbers(note))
            self._notes.append(note)
        return True

    def _may_go_on(self, error: ApplyError, value: torch.Tensor) -> bool:
        """Whether a trace goes on after a refusal, which ends it before its step: by then it knows of all tiles that are refused, and the next plan is made without them."""
        is_own = error.technique == _NAME and self._where in error.places
        return is_own and not self._check_steps and not has_values(value) and _graph_task() == -1

    def _proved(
        self, forward: Callable[..., Any], value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        proofs = self._proofs.get(module_of(forward))
        if proofs is not None:
            proofs.forget()
        rest = [leaf for leaf in tree_leaves((args[1:], kwargs)) if not isinstance(leaf, PLAIN)]
        if any(isinstance(other, torch.Tensor) for other in rest):
            raise self._refusal("is called with more than one tensor, and tiled_tokens handles one")
        if rest:
            raise self._refusal(f"is called with a {type(rest[0]).__name__}, which tiles would share")
        dim = _dimension(value, self._num_tiles)
        if dim is None:
            return forward(*args, **kwargs)
        try:
            return self._in_tiles(forward, value, dim, args[1:], kwargs)
        except Exception as error:
            self._refuse_tiles_that_raise(error, forward, args, kwargs)
            raise

    def _in_tiles(
        self,
        forward: Callable[..., Any],
        value: torch.Tensor,
        dim: int,
        others: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        tiles = _cut(value.shape[dim], self._num_tiles)
        module = module_of(forward)
        # The function that runs a tile is referred to by the graph: it must not refer to the whole input, which
        # an enclosing module may free.

        def run(_: Tile, part: torch.Tensor) -> torch.Tensor:
            return forward(part, *others, **kwargs)

        proofs = self._proofs.get(module)
        if proofs is None:
            proofs = self._proofs[module] = TileProofs(module, self._refusal, self._check_steps, self._repeats)
        is_watched = has_values(value) and (value.device.type == "cpu" or proofs.names_outside)
        with without_outside_calls(self._refuse_outside, is_on=is_watched):
            run_first = functools.partial(run, tiles[0])
            first_state = proofs.prove(run_first, value, dim, tiles, (others, kwargs))
            tiling = Tiling(
                run=run,
                tiles=tiles,
                dim=dim,
                parameters=list(module.parameters()),
                refuse=self._refusal,
                first_state=first_state,
                is_checked=proofs.is_checked,
                runs=proofs.runs,
                prove_again=functools.partial(proofs.prove_other_way, run_first, dim, tiles)
                if has_values(value)
                else None,
            )
            found = run_tiled(tiling, value)
            proofs.forget()
        self._has_run = True
        return found

    def _refuse_tiles_that_raise(
        self, error: Exception, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuses if a tile raises an error that the whole does not; an error of the whole is the program's own.

        Not in a backward pass: a recomputation raises to end early, and its tiles have run before.
        """
        if _graph_task() != -1:
            return
        if is_ours(error) or isinstance(error, TightfitError | MemoryError | RecursionError | torch.OutOfMemoryError):
            return
        try:
            with plain_forwards(), paused():
                forward(*args, **kwargs)
        except Exception:  # noqa: BLE001 - that of the tile is raised
            return
        told = " ".join(str(error).split())
        raise self._refusal(
            f"raises {type(error).__name__} for some of its tokens, and not for all ({told})"
        ) from error

    def _refuse_outside(self, why: str) -> ApplyError:
        self._has_reached_outside = True
        return self._refusal(why)

    def _refusal(self, why: str) -> ApplyError:
        return self._verdict.refuse(
            f"{self._where} {why}; leave it out (tightfit plan --without {_NAME}@{self._where})",
            technique=_NAME,
            places=(self._where,),
        )


def _dimension(value: torch.Tensor, num_tiles: int) -> int | None:
    """The first dimension that can be split into `num_tiles` tiles, or else the longest; None if tiles would have fewer than two tokens."""
    # Leading dimensions first: their tiles are contiguous, and are not copied.
    leading = value.shape[:-1]
    if math.prod(leading) < 2 * num_tiles:
        return None
    return next(
        (dim for dim, size in enumerate(leading) if size >= 2 * num_tiles),
        max(range(len(leading)), key=lambda d: leading[d]),
    )


def _cut(length: int, num_tiles: int) -> list[Tile]:
    """`num_tiles` tiles of nearly the same length, or as many as have two positions each: how dimensions lie in memory is not seen from one."""
    num_tiles = max(1, min(num_tiles, length // 2))
    borders = [length * number // num_tiles for number in range(num_tiles + 1)]
    return [Tile(begin=b, end=e, out_begin=b, out_end=e) for b, e in itertools.pairwise(borders)]
