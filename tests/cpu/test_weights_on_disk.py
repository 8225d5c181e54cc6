"""Frozen weights on disk between their uses: in a file of ours, or in the one that the program has mapped them from. The same values to the bit, whatever the
program and its forks write meanwhile, and an error before anything is used that is not what was written."""

import ctypes
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conformance.large_models import Decoder
from tests.cpu import streaming_models
from tests.cpu.test_technique_weight_streaming import (
    NUM_BLOCKS,
    gradients,
    same,
    small,
    streaming,
    tokens,
)
from torch import nn

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.engine.disk import disk_places
from tightfit.engine.disk.disk_sizes import PAGE_BYTES
from tightfit.engine.disk.file_mappings import FileMappings
from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.registry import techniques
from tightfit.techniques.session import Session

ON_DISK = {"tier": "disk", "disk_bytes": 1 << 18, "host_bytes": 2 * PAGE_BYTES}


def on_disk(model: nn.Module, **others: Any) -> Session:
    return apply_choices([streaming(number, **ON_DISK | others) for number in range(NUM_BLOCKS)], model, [])


def frozen(model: Decoder) -> list[torch.Tensor]:
    return [p for block in model.blocks for p in block.parameters() if not p.requires_grad]


def file_of(parameter: torch.Tensor) -> str:
    there = FileMappings().range_of(parameter.data_ptr(), parameter.nbytes)
    return "" if there is None else there.path


def trained(model: nn.Module, seed: int) -> list[torch.Tensor]:
    return gradients(model, model(tokens(seed)))


def test_gradients_are_the_same_to_the_bit_and_the_weights_are_in_a_file_without_a_name() -> None:
    plain, model = small(), small()
    session = on_disk(model)
    assert all("(deleted)" in file_of(weight) for weight in frozen(model))
    for seed in range(3):
        assert same(trained(plain, seed), trained(model, seed))
        assert all("(deleted)" in file_of(weight) for weight in frozen(model))
    assert same(list(plain.state_dict().values()), list(model.state_dict().values()))
    session.undo()
    assert not any(file_of(weight) for weight in frozen(model))
    assert same(trained(plain, 4), trained(model, 4))


@pytest.fixture
def loaded(tmp_path: Path) -> Decoder:
    """The model with its frozen weights mapped from a file of safetensors."""
    model = small()
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "weights.safetensors")
    of_file = load_file(tmp_path / "weights.safetensors")
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            parameter.data = of_file[name]
    return model


def test_weights_that_are_mapped_already_are_read_from_that_file_and_nothing_is_written(loaded: Decoder) -> None:
    written: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: written.append(1))
        on_disk(loaded)
    plain, read, preadv = small(), [0], os.preadv

    def counted(*arguments: Any) -> int:
        read.append(preadv(*arguments))
        return read[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        for seed in range(2):
            assert same(trained(plain, seed), trained(loaded, seed))
    num_bytes = sum(weight.nbytes for weight in frozen(loaded))
    assert not written and sum(read) == 2 * 2 * num_bytes
    assert all(file_of(weight).endswith("weights.safetensors") for weight in frozen(loaded))


def test_weights_of_a_file_are_copied_to_the_host_where_the_plan_says_so(loaded: Decoder) -> None:
    apply_choices([streaming(number) for number in range(NUM_BLOCKS)], loaded, [])
    assert not any(file_of(weight) for weight in frozen(loaded))
    assert same(trained(small(), 0), trained(loaded, 0))


def test_a_file_that_another_tensor_sees_too_is_refused(loaded: Decoder) -> None:
    weight = loaded.blocks[1].qkv.weight
    # As a second tensor that is asked for of one open file.
    seen = torch.frombuffer((ctypes.c_byte * weight.nbytes).from_address(weight.data_ptr()), dtype=torch.float32)
    with pytest.raises(ApplyError, match=r"blocks\.1\.qkv\.weight lies in a file that another tensor"):
        on_disk(loaded)
    assert len(seen) == weight.numel()


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_the_program_writes_is_what_counts_and_the_file_stays_as_it_is(is_loaded: bool, loaded: Decoder) -> None:
    plain, model = small(), loaded if is_loaded else small()
    on_disk(model)
    for each in (plain, model):
        trained(each, 0)
        with torch.no_grad():
            each.blocks[0].qkv.weight.mul_(2)
            each.blocks[1].out.bias.data += 1
            each.blocks[2].norm_1.weight.data.numpy()[3] = 7
    for seed in range(2):
        assert same(trained(plain, seed), trained(model, seed))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    for each in (plain, model):
        each.load_state_dict({name: value + 1 for name, value in before.items()})
    assert same(trained(plain, 2), trained(model, 2))
    assert same(list(plain.state_dict().values()), list(model.state_dict().values()))


def test_weights_of_two_types_are_saved_one_by_one_and_together_as_in_the_plain_run(tmp_path: Path) -> None:
    plain, model = small(), small()
    for each in (plain, model):
        each.blocks[1].out.bias.data = each.blocks[1].out.bias.data.bfloat16()
    on_disk(model)
    for each, folder in ((plain, tmp_path / "plain"), (model, tmp_path / "model")):
        folder.mkdir()
        torch.save(each.state_dict(), folder / "all.pt")
        torch.save(each.blocks[0].qkv.weight, folder / "one.pt")
        save_file(each.state_dict(), folder / "all.safetensors")
    for name in ("one.pt", "all.pt", "all.safetensors"):
        files = tmp_path / "plain" / name, tmp_path / "model" / name
        assert abs(files[0].stat().st_size - files[1].stat().st_size) < 1 << 12
    loaded = torch.load(tmp_path / "model" / "all.pt"), load_file(tmp_path / "model" / "all.safetensors")
    assert all(same(list(plain.state_dict().values()), [each[name] for name in plain.state_dict()]) for each in loaded)


def test_a_byte_that_has_changed_on_the_disk_is_an_error_before_it_is_used() -> None:
    model = small()
    session = on_disk(model)
    trained(model, 0)
    weight = model.blocks[2].qkv.weight
    maps = Path("/proc/self/maps").read_text().splitlines()
    line = next(
        line
        for line in maps
        if (r := line.split()[0].split("-")) and int(r[0], 16) <= weight.data_ptr() < int(r[1], 16)
    )
    inode = line.split()[4]
    number = next(n for n in os.listdir("/proc/self/fd") if _inode(n) == inode)
    file = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
    os.pwrite(file, b"\1", weight.data_ptr() - int(line.split("-")[0], 16) + int(line.split()[2], 16))
    os.close(file)
    with pytest.raises(ApplyError, match=r"weights could not be read back from the disk of .*checksum.*damaged"):
        trained(model, 1)
    with pytest.raises(ApplyError, match="could not be read back"):
        session.undo()


@pytest.mark.parametrize("is_partly_written", [False, True])
def test_a_file_that_is_written_over_is_an_error_before_it_is_used(
    is_partly_written: bool, loaded: Decoder, tmp_path: Path
) -> None:
    """As `cp other.safetensors weights.safetensors` writes: into the same file. On the card, without a plan, that changes nothing."""
    plain, session = small(), on_disk(loaded)
    if is_partly_written:
        with torch.no_grad():
            for model in (plain, loaded):
                model.blocks[1].qkv.weight[0, 0] = 7
    assert same(trained(plain, 0), trained(loaded, 0))
    other = tmp_path / "other.safetensors"
    save_file({name: value + 1 for name, value in small().state_dict().items()}, other)
    with (tmp_path / "weights.safetensors").open("r+b") as file:
        file.write(other.read_bytes())
    with pytest.raises(ApplyError, match=r"weights\.safetensors was written to while its weights are in use"):
        trained(loaded, 1)
    with pytest.raises(ApplyError, match="could not be read back"):
        session.undo()


def test_a_file_that_another_one_takes_the_place_of_is_read_on(loaded: Decoder, tmp_path: Path) -> None:
    """As safetensors and `os.replace` write: the file that is mapped is there without its name."""
    on_disk(loaded)
    save_file({name: value + 1 for name, value in small().state_dict().items()}, tmp_path / "weights.safetensors")
    for seed in range(2):
        assert same(trained(small(), seed), trained(loaded, seed))


def _inode(number: str) -> str:
    try:
        return str(os.stat(f"/proc/self/fd/{number}").st_ino)
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("first", "why"), [(0, "the disk of .* fails"), (4, "weights could not be written to the disk of")]
)
def test_a_disk_that_fails_while_weights_are_written_changes_nothing(
    first: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, pwritev = [0], os.pwritev

    def broken(*arguments: Any) -> int:
        calls[0] += 1
        # Once it has been seen whether the file system takes what goes past the page cache.
        if calls[0] > first:
            raise OSError(errno.EIO, "Input/output error")
        return pwritev(*arguments)

    plain, model = small(), small()
    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(ApplyError, match=f"{why}.*--disk-folder"):
        on_disk(model)
    monkeypatch.undo()
    assert same(trained(plain, 0), trained(model, 0))


def test_without_knowledge_of_pages_weights_are_read_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_places, "was_written", lambda *_: True)
    plain, model = small(), small()
    on_disk(model)
    assert same(trained(plain, 0), trained(model, 0))


def test_weights_that_are_moved_to_memory_which_processes_share_are_read_from_there() -> None:
    plain, model = small(), small()
    on_disk(model)
    for each in (plain, model):
        trained(each, 0)
        each.share_memory()
        each.blocks[1].qkv.weight.data[0] = 7
    assert same(trained(plain, 1), trained(model, 1))


def test_a_fork_writes_to_weights_of_its_own() -> None:
    plain, model = small(), small()
    on_disk(model)
    trained(model, 0)
    pid = os.fork()
    if not pid:
        # Without pytest's handlers: only what it found is told.
        is_right = False
        try:
            for each in (plain, model):
                each.blocks[0].qkv.weight.data *= 2
            is_right = same(trained(plain, 1), trained(model, 1))
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert same(trained(plain, 1), trained(model, 1))


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        try:
            model = small()
            apply_choices([streaming(n, **ON_DISK) for n in range(NUM_BLOCKS)], model, [], disk_folder=str(tmp_path))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def mostly_weights() -> Iterator[torch.Tensor]:
    yield from streaming_models.mostly_weights(4)


def test_the_traced_run_holds_what_the_options_say() -> None:
    target = GeneratorFunction(location=__file__, function="mostly_weights", parameters={})
    plain = trace(target, label="plain", device="RTX 4090", num_steps=2).tape
    options = list(techniques()["weight_streaming"].options(Profile(plain, find("RTX 4090"))))
    taken = [option for option in options if option.disk_bytes]
    assert len(taken) == len(options) // 2 == 4
    choices = [
        {
            "technique": o.technique,
            "where": o.where,
            "settings": o.settings,
            "saves_bytes": 0,
            "adds_seconds": 0.0,
            "exact": True,
        }
        for o in taken
    ]
    preparation = Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": choices})
    tape = trace(target, label="on disk", device="RTX 4090", num_steps=2, preparation=preparation).tape
    assert tape.disk_peak_bytes == sum(option.disk_bytes for option in taken)
    # The model is made at the host, and nothing is held there besides but buffers.
    host_bytes = sum(option.host_bytes for option in taken)
    assert tape.host_peak_bytes <= plain.host_peak_bytes + host_bytes
