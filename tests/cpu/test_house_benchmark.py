"""The figures of the house count what they say they count."""

from pathlib import Path

from benchmarks import house
from tools import check_sizes


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


def test_a_class_is_too_large_by_its_own_methods(tmp_path: Path) -> None:
    methods = [f"    def m{number}(self): ..." for number in range(11)]
    file = tmp_path / "box.py"
    file.write_text("\n".join(["class Box:", "    def __enter__(self): ...", *methods]))
    assert not list(check_sizes.too_long(file))
    file.write_text("\n".join(["class Box:", "    def __init__(self): ...", *methods]))
    assert list(check_sizes.too_long(file)) == [f"{file}:1: Box has 12 methods, at most 11"]


def test_no_folder_but_the_package_itself_has_more_than_a_reader_finds() -> None:
    rooms = house.lines_of_rooms(*house.modules_and_imports())
    assert [line.split()[0] for line in rooms if line.endswith("over")] == ["tightfit"]
