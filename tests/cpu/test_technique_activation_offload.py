"""Activation offload: what it moves and when, on the virtual GPU and with real numbers, alone and in a plan with a budget of host memory."""

import copy
import dataclasses
import errno
import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance import large_models
from tests.conformance.large_models import Decoder
from tests.conformance.savings import allocated
from torch import nn

import tightfit
from tightfit.analysis.relative_places import place_from, relative_place
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.engine import copy_engines
from tightfit.engine.disk.disk_sizes import buffer_bytes_for
from tightfit.errors import ApplyError, UsageError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import step_timeline
from tightfit.tape import CopyDirection
from tightfit.techniques.registry import techniques
from tightfit.techniques.wrappers.forwards import through

DECODER = GeneratorFunction(location=large_models.__file__, function="decoder", parameters={})
MIB = 1 << 20


def offload(number: int, *, host_bytes: int = MIB, smallest_bytes: int = 1, **more: Any) -> Choice:
    settings = {"following": "+1", "smallest_bytes": smallest_bytes, "host_bytes": host_bytes, **more}
    where = f"Decoder.blocks.{number}"
    return Choice(
        technique="activation_offload", where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True
    )


def to_disk(number: int, disk_bytes: int, **more: Any) -> Choice:
    return offload(number, host_bytes=buffer_bytes_for(disk_bytes), tier="disk", disk_bytes=disk_bytes, **more)


def small() -> Decoder:
    torch.manual_seed(0)
    return Decoder(50, 16, 4, 2)


def step_of(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.arange(40).reshape(2, 20)).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("path", "other", "relative"),
    [
        ("Net.h.3", "Net.h.4", "+1"),
        ("Net.h.3.attn", "Net.h.3.mlp", "mlp"),
        ("Net.h.3.mlp", "Net.h.4", "../+1"),
        ("Net.h.3.mlp", "Net.h.4.attn", "../+1.attn"),
        ("Net.layer1.2", "Net.layer2.0", "../layer2.0"),
        ("Net.down", "Net.up", "up"),
    ],
)
def test_the_place_of_what_follows_is_said_from_the_block(path: str, other: str, relative: str) -> None:
    assert relative_place(path, other) == relative
    assert place_from(path, relative) == other
    assert place_from(path, other) == other


def test_a_place_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(ApplyError, match=r"leads nowhere from Net\.mlp"):
        place_from("Net.mlp", "+1")


def test_the_memory_of_the_card_and_of_the_host_is_what_the_options_say() -> None:
    def traced(choices: list[Choice]):
        argument = {"choices": [dataclasses.asdict(choice) for choice in choices]}
        preparation = Preparation(function="tightfit.runtime.attach:prepare", argument=argument)
        return trace(DECODER, label="decoder", device="RTX 4090", num_steps=2, preparation=preparation).tape

    plain = traced([])
    size = 192_937_984
    planned = traced([offload(n, host_bytes=size, smallest_bytes=MIB) for n in (0, 1)])
    on_disk = traced([to_disk(n, size, smallest_bytes=MIB) for n in (0, 1)])
    assert on_disk.disk_peak_bytes == pytest.approx(2 * size, rel=0.1)
    assert (plain.disk_peak_bytes, planned.disk_peak_bytes) == (0, 0)
    # Through a few buffers: the host itself holds no more of it than these.
    assert on_disk.host_peak_bytes <= plain.host_peak_bytes + 2 * buffer_bytes_for(size)
    assert allocated(on_disk).max() == allocated(planned).max()
    timeline = step_timeline(priced(on_disk, find("RTX 4090")))
    written, read = (
        sum(copy.num_bytes for copy in timeline.copies if copy.direction == way)
        for way in (CopyDirection.TO_DISK, CopyDirection.FROM_DISK)
    )
    assert on_disk.disk_peak_bytes == pytest.approx(written, rel=0.05) and read == pytest.approx(written, rel=0.05)
    # Nothing of this size hides behind two blocks of some milliseconds.
    disk_seconds = written / 1.25e9 + read / 2.5e9
    assert timeline.seconds == pytest.approx(disk_seconds, rel=0.1)
    assert timeline.idle_seconds["disk"] < 0.1 * timeline.seconds
    # The slab is there from the time when the plan is put on; what the program itself has at the host then is little.
    assert planned.host_peak_bytes == pytest.approx(2 * 192_937_984, rel=0.1)
    assert planned.host_peak_bytes >= 2 * 192_937_984
    assert plain.host_peak_bytes < 2 * 192_937_984
    assert allocated(plain).max() - allocated(planned).max() == pytest.approx(2 * 192_937_984, rel=0.1)


def test_undo_leaves_the_model_as_it_was_and_a_copy_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    plain = step_of(model)
    session = apply_choices([offload(0), offload(1)], model, [])
    copied = copy.deepcopy(model)
    assert all("forward" in vars(model.blocks[n]) for n in (0, 1, 2))
    assert all(getattr(block.forward, "around", through) is through for block in copied.blocks)
    for each in (step_of(model), step_of(copied)):
        assert all(torch.equal(a, b) for a, b in zip(plain, each, strict=True))
    assert session.statistics["offloaded storages"] > 0
    session.undo()
    assert not any("forward" in vars(block) for block in model.blocks)
    # A copy has what the program puts on the class later, as any module has.
    monkeypatch.setattr(type(copied.blocks[0]), "forward", lambda _, rows: rows)
    rows = torch.ones(1)
    assert copied.blocks[0](rows) is rows and model.blocks[0](rows) is rows


def test_a_block_that_the_program_takes_out_is_gone_with_its_weights() -> None:
    model = small()
    session = apply_choices([offload(0), offload(1)], model, [])
    step_of(model)
    taken = weakref.ref(model.blocks[0])
    model.blocks = nn.ModuleList(list(model.blocks)[2:])
    gc.collect()
    assert taken() is None
    session.undo()


def test_host_memory_that_changes_is_found_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)
            target[len(target) // 2] += 1

    model = small()
    session = apply_choices([offload(0), offload(1)], model, [])
    monkeypatch.setattr(copy_engines, "_copy", broken)
    with pytest.raises(ApplyError, match="came back from host memory with other values"):
        step_of(model)
    session.undo()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.head.to("meta"), "the parameters of this model are on cpu, meta"),
        (lambda model: model.blocks.__delitem__(3), "Decoder.blocks.3, which this Decoder does not have"),
    ],
)
def test_a_model_that_it_cannot_be_right_on_is_refused(change: Callable[[nn.Module], object], why: str) -> None:
    model = small()
    change(model)
    with pytest.raises(ApplyError, match=why):
        apply_choices([offload(2)], model, [])
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_disk_that_fails_loses_nothing_and_ends_the_training_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    model = small()
    plain = step_of(model)
    session = apply_choices([to_disk(0, MIB), to_disk(1, MIB)], model, [])
    assert all(torch.equal(a, b) for a, b in zip(plain, step_of(model), strict=True))
    assert session.statistics["offloaded storages"] > 0
    monkeypatch.setattr(os, "pwritev", broken)
    assert all(torch.equal(a, b) for a, b in zip(plain, step_of(model), strict=True))
    with pytest.raises(ApplyError, match=r"activations could not be written to the disk of .*not lost"):
        step_of(model)
    session.undo()
    assert all(torch.equal(a, b) for a, b in zip(plain, step_of(model), strict=True))


def test_a_tier_that_is_not_known_or_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ApplyError, match="tier is 'tape', and takes 'host' or 'disk'"):
        apply_choices([offload(0, tier="tape")], model, [])
    with pytest.raises(ApplyError, match=r"no file can be written in .*--disk-folder"):
        apply_choices([to_disk(0, MIB)], model, [], disk_folder=str(tmp_path / "gone"))
    assert not any("forward" in vars(block) for block in model.blocks)


def test_more_host_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ApplyError, match=r"the host has no .* plan with a smaller --host"):
        apply_choices([offload(0, host_bytes=1 << 60)], small(), [])


@pytest.mark.by_turns(2)
def test_a_plan_uses_the_host_only_as_far_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    place, budget = f"{large_models.__file__}:decoder", "1900MiB"
    only = [name for name in techniques() if name not in ("activation_offload", "chunked_loss")]
    without = tightfit.plan(place, "RTX 4090", budget=budget, without=only, prove=False)
    with_it = tightfit.plan(place, "RTX 4090", budget=budget, without=only, host="700MiB", prove=False)
    assert {c.technique for c in without.choices} <= {"chunked_loss"} and without.host_bytes == 0
    moved = [c for c in with_it.choices if c.technique == "activation_offload"]
    assert moved and 0 < with_it.host_bytes <= 700 * MIB
    assert with_it.run.peak.device_bytes < without.run.peak.device_bytes
    assert with_it.exact
    both = tightfit.plan(place, "RTX 4090", budget="1500MiB", without=only, host="300MiB", disk="700MiB", prove=False)
    tiers = {c.settings.get("tier", "host") for c in both.choices if c.technique == "activation_offload"}
    assert both.fits and tiers == {"host", "disk"}
    assert 0 < both.host_bytes <= 300 * MIB and 0 < both.disk_bytes <= 700 * MIB
    assert json.loads(json.dumps(with_it.to_json()))["host_bytes"] == with_it.host_bytes


def test_a_budget_for_the_host_is_a_size(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", f"{large_models.__file__}:decoder", "--device", "RTX 4090", "--host", "-3GiB"]) == 2
    assert "host" in capfd.readouterr().err
    with pytest.raises(UsageError, match="host"):
        tightfit.plan(f"{large_models.__file__}:decoder", "RTX 4090", host="a lot")
