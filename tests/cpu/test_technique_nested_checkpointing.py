"""Blocks whose inputs are computed again too: the same training bit for bit, less memory than checkpointing, and what is refused."""

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tests.cpu.module_training import DEVICE, Counting, assert_same, choice, promised_peak, timeline, traced, train
from torch import nn
from torch.nn import functional

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.tape import Tape
from tightfit.techniques.recomputation.checkpointing import Checkpointing
from tightfit.techniques.recomputation.nested_checkpointing import NestedCheckpointing, _stacks

NAME = "nested_checkpointing"
torch.set_num_threads(1)


class Block(nn.Module):
    """A residual layer with dropout; returns a tuple, as some libraries do, if `wraps`."""

    def __init__(self, width: int, *, wraps: bool = False) -> None:
        super().__init__()
        self.norm, self.linear, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.wraps = wraps

    def forward(
        self, hidden: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        mixed = self.out(functional.gelu(self.linear(self.norm(hidden))))
        result = hidden + functional.dropout(mixed if scale is None else mixed * scale, 0.2, self.training)
        return (result, None) if self.wraps else result


class Deep(nn.Module):
    """Blocks in a list, with an argument that all of them share."""

    def __init__(self, num_blocks: int = 8, width: int = 6, *, wraps: bool = False, skips: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, wraps=wraps) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(width))
        self.skips = skips

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.skips and number == 2:
                hidden = hidden * 2.0
            result = layer(hidden=hidden, scale=self.scale) if number % 2 else layer(hidden, self.scale)
            hidden = result[0] if isinstance(result, tuple) else result
        return hidden


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(step))).square().mean()


def _chosen(*segments: tuple[int, int]) -> list:
    return [choice(NAME, "Deep.layers", begin=begin, end=end) for begin, end in segments]


@pytest.mark.parametrize("kind", [{}, {"wraps": True}, {"skips": True}])
@pytest.mark.parametrize("segments", [[(0, 8)], [(0, 4), (4, 8)], [(1, 3), (4, 7)]])
def test_training_is_the_same_bit_for_bit(kind, segments):
    assert_same(train(lambda: Deep(**kind), loss_of), train(lambda: Deep(**kind), loss_of, _chosen(*segments)))


def test_each_block_runs_three_times_but_the_last_of_a_segment_and_hooks_see_one_run():
    model, calls = Deep(), []
    for number, layer in enumerate(model.layers):
        layer.norm.register_forward_hook(lambda *_, number=number: calls.append(number))
    with apply_choices(_chosen((0, 4)), model, []), Counting(torch.ops.aten.native_layer_norm.default) as norms:
        loss_of(model, 0).backward()
    assert norms.count == 3 + 3 + 3 + 2 + 1 + 1 + 1 + 1
    assert calls == list(range(8))
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_inputs_inside_a_segment_are_gone_between_the_passes_and_all_after():
    model, inputs = Deep(), {}
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, number=number: inputs.__setitem__(
                number, weakref.ref(args[0] if args else kwargs["hidden"])
            ),
            with_kwargs=True,
        )
    with apply_choices(_chosen((0, 4), (4, 8)), model, []):
        loss = loss_of(model, 0)
        gc.disable()  # nothing waits for a collection
        try:
            assert [inputs[number]() is not None for number in range(8)] == [True, False, False, False] * 2
            loss.backward()
            assert [number for number in range(1, 8) if inputs[number]() is not None] == []
        finally:
            gc.enable()


def test_two_forwards_before_two_backwards_and_a_backward_twice():
    def twice(model: nn.Module, step: int) -> torch.Tensor:
        first, second = loss_of(model, step), loss_of(model, step + 50)
        first.backward(retain_graph=True)
        first.backward()
        return second

    assert_same(train(Deep, twice), train(Deep, twice, _chosen((0, 4), (4, 8))))


def test_evaluation_is_left_alone():
    model = Deep().eval()
    images = torch.randn(2, 3, 6)
    with torch.no_grad(), apply_choices(_chosen((0, 8)), model, []):
        torch.testing.assert_close(model(images), Deep.forward(model, images), rtol=0, atol=0)


def test_autocast_is_that_of_the_first_run():
    def with_autocast(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, step)

    assert_same(train(Deep, with_autocast), train(Deep, with_autocast, _chosen((0, 4), (4, 8))))


def test_what_a_third_run_would_change_is_refused():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)))

    model = Normed()
    with pytest.raises(ApplyError, match="contains 1, a BatchNorm1d whose statistics"):
        apply_choices([choice(NAME, "Normed.layers", begin=0, end=3)], model, [])
    with pytest.raises(ApplyError, match="has no children 0 to 8"):
        apply_choices([choice(NAME, "Deep.layers", begin=0, end=9)], Deep(), [])


def test_what_blocks_write_in_place_is_written_once():
    def spectral() -> nn.Module:
        layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)) for _ in range(3)]
        return nn.Sequential(nn.Sequential(*layers))

    def squares(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(2, 3, generator=torch.Generator().manual_seed(step))).square().sum()

    assert_same(train(spectral, squares), train(spectral, squares, [choice(NAME, "Sequential.0", begin=0, end=3)]))


def workload(num_blocks: int = 16) -> Iterator[torch.Tensor]:
    """`Deep` on the virtual card."""
    model = Deep(num_blocks, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(16, 1024, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.fixture(scope="module")
def plain() -> Tape:
    return traced(__file__, "workload")


def test_it_holds_what_it_promised_and_less_than_checkpointing(plain):
    nested = [
        o
        for o in NestedCheckpointing().options(Profile(plain, find(DEVICE)))
        if o.settings["end"] - o.settings["begin"] == 4
    ]
    assert [(o.settings["begin"], o.settings["end"]) for o in nested] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    blocks = list(Checkpointing().options(Profile(plain, find(DEVICE))))
    blocks = [o for o in blocks if o.where.rpartition(".")[0] == "Deep.layers"]
    assert len(blocks) == 16
    before = timeline(plain).max()
    alone, after = (timeline(traced(__file__, "workload", chosen)).max() for chosen in (blocks, nested))
    assert after < 0.8 * alone
    assert before - promised_peak(plain, nested) == pytest.approx(before - after, rel=NestedCheckpointing.tolerance)
    assert sum(o.seconds for o in nested) > sum(o.seconds for o in blocks)


def test_a_list_that_is_gone_through_from_its_end_has_no_segments(plain):
    profile = Profile(plain, find(DEVICE))
    blocks = {block.path: block for block in profile.blocks}
    assert [len(stack) for stack in _stacks(profile)] == [16]
    turned = [dataclasses.replace(blocks[f"Deep.layers.{at}"], path=f"Deep.layers.{15 - at}") for at in range(16)]
    assert all(len(stack) == 1 for stack in _stacks(SimpleNamespace(blocks=turned, modules=profile.modules)))
