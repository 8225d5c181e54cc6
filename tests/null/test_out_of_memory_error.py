"""The text of an out-of-memory error: its figures, who held the rest, and what follows from them."""

import json
from pathlib import Path

import pytest

from tightfit.cli.main import run
from tightfit.diagnosis.out_of_memory_error import OutOfMemoryText, read_error
from tightfit.units import GIB, MIB

TEXT = """step 12
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which {free} GiB is free.
Process 77 has 3.00 GiB memory in use. Including non-PyTorch memory, this process has {own} GiB memory in use. Of the allocated memory 16.00 GiB is allocated by
PyTorch, and {unused} GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting expandable_segments:True
"""


def read(free: float = 1.0, own: float = 20.0, unused: float = 3.5) -> OutOfMemoryText:
    found = read_error(TEXT.format(free=free, own=own, unused=unused))
    assert found is not None
    return found


def test_the_figures_and_who_holds_the_rest() -> None:
    found = read()
    assert (found.requested_bytes, found.missing_bytes, found.capacity_bytes) == (2 * GIB, GIB, 24 * GIB)
    assert (found.allocated_bytes, found.unused_bytes) == (16 * GIB, int(3.5 * GIB))
    assert (found.outside_bytes, found.others_bytes) == (GIB // 2, 3 * GIB)


def test_an_error_of_old_versions() -> None:
    found = read_error(
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.00 GiB total capacity; 5.00 GiB already allocated; 5.00 MiB free; 6.00 GiB reserved in total by PyTorch)"
    )
    assert found is not None
    assert (found.requested_bytes, found.free_bytes, found.unused_bytes) == (20 * MIB, 5 * MIB, GIB)
    assert found.outside_bytes is found.others_bytes is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (read(), ["expandable_segments:True it may be enough", "other processes hold 3.00 GiB"]),
        (read(unused=0.25), ["no setting of the allocator is enough", "other processes hold 3.00 GiB"]),
        (read(own=22.75, free=1.0), ["expandable_segments:True it may be enough"]),
        (read(free=2.5, own=18.5), ["the process is limited"]),
    ],
)
def test_what_follows(found: OutOfMemoryText, said: list[str]) -> None:
    *why, last = found.why()
    assert "tightfit plan SCRIPT" in last
    assert len(why) == len(said)
    assert all(words in sentence for words, sentence in zip(said, why, strict=True))


def test_the_text_or_a_log_that_ends_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXT.format(free=1.0, own=20.0, unused=3.5)
    (tmp_path / "run.log").write_text("Tried to allocate it all\n" + "step\n" * 9 + text)
    for target in (text, str(tmp_path / "run.log")):
        assert run(["doctor", target]) == 0
        assert (
            "one allocation asked for 2.00 GiB, and 1.00 GiB of 24.00 GiB were free: 1.00 GiB"
            in capsys.readouterr().out
        )
    assert run(["doctor", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing_bytes"] == GIB
    (tmp_path / "cut.log").write_text("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert run(["doctor", str(tmp_path / "cut.log")]) == 2
    assert "the text of an error" in capsys.readouterr().err
