"""Chains of convolutions on slabs: the same training up to the order of sums, what they promise, and what is refused."""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cpu.module_training import DEVICE, assert_same, choice, promised_peak, timeline, traced, train
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError, apply_error, forget_apply_errors
from tightfit.runtime.apply import apply_choices
from tightfit.tape import Tape
from tightfit.techniques.tiling.halos import layers_along, paths, run_step
from tightfit.techniques.tiling.tiled_convolutions import TiledConvolutions

NAME = "tiled_convolutions"
ORDER = {"rtol": 1e-4, "atol": 1e-6}
torch.set_num_threads(1)

CHAINS = {
    "plain": lambda: [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)],
    "strides": lambda: [nn.Conv2d(3, 4, 5, stride=2, padding=2), nn.SiLU(), nn.Conv2d(4, 4, 3, stride=3), nn.AvgPool2d(2, 1, padding=1)],
    "dilation": lambda: [nn.Conv2d(3, 6, 3, dilation=2, padding=2), nn.PReLU(6), nn.Conv2d(6, 6, 4, padding="same", groups=3), nn.MaxPool2d(3, 2, 1)],
    "growing": lambda: [nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2), nn.ConvTranspose2d(2, 3, 2, 2), nn.Upsample(scale_factor=3), nn.Conv2d(3, 2, 3)],
    "nested": lambda: [nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()), nn.Conv2d(4, 4, (3, 1), padding=(1, 0)), nn.BatchNorm2d(4).eval(), nn.Dropout(0.0)],
    "volume": lambda: [nn.Conv3d(3, 4, 3, padding=1), nn.LeakyReLU(inplace=True), nn.MaxPool3d(2), nn.Conv3d(4, 2, 3, padding=1), nn.AvgPool3d(2)],
}  # fmt: skip


class Net(nn.Module):
    """A chain between a layer that has gradients to receive and a loss."""

    def __init__(self, layers: list[nn.Module], *, is_flat: bool = True) -> None:
        super().__init__()
        self.before = (nn.Conv2d if is_flat else nn.Conv3d)(3, 3, 1)
        self.chain = nn.Sequential(*layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.chain(self.before(images))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("num_tiles", [2, 5])
def test_training_is_the_same_up_to_the_order_of_sums(kind, num_tiles):
    is_flat = kind != "volume"
    shape = (2, 3, 23, 30) if is_flat else (1, 3, 13, 16, 10)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(shape, generator=torch.Generator().manual_seed(step))).square().mean()

    def make() -> nn.Module:
        return Net(CHAINS[kind](), is_flat=is_flat)

    end = len(make().chain)
    chosen = [choice(NAME, "Net.chain", begin=0, end=end, num_tiles=num_tiles)]
    assert_same(train(make, loss_of), train(make, loss_of, chosen), **ORDER)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.integers(20, 40),
    st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_slabs_put_together_are_the_whole(shapes, length, num_tiles):
    torch.manual_seed(0)
    chain: list[nn.Module] = []
    for kernel, stride, dilation, padding, pools in shapes:
        if pools:
            chain.append(nn.MaxPool1d(kernel, stride, min(padding, kernel // 2, dilation * (kernel - 1)), dilation))
        else:
            chain.append(nn.Conv1d(1, 1, kernel, stride, min(padding, dilation * (kernel - 1)), dilation))
    value = torch.randn(1, 1, length)
    layers = layers_along(chain, 0)
    left = length
    for layer in layers:
        left = layer.length(left)
        if left < 1:
            return
    whole = nn.Sequential(*chain)(value)
    parts = []
    for path in paths(layers, length, num_tiles):
        part = value[..., path.tile.begin : path.tile.end]
        for step in path.steps:
            part = run_step(step, part, 2)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole)


def test_two_techniques_share_a_sequential():
    def make() -> nn.Module:
        return Net([*CHAINS["plain"](), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()])

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step))).square().mean()

    chosen = [
        choice(NAME, "Net.chain", begin=0, end=5, num_tiles=3),
        choice("sequential_checkpointing", "Net.chain", begin=5, end=9),
    ]
    assert_same(train(make, loss_of), train(make, loss_of, chosen), **ORDER)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm2d(3), "a BatchNorm2d"),
        (nn.GroupNorm(1, 3), "a GroupNorm"),
        (nn.InstanceNorm2d(3), "a InstanceNorm2d"),
        (nn.Dropout(0.1), "a Dropout"),
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), "a Conv2d"),
        (nn.MaxPool2d(2, ceil_mode=True), "a MaxPool2d"),
        (nn.AdaptiveAvgPool2d(2), "a AdaptiveAvgPool2d"),
        (nn.ConvTranspose2d(3, 3, 3, stride=2), "a ConvTranspose2d"),
        (nn.Softmax2d(), "a Softmax2d"),
    ],
)
def test_what_is_not_local_is_refused(layer, reason):
    model = Net([nn.Conv2d(3, 3, 3), layer])
    with pytest.raises(ApplyError, match=rf"{reason} .*cannot be run in tiles"):
        apply_choices([choice(NAME, "Net.chain", begin=0, end=2, num_tiles=2)], model, [])
    assert "forward" not in vars(model.chain)


def test_hooks_that_would_see_tiles_and_inputs_that_would_be_written_over_are_refused():
    model = Net([nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3), nn.ReLU()])
    with pytest.raises(ApplyError, match="modifies its input in place"):
        apply_choices([choice(NAME, "Net.chain", begin=0, end=3, num_tiles=2)], model, [])
    model.chain[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ApplyError, match="hooks"):
        apply_choices([choice(NAME, "Net.chain", begin=1, end=3, num_tiles=2)], model, [])


def test_a_copy_of_the_model_trains_its_own_parameters_and_undo_leaves_nothing():
    model = Net(CHAINS["plain"]())
    with apply_choices([choice(NAME, "Net.chain", begin=0, end=5, num_tiles=2)], model, []):
        twin = copy.deepcopy(model)
        twin(torch.randn(1, 3, 12, 12)).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in vars(model.chain)


def workload(length: int = 160) -> Iterator[torch.Tensor]:
    """A stack of 3-D convolutions on one volume, on the virtual card."""
    layers: list[nn.Module] = []
    for channels, wider in ((1, 16), (16, 16), (16, 32)):
        layers += [
            nn.Conv3d(channels, wider, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(wider, wider, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool3d(2),
        ]
    model = nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 2)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(1, 1, length, length, length, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.fixture(scope="module")
def plain() -> Tape:
    return traced(__file__, "workload")


def test_the_traced_saving_is_the_promised_one(plain):
    options = [
        o
        for o in TiledConvolutions().options(Profile(plain, find(DEVICE)))
        if o.settings == {"begin": 0, "end": 15, "num_tiles": 4}
    ]
    assert [o.where for o in options] == ["Sequential.0"]
    before, after = timeline(plain).max(), timeline(traced(__file__, "workload", options)).max()
    assert before - after > 0.5 * before
    assert before - promised_peak(plain, options) == pytest.approx(before - after, rel=TiledConvolutions.tolerance)


def test_a_chain_runs_whole_where_it_cannot_be_in_slabs_any_more():
    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        images = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(step))
        if step == 1:
            fast = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
            return torch.func.functional_call(model, fast, (images,)).square().mean()
        seen: list[int] = []
        hook = model.chain[0].register_forward_hook(lambda *given: seen.append(given[2].shape[2])) if step else None
        loss = model(images).square().mean()
        if hook is not None:
            hook.remove()
            assert seen == [12]
        return loss

    def make() -> nn.Module:
        return Net([nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)])

    forget_apply_errors()
    assert_same(
        train(make, loss_of), train(make, loss_of, [choice(NAME, "Net.chain", begin=0, end=3, num_tiles=2)]), **ORDER
    )
    assert apply_error() is None
