"""`tightfit devices`: the catalogue, one card, and what nvidia-smi says of this machine."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tightfit.cli.devices import _catalogue_table, devices
from tightfit.cli.shared.local_cards import LocalCard, local_cards, own_card, seen_cards
from tightfit.devices.catalogue import all_devices, find
from tightfit.errors import UnknownDevice, UsageError
from tightfit.units import MIB


def with_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


@pytest.fixture
def no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_no_figure_is_cut_in_a_narrow_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(_catalogue_table(all_devices(), 80))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said
    assert "tightfit devices NAME shows all of one" in said


@pytest.mark.usefixtures("no_cards")
def test_lists_every_card_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert devices() == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(card.name in captured.out for card in all_devices())
    assert max(map(len, captured.out.splitlines())) <= 160


@pytest.mark.usefixtures("no_cards")
def test_json_round_trips_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert devices(json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == 1
    assert answer["here"] == []
    assert [card["name"] for card in answer["devices"]] == [card.name for card in all_devices()]
    assert [card["capacity_bytes"] for card in answer["devices"]] == [card.capacity_bytes for card in all_devices()]


def test_one_card_comes_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert devices("h100 sxm") == 0
    out = capsys.readouterr().out
    assert "NVIDIA H100 80GB HBM3" in out
    assert all(source in out for source in find("h100 sxm").source)
    assert devices("h100 sxm", json=True) == 0
    assert json.loads(capsys.readouterr().out)["device"]["num_multiprocessors"] == 132


def test_an_unknown_card_is_an_error() -> None:
    with pytest.raises(UnknownDevice, match="4091"):
        devices("4091")


def test_cards_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_nvidia_smi(
        tmp_path,
        monkeypatch,
        "echo 'GPU-1, NVIDIA H200, 143771 MiB, 1024 MiB'; echo 'GPU-2, Odd Card 3000, 4096 MiB, [N/A]'",
    )
    assert local_cards() == [
        LocalCard(
            uuid="GPU-1", name="NVIDIA H200", total_bytes=143_771 * MIB, used_bytes=1024 * MIB, known_as="NVIDIA H200"
        ),
        LocalCard(uuid="GPU-2", name="Odd Card 3000", total_bytes=4096 * MIB, used_bytes=0, known_as=None),
    ]
    assert devices() == 0
    out = capsys.readouterr().out
    assert "this machine: NVIDIA H200, 140.40 GiB (known as NVIDIA H200)" in out
    assert "this machine: Odd Card 3000, 4.00 GiB (not in the catalogue)" in out


def test_a_driver_that_does_not_answer_is_said_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_nvidia_smi(tmp_path, monkeypatch, "echo 'no driver is loaded' >&2; exit 9")
    assert local_cards() == []
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "nvidia-smi does not answer: no driver is loaded\n"


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060"]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 4090"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["NVIDIA GeForce RTX 3060"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["NVIDIA GeForce RTX 4090"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b2, 1"}, ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060"]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, ["NVIDIA GeForce RTX 4090"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-b2/1/0"}, ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060"]),
    ],
)
def test_the_own_card_is_the_first_that_a_program_sees(
    environment: dict[str, str], seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    answer = "echo 'GPU-a1, NVIDIA GeForce RTX 3060, 12288 MiB, 0 MiB'; echo 'GPU-b2, NVIDIA GeForce RTX 4090, 24564 MiB, 0 MiB'"
    with_nvidia_smi(tmp_path, monkeypatch, answer)
    assert [card.name for card in seen_cards()] == seen


def test_a_driver_that_is_too_slow_is_said_and_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tightfit.cli.shared.local_cards._MAX_SECONDS", 0.2)
    with_nvidia_smi(tmp_path, monkeypatch, "exec sleep 5")
    assert local_cards() == []
    assert capsys.readouterr().err == "nvidia-smi has not answered in 0.2 s\n"


@pytest.mark.parametrize(
    ("reported", "mebibytes", "known_as"),
    [
        ("Quadro RTX 6000", 24_576, "Quadro RTX 6000"),
        ("Quadro RTX 4000", 8192, "Quadro RTX 4000"),
        ("NVIDIA RTX A6000", 49_140, "NVIDIA RTX A6000"),
        ("Tesla T4", 15_360, "Tesla T4"),
        ("NVIDIA A10", 23_028, "NVIDIA A10"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "NVIDIA GeForce RTX 4060 Ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 16_380, "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 3060", 8192, None),
        ("NVIDIA GeForce RTX 5060 Ti", 8151, None),
    ],
)
def test_a_card_is_the_one_with_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: str, mebibytes: int, known_as: str | None
) -> None:
    with_nvidia_smi(tmp_path, monkeypatch, f"echo 'GPU-1, {reported}, {mebibytes} MiB, 0 MiB'")
    assert [card.known_as for card in local_cards()] == [known_as]
    if known_as is None:
        with pytest.raises(UsageError, match="is not in the catalogue"):
            own_card()
    else:
        assert own_card() == known_as
