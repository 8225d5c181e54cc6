"""Sizes and times as people write them."""

import pytest

from tightfit.errors import UsageError
from tightfit.units import format_bytes, format_seconds, parse


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
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


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-3 MiB", "1e9", "1 2"])
def test_parse_refuses_the_rest(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse(text)


def test_sizes_and_times_are_written_in_the_largest_unit():
    assert [format_bytes(n) for n in (0, 512, 2048, -3 << 20, 3 << 29)] == [
        "0 B",
        "512 B",
        "2.0 KiB",
        "−3.0 MiB",
        "1.50 GiB",
    ]
    assert [format_seconds(s) for s in (1.25, 0.031, 8.2e-6)] == ["1.25 s", "31.0 ms", "8.2 µs"]
