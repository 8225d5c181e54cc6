"""Tiled convolutions: a chain of convolutions, poolings and activations is run on slabs of the image or volume, each with the halo it needs.

As in spatial partitioning (Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism", arXiv:1903.06681), one
slab after the other on one card instead of at once on several. What the chain makes on the way exists for one slab alone, in both passes.
"""

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from tightfit.devices.device import Device
from tightfit.errors import ApplyError
from tightfit.planner.option import Option
from tightfit.tape import Tape
from tightfit.techniques.halos import Layer, flat, layers_along, paths, run_step
from tightfit.techniques.sequential_ranges import Runner, check_sequential, put_range
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique, Choice, Needs, check_each
from tightfit.techniques.tile_function import Tile, Tiling, run_tiled
from tightfit.techniques.tiled_convolutions_options import tiled_convolutions_options

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@final
class TiledConvolutions(AbstractTechnique):
    """Trades a second forward pass, and the halos twice, for all that a chain keeps and nearly all that it holds on the way."""

    name = "tiled_convolutions"
    exact = True
    needs = Needs.DIVISIBLE
    exactness = "the same up to the order of sums; the gradient of a weight in half precision is summed in float32"
    # A tape has no kernel sizes: halos are reckoned as those of kernels of three.
    tolerance = 0.15

    def options(self, tape: Tape, device: Device) -> Iterable[Option]:
        """Per chain, and per part of it, some numbers of tiles."""
        yield from tiled_convolutions_options(self.name, tape, device)

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Puts one code around each Sequential, that runs its chains."""

        def check(choice: Choice) -> None:
            begin, end = choice.settings["begin"], choice.settings["end"]
            sequential = check_sequential(session, choice.where, begin, end)
            children = [child for child in sequential._modules.values() if child is not None][begin:end]
            layers_along(children, 0)
            _check(choice.where, list(flat(children)))

        check_each(chosen, check)
        for choice in chosen:
            num_tiles = choice.settings["num_tiles"]
            put_range(
                session,
                choice.where,
                choice.settings["begin"],
                choice.settings["end"],
                lambda children, num_tiles=num_tiles: _tiled(children, num_tiles),
            )


def _check(where: str, modules: Sequence[torch.nn.Module]) -> None:
    if getattr(modules[0], "inplace", False):
        raise ApplyError(f"a chain of {where} begins with what writes over its own input; leave tiled_convolutions out")
    for module in modules:
        if any(len(getattr(module, hooks)) for hooks in _HOOKS) or "forward" in vars(module):
            raise ApplyError(
                f"a {type(module).__name__} of {where} has hooks or a forward of its own, which would see tiles; leave tiled_convolutions out"
            )


def _tiled(children: Sequence[torch.nn.Module], num_tiles: int) -> Runner:
    modules = list(flat(children))
    parameters = list({id(p): p for child in children for p in child.parameters()}.values())

    def run(value: Any) -> Any:
        if not torch.is_grad_enabled():
            for child in children:
                value = child(value)
            return value
        _check("the chain", modules)
        dim = max(range(2, value.dim()), key=lambda d: value.shape[d])
        layers: list[Layer] = layers_along(children, dim - 2)
        steps = {path.tile: path.steps for path in paths(layers, value.shape[dim], num_tiles)}

        def run_tile(tile: Tile, part: torch.Tensor) -> torch.Tensor:
            for step in steps[tile]:
                part = run_step(step, part, dim)
            return part

        tiling = Tiling(run=run_tile, tiles=list(steps), dim=dim, parameters=parameters, overlap=True)
        return run_tiled(tiling, value)

    return run
