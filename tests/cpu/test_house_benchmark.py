"""The figures of the house count what they say they count."""

from pathlib import Path

from benchmarks import house


def test_a_room_is_measured_by_its_members_and_the_arrows_between_them() -> None:
    modules = {"a", "a.one", "a.two", "a.room", "a.room.x", "a.room.y", "a.room.z"}
    imports = [
        ("a.one", "a.two"),
        ("a.one", "a.room.x"),
        ("a.room.x", "a.room.y"),
        ("a.room.y", "a.room.x"),
        ("a.room.z", "a.two"),
    ]
    rows = {
        line.split()[0]: [int(figure) for figure in line.split()[1:]]
        for line in list(house.lines_of_rooms(modules, imports))[1:]
    }
    assert rows == {"a": [2, 3, 3, 0], "a.room": [3, 3, 2, 1]}


def test_files_are_measured_by_what_is_in_them() -> None:
    one = "# why\nclass Box:\n    def a(self):\n        return 1\n\n    def b(self):\n        return torch._C._cuda  # source\n"
    lines = list(house.lines_of_files({Path("x/one.py"): one, Path("y/one.py"): "class Box: ...\n"}))
    assert lines == [
        "files: median 4, p90 1, max 7 lines (2)",
        "functions: median 2, p90 2, max 2 lines (2)",
        "largest class: Box, 2 methods; 0 with 12 or more",
        "file names used more than once: 1 (one.py 2)",
        "class names used more than once: 1 (Box 2)",
        "comment lines: 2 of 8 (25.0%)",
        "private names of torch: 1",
    ]
