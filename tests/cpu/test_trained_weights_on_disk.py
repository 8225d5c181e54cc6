"""Trained weights on disk between their uses and their updates: the same training to the bit, memory of the weights that are being updated alone, and whatever the disk,
a signal or a fork does, the whole right value or an error."""

import contextlib
import errno
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from tests.cpu.test_technique_trained_weight_streaming import OPTIMIZERS, pair, same, small, states, streamed
from tests.cpu.test_trained_states_on_disk import ON_DISK as STATES_ON_DISK
from tests.cpu.training_loops import Optimizer, gradients, train

from tightfit.engine.disk.disk_copies import DiskCopies
from tightfit.engine.disk.disk_file import DiskFile
from tightfit.engine.disk.disk_mapping import DiskMapping
from tightfit.engine.disk.file_mappings import FileMappings, was_written
from tightfit.engine.weights.trained_files import TrainedFiles
from tightfit.errors import ApplyError

ON_DISK = {"weights": "disk", "at_once_bytes": 1 << 14}


def in_file(model: Decoder) -> list[torch.Tensor]:
    """Weights of blocks that lie in a file of ours."""
    maps = FileMappings()
    there = ((p, maps.range_of(p.data_ptr(), p.nbytes)) for p in model.blocks.parameters())
    return [p for p, place in there if place is not None and "(deleted)" in place.path]


def own_bytes(parameters: list[torch.Tensor]) -> int:
    """Of weights with pages that are the process's own."""
    return sum(p.nbytes for p in parameters if was_written(p.data_ptr(), p.nbytes))


def step_both(plain: Decoder, model: Decoder, optimizers: list[Optimizer], seed: int) -> bool:
    losses = [train(m, o, seed) for m, o in zip((plain, model), optimizers, strict=True)]
    return torch.equal(*losses) and same(plain.parameters(), model.parameters())


@pytest.mark.parametrize(
    ("name", "others"),
    [("AdamW", {}), ("AdamW", STATES_ON_DISK), ("fused AdamW", {"kernel": "fused"}), ("SGD", {"numbers": (1, 3)})],
)
def test_steps_are_those_of_the_plain_run_to_the_bit_and_nothing_stays_in_memory(
    name: str, others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model, *optimizers, session = pair(OPTIMIZERS[name], **ON_DISK | others)
    whole = sum(p.nbytes for p in model.blocks.parameters())
    weights, own = in_file(model), list[int]()
    updated = TrainedFiles.updated

    @contextlib.contextmanager
    def watched(self: TrainedFiles, parts: Any) -> Iterator[None]:
        with updated(self, parts):
            yield
            own.append(own_bytes(weights))

    monkeypatch.setattr(TrainedFiles, "updated", watched)
    for seed in range(3):
        assert step_both(plain, model, optimizers, seed)
        assert same(gradients(plain), gradients(model))
    blocks = [model.blocks[number] for number in others.get("numbers", range(4))]
    assert {id(p) for p in in_file(model)} == {id(p) for block in blocks for p in block.parameters()}
    assert own and 0 < max(own) <= 1 << 14 < whole
    assert not own_bytes(weights)
    assert same(*map(states, optimizers))
    session.undo()
    assert not in_file(model)
    assert step_both(plain, model, optimizers, 9)


def test_what_the_program_writes_and_what_it_holds_are_the_weight() -> None:
    plain, model, *optimizers, session = pair(**ON_DISK)
    held = [(m.blocks[1].up.weight.detach(), m.blocks[2].up.weight.detach().numpy()) for m in (plain, model)]
    for seed in range(4):
        assert step_both(plain, model, optimizers, seed)
        assert torch.equal(held[0][0], held[1][0]) and (held[0][1] == held[1][1]).all()
        for m, (view, array) in zip((plain, model), held, strict=True):
            with torch.no_grad():
                m.blocks[0].qkv.weight.mul_(0.5)
            m.blocks[3].qkv.weight.data[0] = 7
            view[0, seed] += 1
            array[seed] = seed
        if seed == 2:
            for m in (plain, model):
                m.load_state_dict({name: value + 1 for name, value in m.state_dict().items()})
    assert same(plain.state_dict().values(), model.state_dict().values())
    session.undo()
    # On the host a view stays one: the weight stays where it lies.
    for m, (view, _) in zip((plain, model), held, strict=True):
        view.fill_(2)
        assert bool((m.blocks[1].up.weight == 2).all())


def test_weights_that_are_moved_to_memory_which_processes_share_are_those_from_then_on() -> None:
    plain, model, *optimizers, _ = pair(**ON_DISK)
    for seed in range(3):
        assert step_both(plain, model, optimizers, seed)
        for m in (plain, model):
            m.share_memory()
            m.blocks[1].up.weight.data[0] = 3
    assert not in_file(model)


def in_fork(act: Any) -> int:
    """The exit code of a fork that runs `act`: 0, or 7 where it is refused in one line that names forks."""
    pid = os.fork()
    if not pid:
        code = 1
        faulthandler.disable()
        try:
            act()
            code = 0
        except ApplyError as error:
            code = 7 if "a forked process uses a weight" in str(error) and "\n" not in str(error) else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_never_sees_a_weight_and_one_that_needs_none_goes_on() -> None:
    plain, model, *optimizers, session = pair(**ON_DISK)
    assert step_both(plain, model, optimizers, 0)
    array = model.blocks[1].up.weight.detach().numpy()
    batch = torch.arange(8).reshape(2, 4)
    assert in_fork(lambda: (torch.ones(3) + 1, model.head.weight.sum())) == 0
    for act in (
        lambda: model(batch),
        model.state_dict,
        optimizers[1].step,
        model.blocks[0].qkv.weight.sum,
        lambda: train(model, optimizers[1], 1),
    ):
        assert in_fork(act) == 7
    assert in_fork(array.sum) == -signal.SIGSEGV
    assert step_both(plain, model, optimizers, 1)
    session.undo()
    assert in_fork(model.blocks[0].qkv.weight.sum) == 0


def test_a_disk_that_takes_nothing_loses_nothing_and_the_next_step_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for call in ("pwritev", "fdatasync"):
        plain, model, *optimizers, session = pair(**ON_DISK)
        assert step_both(plain, model, optimizers, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            assert step_both(plain, model, optimizers, 1)
        with pytest.raises(ApplyError, match=r"weights could not be written .*Input/output error.*not lost"):
            train(model, optimizers[1], 2)
        session.undo()
        for seed in (2, 3):
            for m, o in zip((plain, model), optimizers, strict=True):
                train(m, o, seed)
        assert same(plain.parameters(), model.parameters())


def test_what_the_disk_does_not_give_back_is_an_error_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DiskFile.read

    def other(self: DiskFile, into: memoryview, at: int) -> None:
        read(self, into, at)
        into[0] ^= 1

    _, model, _, optimizer, session = pair(**ON_DISK)
    train(model, optimizer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "read", other)
        with pytest.raises(ApplyError, match=r"weights could not be read back .*checksum.*checkpoint is lost"):
            train(model, optimizer, 1)
    session.undo()


@pytest.mark.parametrize("name", ["begin", "wait", "forget_written"])
def test_an_interrupt_at_any_place_leaves_each_weight_whole(name: str) -> None:
    """Before the step or behind it; and the next step is a plain run's from there."""
    owner: Any = DiskMapping if name == "forget_written" else DiskCopies
    kept, num_calls = getattr(owner, name), [0]
    plain, model = small(), small()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    session = streamed(model, optimizers[1], **ON_DISK)
    for number in (2, 9, 23, 60, 84):
        for m, o in zip((plain, model), optimizers, strict=True):
            train(m, o, 0)
        before = [p.detach().clone() for p in plain.parameters()]
        for o in optimizers:
            o.zero_grad()
        train(plain, optimizers[0], 1)
        num_calls[0] = 0

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            num_calls[0] += 1
            if num_calls[0] == number:  # noqa: B023 - it ends with this turn
                raise KeyboardInterrupt
            return kept(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            train(model, optimizers[1], 1)
        assert all(
            torch.equal(found, old) or torch.equal(found, new)
            for found, old, new in zip(model.parameters(), before, plain.parameters(), strict=True)
        )
        with torch.no_grad():
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                one.copy_(other)
        assert step_both(plain, model, optimizers, 2)
    session.undo()
    assert same(plain.parameters(), model.parameters())


def test_a_file_system_without_a_common_cache_is_refused_before_anything_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DiskFile, "write", lambda *_: None)
    model = small()
    with pytest.raises(ApplyError, match="does not show in memory what is written to a file"):
        streamed(model, torch.optim.SGD(model.parameters(), lr=0.1), **ON_DISK)
    assert all(p.untyped_storage().resizable() for p in model.parameters())


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    monkey = pytest.MonkeyPatch()
    monkey.setenv("TMPDIR", str(tmp_path))
    monkey.setattr("tempfile.tempdir", str(tmp_path))
    pid = os.fork()
    if not pid:
        try:
            _, model, _, optimizer, _ = pair(**ON_DISK)
            train(model, optimizer, 0)
            os.kill(os.getpid(), signal.SIGKILL if in_file(model) else signal.SIGTERM)
        finally:
            os._exit(1)
    monkey.undo()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
