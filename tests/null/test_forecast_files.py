"""Series are read from files of many tools, in any order and with holes; what is wrong is one line."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from tightfit.errors import UsageError
from tightfit.forecast.read_series import SeriesFile, read_series

GIB = 1 << 30


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "series.csv"


def read(file: Path, content: str | bytes) -> SeriesFile:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_series(str(file))


def levels(content: SeriesFile) -> dict[str, list[float]]:
    return {each.name: each.values.tolist() for each in content.series}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("time,bytes,name\n1,10,a\n2,20,a\n1,5,b\n", {"a": [10, 20], "b": [5]}),
        ("timestamp_anon,value,container_ip\n1662858720.0,10.5,x\n", {"x": [10.5]}),
        # Any order of the columns and rows; times that are not regular.
        ("pod;node;memory_mib;ts\na;n;3;9\na;n;2;7.5\na;n;1;1\n", {"a": [1 << 20, 2 << 20, 3 << 20]}),
        # As nvidia-smi prints it: two cards of one name are two series.
        (
            "timestamp, name, index, memory.used [MiB], memory.total [MiB], utilization.gpu [%]\n"
            "2026/11/23 06:00:00.000, A100, 0, 1 MiB, 40960 MiB, 3 %\n2026/11/23 06:00:00.000, A100, 1, 2 MiB, 40960 MiB, 3 %\n",
            {"A100/0": [1 << 20], "A100/1": [2 << 20]},
        ),
        # No name at all: one series, named after the file. A name that is missing is a name of its own.
        ("Time,UsedBytes\n1,4\n", {"series": [4]}),
        ("time,bytes,name\n1,4,\n1,5,a\n", {"(no name)": [4], "a": [5]}),
        # What a spreadsheet puts in front, blank lines, quotes, sizes with a unit, dates.
        ('\ufefftime,memory,job\n\n2026-11-23T06:00:00Z,"1.5 GiB","a, b"\n', {"a, b": [1.5 * GIB]}),
        # Missing samples are no zeros, and of two samples at one time the larger counts.
        ("time,bytes,name\n1,7,a\n2,nan,a\n3,,a\n4,N/A,a\n5,8,a\n5,9,a\n", {"a": [7, 9]}),
        # A monitor is writing the last line.
        ("time,bytes,name\n1,7,a\n2,8", {"a": [7]}),
    ],
)
def test_a_file_is_read(file: Path, content: str, expected: dict[str, list[float]]) -> None:
    assert levels(read(file, content)) == expected


def test_a_compressed_file_is_read(file: Path) -> None:
    assert levels(read(file, gzip.compress(b"time,bytes,name\n1,10,a\n"))) == {"a": [10]}


@pytest.mark.parametrize("factor", [1, 10**3, 10**6, 10**9])
def test_times_are_seconds_whatever_their_unit(file: Path, factor: int) -> None:
    start = 1_700_000_000
    content = "time,bytes\n" + "".join(f"{(start + 60 * i) * factor},1\n" for i in range(4))
    assert read(file, content).series[0].interval == pytest.approx(60)


def test_what_was_decided_about_rows_is_said(file: Path) -> None:
    notes = read(file, "time,bytes,name\n1,7,a\n1,8,a\n2,nan,a\n3,1").notes
    assert [note.partition(": ")[2] for note in notes] == [
        "the last line is incomplete and is skipped",
        "1 of 3 samples have no size; they are skipped",
        "1 samples have the time of another one of their series; the largest counts",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("time,bytes,name\n", "has no samples"),
        ("time,name\n1,a\n", "has no column of bytes"),
        ("bytes,name\n1,a\n", "has no column of time"),
        ("time,memory_a,memory_b\n1,2,3\n", "two columns of bytes"),
        ("1,2,a\n2,3,a\n", "has no column of time"),
        ("time,bytes,name\n1,2,a\n2,-3,a\n", "line 3: the size -3 is negative"),
        ("time,bytes,name\n1,inf,a\n", "line 2: the size inf is more than any memory has"),
        ("time,bytes,name\n1,2,a\n2,much,a\n", "line 3: 'much' is not a size"),
        ("time,bytes,name\nnoon,2,a\n", "line 2: 'noon' is not a time"),
        ("time,bytes,name\nnan,2,a\n", "line 2: 'nan' is not a time"),
        ("time,bytes,name\n1,2\n2,3,a\n", "line 2: 2 fields, and the first line has 3"),
        ("time,bytes,name\n1,nan,a\n", "has no sample with a size"),
        (b"\x1f\x8b\x08\x00broken", "is not a whole gzip file"),
        (b"\xff\xfe\x00\x01", "is not a text file"),
    ],
)
def test_a_wrong_file_is_one_line(file: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=r"^\S+series\.csv") as raised:
        read(file, content)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_gaps_are_seen(file: Path) -> None:
    times = [0, 60, 120, 1000, 1060, 1120]
    series = read(file, "time,bytes\n" + "".join(f"{time},1\n" for time in times)).series[0]
    assert np.flatnonzero(series.has_gap_within(2)).tolist() == [1, 2]
