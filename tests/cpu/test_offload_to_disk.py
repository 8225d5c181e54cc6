"""Activations and optimizer states on disk: the same training to the bit, for as long as one likes, and what is lost where the disk fails."""

import contextlib
import copy
import errno
import gc
import itertools
import os
import threading
from concurrent import futures
from typing import Any

import pytest
import torch
from tests.conformance.models import MODELS
from tests.conformance.training import Habits, Outcome, choice_of, train
from tests.sampled import every_second
from torch import nn

from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_sizes import PAGE_BYTES
from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.errors import ApplyError
from tightfit.planner.option import Option
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.session import Session

HABITS = Habits(clips=True, accumulates=2, schedules=True, scales=True, reloads_at=1, evaluates=True)
MIB = 1 << 20


def on_disk(technique: str, where: str, **settings: Any) -> Option:
    return Option(
        technique=technique,
        where=where,
        settings={"tier": "disk", "disk_bytes": MIB, "host_bytes": 9 * PAGE_BYTES, **settings},
        changes=(),
        seconds=0.0,
        exact=True,
    )


OPTIMIZER = on_disk("optimizer_offload", "optimizer", least_elements=1)


def activations(model: nn.Module) -> list[Option]:
    """All blocks of the model's first list of several, but for the last one."""
    path, blocks = next(
        (path, part)
        for path, part in model.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len({type(each) for each in part}) == 1 < len(part)
    )
    where = f"{type(model).__name__}.{path}"
    return [
        on_disk("activation_offload", f"{where}.{number}", following="+1", smallest_bytes=1)
        for number in range(len(blocks) - 1)
    ]


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    for expected, found in zip(one.gradients, other.gradients, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(torch.equal(other.state[name], value) for name, value in one.state.items())


@pytest.mark.parametrize("name", every_second(MODELS))
def test_training_with_all_of_it_on_disk_is_the_same_to_the_bit(name: str) -> None:
    choices = [*activations(MODELS[name]("cpu")[0]), OPTIMIZER]
    plain = train(name, (), num_steps=3, habits=HABITS)
    assert_same(plain, train(name, choices, num_steps=3, habits=HABITS))


def test_twenty_steps_are_the_same_to_the_bit() -> None:
    choices = activations(MODELS["convolutions"]("cpu")[0])
    plain = train("convolutions", (), num_steps=20, habits=Habits())
    for each in (choices, [OPTIMIZER]):
        assert_same(plain, train("convolutions", each, num_steps=20, habits=Habits()))


class Tiny(nn.Module):
    """Blocks of a few hundred weights."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(num_blocks)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks(rows)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def made() -> tuple[Tiny, torch.optim.AdamW]:
    model = Tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def applied(model: nn.Module, optimizer: torch.optim.Optimizer, disk_bytes: int = MIB) -> Session:
    states = on_disk("optimizer_offload", "optimizer", least_elements=1, disk_bytes=disk_bytes)
    return apply_choices([choice_of(each) for each in (*activations(model), states)], model, [optimizer])


def slab_of(optimizer: torch.optim.Optimizer) -> DiskSlab:
    lazy: Any = next(
        each for state in optimizer.state.values() for each in dict.values(state) if type(each) is LazyTensor
    )
    return lazy.source.encoded.part.slab


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_hundreds_of_steps_grow_nothing() -> None:
    def of_slab() -> tuple[int, int]:
        slab = slab_of(optimizer)
        return slab.free_bytes, slab.file.num_bytes

    plain, model = Tiny(2), Tiny(2)
    plain_optimizer, optimizer = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (plain, model))
    session = applied(model, optimizer)
    before = len(os.listdir("/proc/self/fd"))
    # As many threads as buffers, for the activations and for the states.
    num_threads = threading.active_count() + 2 * 2
    trained(model, optimizer, 5)
    files, early = len(os.listdir("/proc/self/fd")), of_slab()
    trained(model, optimizer, 395, first=5)
    assert of_slab() == early == (MIB - 4 * PAGE_BYTES, MIB)
    assert threading.active_count() <= num_threads
    assert len(os.listdir("/proc/self/fd")) == files
    trained(plain, plain_optimizer, 400)
    assert same(plain, model)
    session.undo()
    del session
    gc.collect()
    close_gone()
    assert len(os.listdir("/proc/self/fd")) < before


@pytest.mark.parametrize(("name", "num_steps"), [("pwritev", 2), ("posix_fallocate", 0)])
def test_states_that_cannot_be_written_are_kept_and_the_next_step_is_refused(
    name: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (plain, plain_optimizer), (model, optimizer) = made(), made()
    session = applied(model, optimizer, disk_bytes=MIB if num_steps else PAGE_BYTES)
    trained(model, optimizer, num_steps)
    model(torch.randn(8, 16, generator=torch.Generator().manual_seed(2))).square().mean().backward()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, broken)
        optimizer.step()
    optimizer.zero_grad()
    trained(plain, plain_optimizer, num_steps)
    trained(plain, plain_optimizer, 1, first=2)
    # The step is complete, and so is a checkpoint.
    assert same(plain, model)
    for state, expected in zip(
        optimizer.state_dict()["state"].values(), plain_optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    with pytest.raises(ApplyError, match=r"optimizer states could not be written .*No space left.*not lost"):
        trained(model, optimizer, 1, first=3)
    session.undo()
    optimizer.zero_grad()
    for each in ((plain, plain_optimizer), (model, optimizer)):
        trained(*each, 2, first=3)
    assert same(plain, model)


def test_a_state_that_has_changed_on_disk_is_named_as_lost_before_it_is_used() -> None:
    model, optimizer = made()
    session = applied(model, optimizer)
    trained(model, optimizer, 2)
    slab = slab_of(optimizer)
    assert isinstance(slab.file, DiskFile)
    file = os.open(f"/proc/self/fd/{slab.file.descriptor}", os.O_RDWR)
    os.pwrite(file, bytes(slab.file.num_bytes), 0)
    os.close(file)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ApplyError, match=r"optimizer states could not be read back .*load the last checkpoint"):
        trained(model, optimizer, 1, first=2)
    # Nothing was updated with zeros.
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ApplyError, match="could not be read back"):
        trained(model, optimizer, 1, first=2)
    with pytest.raises(ApplyError, match="could not be read back"):
        session.undo()


def test_an_error_in_the_middle_of_a_step_leaves_what_it_leaves_in_the_plain_run() -> None:
    (plain, plain_optimizer), (model, optimizer) = made(), made()
    applied(model, optimizer)

    def half_done(model: Tiny, optimizer: torch.optim.Optimizer) -> None:
        def fails(*_: object) -> None:
            raise ValueError("in the middle")

        trained(model, optimizer, 2)
        hook = model.blocks[2].register_full_backward_hook(fails)
        with pytest.raises(ValueError, match="in the middle"):
            trained(model, optimizer, 1, first=2)
        hook.remove()
        # Half of the gradients are there, and count.
        trained(model, optimizer, 2, first=3)

    half_done(plain, plain_optimizer)
    half_done(model, optimizer)
    assert same(plain, model)


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [dict(state) for state in optimizer.state_dict()["state"].values()]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


def test_an_interrupt_in_a_step_leaves_each_parameter_updated_with_its_states_or_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, plain_optimizer = made()
    trained(plain, plain_optimizer, 2)
    before = (
        [p.detach().clone() for p in plain.parameters()],
        [dict(s) for s in copy.deepcopy(states_of(plain_optimizer))],
    )
    trained(plain, plain_optimizer, 1, first=2)
    after = list(plain.parameters()), states_of(plain_optimizer)
    wait, found = futures.wait, set()
    for number in range(0, 34, 3):
        model, optimizer = made()
        session = apply_choices([choice_of(OPTIMIZER)], model, [optimizer])
        trained(model, optimizer, 2)
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(2))).square().mean().backward()
        waits = itertools.count()

        def interrupted(*arguments: Any, waits: Any = waits, number: int = number) -> Any:
            if next(waits) == number:
                raise KeyboardInterrupt
            return wait(*arguments)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(futures, "wait", interrupted)
            optimizer.step()
        updated = [
            [torch.equal(p, values[at]) and equal(state, states[at]) for values, states in (before, after)]
            for at, (p, state) in enumerate(zip(model.parameters(), states_of(optimizer), strict=True))
        ]
        assert all(any(each) for each in updated)
        found.add(sum(each[1] for each in updated))
        session.undo()
    # Some before all, some after all, and some in the middle.
    assert {0, 8} < found
