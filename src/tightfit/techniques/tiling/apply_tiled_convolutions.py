"""Puts `tiled_convolutions` on live objects: see `tightfit.techniques.tiling.tiled_convolutions` for what it is and where it comes from."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tightfit.effects.ambient import modes_of_program
from tightfit.effects.code import Code
from tightfit.effects.independence.row_proof import are_all_hooked_backward, are_all_hooked_forward
from tightfit.effects.state import RegionState
from tightfit.effects.users_code import is_users_function
from tightfit.effects.values.fingerprints import paused
from tightfit.effects.values.value_checks import bound_for, difference, has_values
from tightfit.errors import ApplyError, apply_errors_said, forget_apply_errors_since
from tightfit.techniques.session import Session, Verdict
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.techniques.tiling.first_state import FirstState
from tightfit.techniques.tiling.halos import (
    AxisLayer,
    check_dimensions,
    flat,
    layers_along,
    length_within,
    paths,
    run_step,
)
from tightfit.techniques.tiling.tile_function import Tile, Tiling, run_tiled
from tightfit.techniques.wrappers.first_order import are_transforms_active
from tightfit.techniques.wrappers.forwards import are_forwards_plain
from tightfit.techniques.wrappers.sequential_ranges import check_sequential, put_range
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself

_NAME = "tiled_convolutions"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# They may return their input itself.
_GIVES_INPUT = (torch.nn.Identity, torch.nn.modules.dropout._DropoutNd)


def apply_tiled_convolutions(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps each Sequential once, with code that runs its chains."""

    def check(choice: ChosenOption) -> None:
        begin, end = choice.settings["begin"], choice.settings["end"]
        sequential = check_sequential(session, choice.where, begin, end)
        children = [child for child in sequential._modules.values() if child is not None][begin:end]
        layers_along(children, 0)
        _check(choice.where, list(flat(children)))

    check_each(chosen, check)
    for choice in chosen:
        slabs = functools.partial(
            _Slabs,
            where=choice.where,
            num_tiles=choice.settings["num_tiles"],
            verdict=session.verdict,
            check_steps=session.check_steps,
            notes=session.notes,
        )
        put_range(session, choice.where, choice.settings["begin"], choice.settings["end"], slabs)


def _check(where: str, modules: Sequence[torch.nn.Module], holders: Sequence[torch.nn.Module] = ()) -> None:
    for module in modules:
        if getattr(module, "inplace", False):
            raise ApplyError(
                f"a chain of {where} begins with a module that modifies its input in place; leave tiled_convolutions "
                "out"
            )
        if not isinstance(module, _GIVES_INPUT):
            break
    if are_all_hooked_forward() or are_all_hooked_backward():
        raise ApplyError("a hook is registered on all modules, which would see tiles; leave tiled_convolutions out")
    for module in (*modules, *holders):
        if any(len(getattr(module, hooks)) for hooks in _HOOKS) or "forward" in vars(module):
            raise ApplyError(
                f"a {type(module).__name__} of {where} has hooks or an overridden forward, which would see tiles; "
                "leave tiled_convolutions out"
            )
        # A script may put its own into torch's class, also later.
        if any(is_users_function(getattr(type(module), name, None)) for name in ("forward", "_conv_forward")):
            raise ApplyError(
                f"the forward of {type(module).__name__} was replaced by the script; leave tiled_convolutions out"
            )


class _Slabs:
    """Runs a chain of layers slab by slab."""

    def __init__(
        self,
        children: Sequence[torch.nn.Module],
        *,
        where: str,
        num_tiles: int,
        verdict: Verdict,
        check_steps: int,
        notes: list[str],
    ) -> None:
        # A ModuleList, so that snapshots can be taken of all children together.
        self._chain = torch.nn.ModuleList()
        # Past the registration of modules, which the program may have hooks on.
        self._chain._modules.update({str(i): child for i, child in enumerate(children)})
        self._where = where
        self._num_tiles = num_tiles
        self._verdict = verdict
        self._notes = notes
        self._has_run = False
        self._check_steps = self._checks_left = check_steps
        self._state = RegionState()
        self._code: Code | None = None

    def __call__(self, value: Any) -> Any:
        if (
            not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or are_forwards_plain()
            or are_transforms_active()
            or packs_by_itself()
            or modes_of_program()
            or is_looked_at(value)
        ):
            return self._plain(value)
        children, said = list(self._chain), apply_errors_said()
        try:
            modules = list(flat(children))
            _check(
                "the chain", modules, [part for child in children for part in child.modules() if part not in modules]
            )
            if not all(parameter.is_leaf for parameter in self._chain.parameters()):
                raise ApplyError(
                    "the chain runs with weights that are not its own (functional_call); leave tiled_convolutions out"
                )
            check_dimensions(children, value)
            # Along the longest side halos are the smallest share.
            dim = max(range(2, value.dim()), key=lambda d: value.shape[d])
            layers: list[AxisLayer] = layers_along(children, dim - 2)
        except ApplyError as error:
            # In a trace it is refused: the next plan is made without.
            if not (self._has_run and has_values(value)):
                raise self._refusal(str(error)) from None
            forget_apply_errors_since(said)
            note = f"{_NAME}: a later call ran whole: {self._where}: {str(error).partition('; leave')[0]}"
            if note not in self._notes:
                self._notes.append(note)
            return self._plain(value)
        steps = {path.tile: path.steps for path in paths(layers, value.shape[dim], self._num_tiles)}

        def run_tile(tile: Tile, part: torch.Tensor) -> torch.Tensor:
            for step in steps[tile]:
                part = run_step(step, part, dim)
            return part

        chain = self._chain
        then = self._state.snapshot(chain, is_kept=True)
        if self._code is None or not self._code.is_same():
            # Another function is compared anew.
            self._code, self._checks_left = then.reach.code, self._check_steps
        trained = [parameter for parameter in chain.parameters() if parameter.requires_grad]
        tiling = Tiling(
            run=run_tile,
            tiles=list(steps),
            dim=dim,
            parameters=list(chain.parameters()),
            first_state=FirstState(lambda: chain, self._state, then, code=self._code, trained=trained),
            overlap=True,
            refuse=self._refusal,
            is_checked=self._checks_left > 0 and has_values(value),
        )
        if tiling.is_checked:
            self._checks_left -= 1
            with paused():
                self._compare(tiling, layers, value)
        found = run_tiled(tiling, value)
        self._has_run = True
        return found

    def _plain(self, value: Any) -> Any:
        for child in self._chain:
            value = child(value)
        return value

    @torch.no_grad()
    def _compare(self, tiling: Tiling, layers: Sequence[AxisLayer], value: torch.Tensor) -> None:
        """Compares the first slab's result with that of the plain chain on the same part of the input, where that does not need more."""
        tile = tiling.tiles[0]
        part = tile.of(value.detach(), tiling.dim)
        length = min(length_within(layers, tile.end), tile.out_end)
        if not length:
            return
        found = tiling.run(tile, part.clone()).narrow(tiling.dim, 0, length)
        expected = self._plain(part.clone()).narrow(tiling.dim, 0, length)
        differs = difference(found, expected, bound_for(part))
        if differs is not None:
            raise self._refusal(f"a slab of the chain differs from the whole result by {differs:.2g} of its norm")

    def _refusal(self, why: str) -> ApplyError:
        return self._verdict.refuse(
            f"{self._where}: {why} (tightfit plan --without {_NAME}@{self._where})",
            technique=_NAME,
            places=(self._where,),
        )
