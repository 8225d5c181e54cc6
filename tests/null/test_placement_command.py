"""`tightfit place`: what it prints, its exit codes, and errors of one line."""

import json
from pathlib import Path

import pytest

from tightfit.cli.main import run
from tightfit.placement.buffers import read_problem
from tightfit.placement.offsets import faults

FITTING = "id,lower,upper,size\nweights,0,9,6\nearly,0,4,2\nlate,4,9,4\n"
# At most 5 bytes live at any moment, and yet it takes 6 to place them.
GAP = "id,lower,upper,size\na,2,5,1\nb,2,6,1\nc,4,6,2\nd,0,3,3\ne,1,2,2\nf,5,10,2\ng,7,10,3\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(FITTING)
    return path


def test_json_has_the_keys_of_the_contract(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["place", str(file), "--capacity", "10", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {
        *("schema", "offsets", "height", "lower_bound", "seconds", "fits", "proven", "reason", "strategy")
    }
    assert (answer["schema"], answer["height"], answer["lower_bound"], answer["fits"]) == (1, 10, 10, True)
    assert (answer["proven"], answer["reason"], answer["strategy"]) == (True, "", "greedy by size")
    assert faults(read_problem(file, capacity=10), answer["offsets"]) == []


def test_text_says_that_it_fits_and_how(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["place", str(file), "--capacity", "12"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("fits: 2 bytes to spare\nheight       10 (10 B), found by greedy by size in ")
    assert said.err == ""


def test_text_says_who_lives_at_the_moment_that_is_too_full(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["place", str(file), "--capacity", "9"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("does not fit: 10 bytes live at moment 4, 1 too many: weights, late\n")


def test_text_says_where_all_placements_were_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gap.csv"
    path.write_text(GAP)
    assert run(["place", str(path), "--capacity", "5"]) == 1
    assert capsys.readouterr().out.startswith("does not fit: no placement exists at this capacity")
    assert run(["place", str(path), "--capacity", "5", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["proven"], answer["reason"][:22]) == (True, "no placement exists at")
    assert run(["place", str(path), "--capacity", "6"]) == 0


def test_the_output_has_the_offsets(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "placed.csv"
    assert run(["place", str(file), "--capacity", "64", "--alignment", "8", "--output", str(output), "--json"]) == 0
    offsets = json.loads(capsys.readouterr().out)["offsets"]
    assert output.read_text().splitlines()[0] == "id,lower,upper,size,offset"
    rows = [line.split(",") for line in output.read_text().splitlines()[1:]]
    assert {row[0]: int(row[4]) for row in rows} == offsets
    assert all(offset % 8 == 0 for offset in offsets.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,lower,upper,size\na,0,x,4\n", "line 2: the upper 'x' is not a whole number"),
        ("id,lower,upper,size\na,0,1,4\nb,0,1\n", "line 3: the row has not as many fields as the first line"),
        ("id,lower,upper,size\na,0,1,4,5\n", "line 2: the row has not as many fields as the first line"),
        ("id,lower,upper,size\na,3,3,4\n", "line 2: buffer a ends at 3, not after its begin at 3"),
        ("id,lower,upper,size\na,0,1,-4\n", "line 2: buffer a has the negative size -4"),
        ("id,lower,upper,size\na,0,1,4\na,0,1,4\n", "two buffers have the id a; each needs its own"),
        ("id,lower,size\na,0,4\n", "has no column upper; its first line must be id,lower,upper,size"),
        ("id,lower,upper,size,hint\na,0,1,4,5\n", "has the unknown column 'hint'"),
        ("", "has no column id"),
    ],
)
def test_a_wrong_file_is_one_line(file: Path, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    file.write_text(content)
    assert run(["place", str(file), "--capacity", "10"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"tightfit: {file}") or "two buffers" in said.err
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FILE", "--capacity", "much"], "'much' is not a size"),
        (["FILE", "--capacity", "10", "--seconds", "0"], "--seconds 0 is not a valid search time"),
        (["FILE", "--capacity", "10", "--alignment", "0"], "the alignment 0 is not a positive number"),
        (["FILE", "--capacity", "10", "--output", "FILE/x.csv"], "there is no folder"),
        (["FILE.nowhere", "--capacity", "10"], "there is no file"),
        (["FILE"], "--capacity"),
    ],
)
def test_a_wrong_argument_is_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["place", *(word.replace("FILE", str(file)) for word in arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_file_that_is_no_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(b"\xff\xfe\x00\x01")
    assert run(["place", str(file), "--capacity", "10"]) == 2
    assert "is not a text file" in capsys.readouterr().err
