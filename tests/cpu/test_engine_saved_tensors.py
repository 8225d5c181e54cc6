"""Saved tensors at the host: the same gradients to the bit, each storage moved once, and nothing lost where a program does what is not foreseen."""

import dataclasses
import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tightfit.engine import copy_engines
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.disk.disk_sizes import PAGE_BYTES
from tightfit.engine.host_slab import HostSlab, Part, unregister_gone
from tightfit.engine.saved.block_call import Selection
from tightfit.engine.saved.saved_storage import Place
from tightfit.engine.saved.saved_tensors import SavedTensors
from tightfit.errors import ApplyError

HOST = torch.device("cpu")
ROWS, WIDTH = 64, 32
OF_ROWS = ROWS * WIDTH * 4
EVERYTHING = Selection(smallest_bytes=1024)


class Block(nn.Module):
    """A residual block; `act` sees the wide rows, which are saved by it and by what follows."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = nn.functional.gelu) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.act = act

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.narrow(self.act(self.wide(self.norm(rows))))


class Blocks(nn.Module):
    """Four blocks behind a layer, run through `saved` or plainly."""

    def __init__(
        self,
        saved: SavedTensors | None,
        act: Callable[[torch.Tensor], torch.Tensor] = nn.functional.gelu,
        selection: Selection = EVERYTHING,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.selection = selection
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(act) for _ in range(4))
        self.saved = saved

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        for block in self.blocks:
            if self.saved is None:
                rows = block(rows)
            else:
                with self.saved.call(dataclasses.replace(self.selection, to_disk=self.saved.moves.disk is not None)):
                    rows = block(rows)
        return rows


def offload(host_bytes: int = 1 << 20) -> SavedTensors:
    return SavedTensors(HOST, host_bytes, statistics=Counter())


def offload_to_disk(disk_bytes: int = 1 << 20, told: list[str] | None = None) -> SavedTensors:
    """Through buffers that most of the storages do not fit into at once."""

    def failed(how: str) -> ApplyError:
        if told is not None:
            told.append(how)
        return ApplyError(how)

    disk = DiskSpace(num_bytes=disk_bytes, buffer_bytes=5 * PAGE_BYTES, folder=None, on_failure=failed)
    return SavedTensors(HOST, 0, statistics=Counter(), disk=disk)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, backward: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    model.zero_grad()
    backward(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same(backward: Callable[[nn.Module], None], saved: SavedTensors | None = None) -> SavedTensors:
    saved = saved or offload()
    plain, other = gradients(Blocks(None), backward), gradients(Blocks(saved), backward)
    assert len(plain) == len(other) == 26
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    return saved


def once(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def twice(model: nn.Module) -> None:
    loss = model(batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(model: nn.Module) -> None:
    rows = batch().requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).square().sum(), rows, create_graph=True)
    (slope.norm() + model(rows).mean()).backward()


def from_the_front(model: nn.Module) -> None:
    features = []
    hooks = [block.register_forward_hook(lambda _, __, out: features.append(out)) for block in model.blocks]
    model(batch())
    for hook in hooks:
        hook.remove()
    for feature in features:
        feature.mean().backward(retain_graph=True)


def two_at_once(model: nn.Module) -> None:
    one, other = model(batch(1)).mean(), model(batch(2)).square().mean()
    one.backward()
    other.backward()


def dropped_half_way(model: nn.Module) -> None:
    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    hook = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        model(batch())
    hook.remove()
    model(batch(3)).square().mean().backward()


def evaluated_between(model: nn.Module) -> None:
    loss = model(batch()).square().mean()
    with torch.no_grad():
        model(batch(5))
    model(batch(6))  # with a graph that nobody uses
    loss.backward()


def in_a_thread(model: nn.Module) -> None:
    loss = model(batch()).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@pytest.mark.parametrize("offloaded", [offload, offload_to_disk], ids=["host", "disk"])
@pytest.mark.parametrize(
    "backward",
    [once, twice, penalty, from_the_front, two_at_once, dropped_half_way, evaluated_between, in_a_thread],
    ids=lambda each: each.__name__,
)
def test_gradients_are_the_same_to_the_bit_whatever_order_they_are_computed_in(backward, offloaded) -> None:
    saved = assert_same(backward, offloaded())
    assert saved._statistics["offloaded storages"] > 0


def test_each_storage_moves_once_and_weights_do_not() -> None:
    statistics = assert_same(once)._statistics
    # Of each block: its input, the norm's result, and the wide rows before and after the activation; the norm's statistics are
    # too small. The last block's have no border to leave at but its own end, where its result is still held.
    of_a_block = 2 * OF_ROWS + 2 * 2 * OF_ROWS
    assert statistics["offloaded bytes"] == 4 * of_a_block
    assert statistics["offloaded storages"] == 4 * 4


@pytest.mark.parametrize(
    ("counts", "share", "of_a_block", "num_unlike"),
    [
        # One of the two storages of the wide rows.
        (((2 * OF_ROWS, 1),), 0.33, 2 * OF_ROWS, 0),
        # Sizes of another batch: half of the six rows of a block that it saves, the largest first.
        (((4 * OF_ROWS, 1),), 0.5, 3 * OF_ROWS, 4),
        (((2 * OF_ROWS, 3),), 0.1, 0, 4),
    ],
    ids=["as planned", "another batch", "another block"],
)
def test_so_many_storages_of_a_size_move_and_of_another_batch_the_same_share(
    counts: tuple[tuple[int, int], ...], share: float, of_a_block: int, num_unlike: int
) -> None:
    saved = offload()
    selection = Selection(smallest_bytes=1024, counts=counts, share=share)
    plain, other = gradients(Blocks(None), once), gradients(Blocks(saved, selection=selection), once)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    assert saved._statistics["offloaded bytes"] == 4 * of_a_block
    assert saved._statistics["calls unlike the plan"] == num_unlike


def test_storages_that_the_program_keeps_are_counted_where_they_were_to_leave() -> None:
    saved, kept = offload(), []

    def keeping(rows: torch.Tensor) -> torch.Tensor:
        kept.append(nn.functional.gelu(rows))
        return kept[-1]

    model = Blocks(saved, keeping, selection=Selection(smallest_bytes=1024, counts=((2 * OF_ROWS, 2),)))
    gradients(model, once)
    assert saved._statistics["offloaded bytes"] == 4 * 2 * OF_ROWS
    assert saved._statistics["storages that stayed"] == 4


def test_a_call_inside_of_a_border_moves_its_own_and_the_copies_of_the_call_before_go_on_beside_it() -> None:
    saved, blocks = offload(), Blocks(None)
    with saved.call(EVERYTHING):
        rows = blocks.blocks[0](blocks.first(batch()))
    with saved.call(None):
        with saved.call(EVERYTHING):
            rows = blocks.blocks[1](rows)
        places = {storage.place for storage in saved._calls[1].storages(Place.LEAVING)}
        assert places == {Place.LEAVING}
        rows = blocks.blocks[2](rows)
    assert saved._calls[1].storages(Place.HOST)
    assert saved._calls[3].storages(Place.LEAVING)
    with saved.call(EVERYTHING):
        rows = blocks.blocks[3](rows)
    assert [saved._calls[number].previous for number in (1, 2, 3, 4)] == [0, 1, 1, 3]
    assert not saved._running
    rows.square().mean().backward()
    found = [p.grad for p in blocks.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients(Blocks(None), once), found, strict=True))


def test_host_memory_is_free_again_and_no_thread_is_left_over() -> None:
    saved = offload()
    model, threads = Blocks(saved), threading.active_count()
    for step in range(300):
        gradients(model, lambda model, step=step: model(batch(step)).mean().backward())
        assert threading.active_count() <= threads + 1
    gc.collect()
    assert saved.moves.slab.free_bytes == saved.moves.slab.num_bytes
    assert saved.moves.slab.overflow_bytes == 0


def test_what_the_slab_has_no_room_for_has_memory_of_its_own() -> None:
    saved = assert_same(once, offload(host_bytes=2 * OF_ROWS))
    assert saved.moves.slab.overflow_bytes > 0


def test_a_tensor_that_was_written_to_is_autograds_error() -> None:
    def written(rows: torch.Tensor) -> torch.Tensor:
        found = rows.exp()
        return found.mul_(2.0) if torch.is_grad_enabled() else found

    plain = Blocks(None, written)(batch()).mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.backward()
    loss = Blocks(offload(), written)(batch()).mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_written_behind_autograds_back_is_copied_along() -> None:
    def written(model: nn.Module) -> None:
        def change(_: nn.Module, __: object, rows: torch.Tensor) -> None:
            rows.data.mul_(1.5)

        hook = model.blocks[0].register_forward_hook(change)
        once(model)
        hook.remove()

    assert_same(written)


def test_memory_of_numpy_stays_where_it_can_be_written_to() -> None:
    def shared(model: nn.Module) -> None:
        rows = batch().numpy()
        given = torch.from_numpy(rows).requires_grad_() * 1.0
        loss = model(torch.from_numpy(rows).requires_grad_() + given).mean()
        rows *= 2.0
        loss.backward()

    assert_same(shared)


def test_a_weight_that_is_set_before_the_backward_pass_is_the_one_that_counts() -> None:
    def swapped(model: nn.Module) -> None:
        loss = model(batch()).square().mean()
        for parameter in model.blocks.parameters():
            parameter.data = parameter.data * 3.0
        loss.backward()

    assert_same(swapped)


def test_hooks_of_the_programs_own_come_first() -> None:
    seen: list[torch.Size] = []

    def own(model: nn.Module) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor.shape)
            return tensor.detach()

        forward = model.blocks[1].forward

        def inside(rows: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(rows)

        model.blocks[1].forward = inside
        once(model)

    assert_same(own)
    assert len(seen) % 2 == 0 and seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_after_the_end_what_is_away_still_comes_back() -> None:
    saved = offload()

    def ended(model: nn.Module) -> None:
        loss = model(batch()).square().mean()
        saved.end()
        loss.backward()

    assert_same(ended, saved)
    before = saved._statistics["offloaded bytes"]
    once(Blocks(saved))
    assert saved._statistics["offloaded bytes"] == before


def test_a_copy_that_fails_is_an_error_of_the_pass_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: torch.Tensor, target: torch.Tensor) -> None:
        raise OSError("the link is down")

    monkeypatch.setattr(copy_engines, "_copy", broken)
    with pytest.raises(OSError, match="the link is down"):
        once(Blocks(offload()))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5)), max_size=40))
def test_parts_of_a_slab_never_overlap_and_all_of_it_comes_back(wishes: list[tuple[int, int]]) -> None:
    slab = HostSlab(16384, HOST)
    held: list[Part] = []
    begin = slab._memory.data_ptr()
    for num_bytes, drop in wishes:
        held.append(slab.take(num_bytes))
        if drop and held:
            held.pop(drop % len(held))
        inside = sorted(
            (part.bytes.data_ptr() - begin, len(part.bytes))
            for part in held
            if begin <= part.bytes.data_ptr() < begin + 16384
        )
        assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(inside))
        assert all(len(part.bytes) >= 1 for part in held)
    held.clear()
    del slab


class Runtime:
    """The driver of a card, which refuses to lock memory or takes it."""

    def __init__(self, code: int) -> None:
        self.code, self.registered = code, []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered.append(num_bytes)
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.pop()
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_locked_for_as_long_as_parts_of_it_live_or_used_as_it_is(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    # The kernel that takes the failure from the driver, on a machine without one.
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    slab = HostSlab(4096, torch.device("cuda"))
    assert slab.is_registered is (code == 0)
    assert runtime.registered == [4096]
    part = slab.take(100)
    del slab
    gc.collect()
    assert runtime.registered == [4096]
    del part
    gc.collect()
    unregister_gone()
    assert runtime.registered == ([] if code == 0 else [4096])
