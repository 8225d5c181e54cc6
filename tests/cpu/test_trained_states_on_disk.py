"""Trained weights at the host with the optimizer's states on disk: the same training to the bit, the next states on their way while a parameter is updated, and
what is lost where the disk fails."""

import errno
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from tests.cpu.optimizer_training import DEVICE
from tests.cpu.test_technique_trained_weight_streaming import OPTIMIZERS, adamw, pair, same, states
from tests.cpu.training_loops import LOOPS, Optimizer, gradients, train
from tests.sampled import every_second

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_copies import DiskCopies
from tightfit.engine.disk.disk_places import OnDisk
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.registry import techniques

ON_DISK = {"tier": "disk", "disk_bytes": 1 << 19, "window_bytes": 1 << 13, "least_elements": 1}


def lazy(optimizer: Optimizer) -> list[LazyTensor]:
    return [each for own in optimizer.state.values() for each in dict.values(own) if isinstance(each, LazyTensor)]


@pytest.mark.parametrize(
    ("name", "others"),
    [*((name, {}) for name in OPTIMIZERS), ("AdamW", {"kernel": "fused"}), ("SGD", {"numbers": (0, 1)})],
)
def test_steps_are_those_of_the_plain_run_to_the_bit(name: str, others: dict[str, Any]) -> None:
    plain, model, *optimizers, session = pair(OPTIMIZERS[name], **ON_DISK | others)
    is_fused = others.get("kernel") == "fused"
    for group in optimizers[0].param_groups if is_fused else ():
        group["fused"] = True
    for seed in range(4):
        for group in optimizers[1].param_groups if is_fused else ():
            # What is not streamed is updated by the optimizer itself.
            group["fused"] = True
        assert torch.equal(*(train(m, o, seed) for m, o in zip((plain, model), optimizers, strict=True)))
        assert same(gradients(plain), gradients(model))
    assert lazy(optimizers[1])
    assert same(plain.parameters(), model.parameters())
    assert same(*map(states, optimizers))
    session.undo()
    assert not lazy(optimizers[1])
    assert torch.equal(train(plain, optimizers[0], 9), train(model, optimizers[1], 9))
    assert same(plain.parameters(), model.parameters()) and same(*map(states, optimizers))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("loop", every_second(LOOPS))
def test_loops_train_the_same_to_the_bit(loop: Callable[[Decoder, Optimizer], Any]) -> None:
    plain, model, *optimizers, session = pair(**ON_DISK)
    found = [loop(m, o) or [] for m, o in zip((plain, model), optimizers, strict=True)]
    assert same(*found)
    session.undo()
    assert same(plain.parameters(), model.parameters()) and same(gradients(plain), gradients(model))
    assert same(*map(states, optimizers))


def test_the_next_states_are_read_while_a_parameter_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _, optimizer, _ = pair(**ON_DISK | {"window_bytes": 1 << 15})
    train(model, optimizer, 0)
    events: list[str] = []
    begin, wait = DiskCopies.begin, DiskCopies.wait

    def noted(self: DiskCopies, source: Any, target: Any, **how: Any) -> Any:
        events.append("begin" if isinstance(source, OnDisk) else "")
        return begin(self, source, target, **how)

    def waited(self: DiskCopies, ticket: Any) -> None:
        events.append("wait" if ticket.is_to_card else "")
        wait(self, ticket)

    monkeypatch.setattr(DiskCopies, "begin", noted)
    monkeypatch.setattr(DiskCopies, "wait", waited)
    train(model, optimizer, 1)
    of_states = [event for event in events if event]
    ahead = [
        of_states[:at].count("begin") - of_states[:at].count("wait") for at, e in enumerate(of_states) if e == "wait"
    ]
    assert of_states.count("begin") == of_states.count("wait") > 20
    # Both states of a parameter, and those of one more or two.
    assert sum(number >= 3 for number in ahead) > len(ahead) // 2


def held(optimizer: Optimizer) -> tuple[int, int, int, int]:
    source: Any = lazy(optimizer)[0].source
    slab = source.encoded.part.slab
    return slab.free_bytes, slab.file.num_bytes, len(os.listdir("/proc/self/fd")), threading.active_count()


def test_many_steps_grow_nothing_and_leave_nothing() -> None:
    gc.collect()
    close_gone()
    files, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    _, model, _, optimizer, session = pair(**ON_DISK)
    for seed in range(3):
        train(model, optimizer, seed)
    early = held(optimizer)
    for seed in range(3, 12):
        train(model, optimizer, seed)
    assert held(optimizer) == early
    session.undo()
    del model, optimizer, session
    gc.collect()
    close_gone()
    # Those that copied have been told to end, and do so when they are next given a core.
    for thread in set(threading.enumerate()) - threads:
        thread.join(10.0)
    assert len(os.listdir("/proc/self/fd")) == files and set(threading.enumerate()) <= threads


def test_states_that_cannot_be_written_are_kept_and_the_next_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    plain, model, *optimizers, session = pair(**ON_DISK)
    for seed in range(2):
        for m, o in zip((plain, model), optimizers, strict=True):
            train(m, o, seed)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        train(model, optimizers[1], 2)
    train(plain, optimizers[0], 2)
    assert same(plain.parameters(), model.parameters()) and same(*map(states, optimizers))
    with pytest.raises(ApplyError, match=r"optimizer states could not be written .*No space left.*not lost"):
        train(model, optimizers[1], 3)
    session.undo()
    for seed in (3, 4):
        for m, o in zip((plain, model), optimizers, strict=True):
            train(m, o, seed)
    assert same(plain.parameters(), model.parameters())


def training() -> Any:
    """Four layers of 1,024 numbers, trained in full; the model is made on the card, so that the host never has it twice."""
    with torch.device("cuda"):
        model = Decoder(4000, 1024, 4, 8)
    optimizer = adamw(model)
    while True:
        loss = model(torch.randint(0, 4000, (1, 128), device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_the_traced_run_holds_what_the_options_say() -> None:
    target = GeneratorFunction(location=__file__, function="training", parameters={})
    plain = Profile(trace(target, label="plain", device=DEVICE, num_steps=2).tape, find(DEVICE))
    # States on disk, and weights too.
    options = [o for o in techniques()["trained_weight_streaming"].options(plain) if o.disk_bytes][:2]
    assert ["weights" in option.settings for option in options] == [False, True]
    for option in options:
        choice = {
            "technique": option.technique,
            "where": option.where,
            "settings": option.settings,
            "saves_bytes": 0,
            "adds_seconds": 0.0,
            "exact": True,
        }
        preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": [choice]})
        tape = trace(target, label="on disk", device=DEVICE, num_steps=2, preparation=preparation).tape
        assert tape.disk_peak_bytes == option.disk_bytes
        assert 0.97 * option.host_bytes < tape.host_peak_bytes <= 1.01 * option.host_bytes
