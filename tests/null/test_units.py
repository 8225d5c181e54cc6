"""Sizes and times as people write them."""

import pytest

from tightfit.errors import UsageError
from tightfit.units import (
    format_bytes,
    format_bytes_up,
    format_range_of_seconds,
    format_seconds,
    parse,
    parse_bytes,
    parse_seconds,
    to_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096 b", 4096),
        ("0", 0),
        ("22", 22 << 30),
        ("1.5", 3 << 29),
        ("1024", 1 << 40),
        ("22 GiB", 22 << 30),
        ("22GB", 22 * 10**9),
        ("1.5g", 3 << 29),
        (".5 KiB", 512),
        ("512M", 512 << 20),
        ("7b", 7),
    ],
)
def test_parse_reads_what_people_write(text, count):
    assert parse(text) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "is not a size")
            for text in ("", "GiB", "12 parsecs", "1e9", "1 2", "--", "9" * 400, "1,5GiB", "nan")
        ),
        *((text, "is negative") for text in ("-3 MiB", "-3GiB", "- 1", "-80%")),
        *((text, "has no unit") for text in ("4096", "0.5", "1025", "24000000000")),
        ("120%", "more than all of it"),
        ("80%", "a share of a size that is not known"),
    ],
)
def test_parse_refuses_the_rest(text, message):
    whole_bytes = None if text == "80%" else 10 << 30
    with pytest.raises(UsageError, match=message):
        parse(text, whole_bytes=whole_bytes)


def test_a_share_is_of_the_whole():
    assert parse("80%", whole_bytes=10 << 30) == 8 << 30
    assert parse(" 12.5 % ", whole_bytes=80) == 10
    assert parse("100%", whole_bytes=7) == 7


def test_beside_a_file_without_units_a_number_is_bytes():
    assert (parse_bytes("4096"), parse_bytes("10"), parse_bytes("4 KiB")) == (4096, 10, 4096)
    for text in ("-1", "10%"):
        with pytest.raises(UsageError):
            parse_bytes(text)


def test_in_python_an_int_is_bytes_and_a_str_without_a_unit_warns():
    assert to_bytes(22, "budget") == 22
    assert to_bytes("22GiB", "budget") == 22 << 30
    with pytest.warns(UserWarning, match="budget '22' has no unit; read as 22 GiB"):
        assert to_bytes("22", "budget") == 22 << 30
    with pytest.raises(UsageError, match=r"budget is 12\.5: give a text such as '22GiB', or whole bytes"):
        to_bytes(12.5, "budget")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="budget is -1"):
        to_bytes(-1, "budget")
    with pytest.raises(UsageError, match="budget: '-3GiB' is negative"):
        to_bytes("-3GiB", "budget")


def test_sizes_and_times_are_written_in_the_largest_unit():
    assert [format_bytes(n) for n in (0, 512, 2048, -3 << 20, 3 << 29)] == [
        "0 B",
        "512 B",
        "2.0 KiB",
        "−3.0 MiB",
        "1.50 GiB",
    ]
    assert [format_seconds(s) for s in (1.25, 0.031, 8.2e-6)] == ["1.25 s", "31.0 ms", "8.2 µs"]


def test_memory_that_is_to_be_given_is_rounded_up():
    sizes = [0, 513, 2048, (3 << 20) + 1, (3 << 29) + 1, 3 << 29]
    assert [format_bytes_up(n) for n in sizes] == ["0 B", "513 B", "2.0 KiB", "3.1 MiB", "1.51 GiB", "1.50 GiB"]
    assert all(to_bytes(format_bytes_up(n).replace(" ", ""), "budget") >= n for n in sizes[1:])


@pytest.mark.parametrize(
    ("seconds", "low", "high", "words"),
    [
        (0.412, 0.390, 0.440, "390-440"),
        (1.25, 1.1, 1.4, "1.10-1.40"),
        (0.0031, 0.0028, 0.0035, "2.80-3.50"),
        (0.031, 0.028, 0.035, "28.0-35.0"),
        (8.2e-6, 8.1e-6, 8.3e-6, "8.10-8.30"),
        (0.999, 0.9, 1.2, "900-1200"),
        (12.0, 11.0, 30.0, "11-30"),
    ],
)
def test_a_range_is_in_the_unit_of_what_it_is_of(seconds: float, low: float, high: float, words: str) -> None:
    assert format_range_of_seconds(seconds, low, high) == words


def test_times_have_units_and_are_above_zero():
    assert [parse_seconds(text) for text in ("500ms", "1.5 s", "0.5", "2min", "30 us")] == pytest.approx(
        [0.5, 1.5, 0.5, 120.0, 30e-6]
    )
    for text in ("", "ms", "0", "-1s", "5 parsecs"):
        with pytest.raises(UsageError, match="is no time"):
            parse_seconds(text)
