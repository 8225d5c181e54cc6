"""Segments of a Sequential that are computed again: the same training bit for bit, what they promise, and what they leave alone."""

import copy
from collections.abc import Iterator

import pytest
import torch
from tests.cpu.module_training import DEVICE, Counting, assert_same, choice, promised_peak, timeline, traced, train
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.tape import Tape
from tightfit.techniques.recomputation.sequential_checkpointing import SequentialCheckpointing

NAME = "sequential_checkpointing"
torch.set_num_threads(1)


class Chain(nn.Module):
    """Convolutions, batch norms, in-place activations, pooling and dropout in one Sequential, as VGG has them."""

    def __init__(self, width: int = 4, num_stages: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in range(num_stages):
            for _ in range(2):
                layers += [
                    nn.Conv2d(channels, width << stage, 3, padding=1),
                    nn.BatchNorm2d(width << stage),
                    nn.ReLU(inplace=True),
                ]
                channels = width << stage
            layers += [nn.MaxPool2d(2), nn.Dropout(0.2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean((2, 3)))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2]))


def workload(batch_size: int = 32) -> Iterator[torch.Tensor]:
    """`Chain` on the virtual card."""
    model = Chain(width=32, num_stages=3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(batch_size, 3, 96, 96, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("segments", [[(0, 16)], [(0, 8), (8, 16)], [(0, 3), (3, 7), (9, 12)]])
def test_training_is_the_same_bit_for_bit(segments):
    choices = [choice(NAME, "Chain.features", begin=begin, end=end) for begin, end in segments]
    plain, other = train(Chain, loss_of), train(Chain, loss_of, choices)
    assert_same(plain, other)
    assert plain.losses[0] != plain.losses[-1]


def test_children_run_twice_only_inside_segments_and_hooks_see_one_run():
    model = Chain()
    calls = []
    for number, child in enumerate(model.features):
        child.register_forward_hook(lambda *_, number=number: calls.append(number))
    convolutions = Counting(torch.ops.aten.convolution.default)
    with apply_choices([choice(NAME, "Chain.features", begin=0, end=7)], model, []), convolutions:
        loss_of(model, 0).backward()
    inside = sum(isinstance(child, nn.Conv2d) for child in model.features[:7])
    assert convolutions.count == inside + sum(isinstance(child, nn.Conv2d) for child in model.features)
    assert calls == list(range(16))
    assert "forward" not in vars(model.features)


def test_a_copy_runs_its_own_children():
    model = Chain()
    with apply_choices([choice(NAME, "Chain.features", begin=0, end=8)], model, []):
        twin = copy.deepcopy(model)
        loss_of(twin, 0).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert model.features[1].num_batches_tracked == 0
    assert twin.features[1].num_batches_tracked == 1


def test_what_it_cannot_run_is_refused_and_nothing_is_changed():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])

    model = Listed()
    with pytest.raises(ApplyError, match="is a ModuleList, and a"):
        apply_choices([choice(NAME, "Listed.layers", begin=0, end=2)], model, [])
    chain = Chain()
    with pytest.raises(ApplyError, match="no children 0 to 98"):
        apply_choices([choice(NAME, "Chain.features", begin=0, end=99)], chain, [])
    with pytest.raises(ApplyError, match="chosen twice"):
        apply_choices([choice(NAME, "Chain.features", begin=b, end=9) for b in (0, 7)], chain, [])
    assert "forward" not in vars(chain.features)


def test_a_segment_that_writes_over_its_input_fails_instead_of_training_wrongly():
    model = Chain()
    with (
        apply_choices([choice(NAME, "Chain.features", begin=2, end=7)], model, []),
        pytest.raises(ApplyError, match="modifies its own input in place"),
    ):
        loss_of(model, 0)


@pytest.fixture(scope="module")
def plain() -> Tape:
    return traced(__file__, "workload")


def test_options_cut_after_pooling_and_never_before_what_works_in_place(plain):
    options = list(SequentialCheckpointing().options(Profile(plain, find(DEVICE))))
    places = {(o.settings["begin"], o.settings["end"]) for o in options}
    assert {(0, 24), (0, 8)} <= places
    assert all(begin % 8 not in (2, 5) for begin, _ in places)
    for one in options:
        for other in options:
            ranges = [range(o.settings["begin"], o.settings["end"]) for o in (one, other)]
            assert bool(one.slots & other.slots) == bool(set(ranges[0]) & set(ranges[1]))


def test_the_traced_saving_is_the_promised_one(plain):
    options = {
        (o.settings["begin"], o.settings["end"]): o
        for o in SequentialCheckpointing().options(Profile(plain, find(DEVICE)))
    }
    chosen = [options[0, 8], options[8, 16]]
    before, after = timeline(plain).max(), timeline(traced(__file__, "workload", chosen)).max()
    promised = promised_peak(plain, chosen)
    assert before - after > 0.25 * before
    assert before - promised == pytest.approx(before - after, rel=SequentialCheckpointing.tolerance)


class Reversed(nn.Sequential):
    """Runs its children from the last to the first."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._modules.values())[::-1])


class Mixer(nn.Module):
    """Mixes along the rows: the first linear layer saves a copy of the norm's result in another order, and the norm its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.mix = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.mix(self.norm(rows).transpose(1, 2)).transpose(1, 2)


def mixers() -> Iterator[torch.Tensor]:
    """Steps of six of these."""
    model = nn.Sequential(nn.Linear(256, 256), *(Mixer() for _ in range(6))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(64, 512, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_the_input_of_a_whole_sequential_is_counted_where_the_plain_run_frees_it() -> None:
    plain = traced(__file__, "mixers")
    offered = SequentialCheckpointing().options(Profile(plain, find(DEVICE)))
    whole = [o for o in offered if o.where.endswith(".mix") and o.settings == {"begin": 0, "end": 3}]
    assert len(whole) == 6
    found = int(timeline(traced(__file__, "mixers", whole)).max())
    # The last block is promised to hold one input more than it does.
    assert found == pytest.approx(promised_peak(plain, whole), rel=0.05)


def test_a_sequential_with_another_order_is_refused():
    model = nn.ModuleDict({"chain": Reversed(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))})
    with pytest.raises(ApplyError, match="is a Reversed, and"):
        apply_choices([choice("sequential_checkpointing", "ModuleDict.chain", begin=0, end=2)], model, [])


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2048, 5)
    )


@pytest.mark.parametrize(
    "other",
    [
        choice("update_in_backward", "optimizer", kernel="same"),
        choice("empty_cache", "allocator", border="before the forward"),
    ],
)
def test_the_model_may_be_the_sequential_itself_beside_what_wraps_models(other):
    segments = [choice(NAME, "Sequential", begin=0, end=3)]
    assert_same(train(sequential, loss_of), train(sequential, loss_of, [*segments, other]))
