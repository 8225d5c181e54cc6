"""Every block of the documentation is tried: commands are parsed, programs and files exist, Python runs or is at least what the library takes.

A block of a kind that is not known here, or a line of a shell block that starts a program not known here, fails: then this file is to learn it.
"""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tightfit
from tightfit.cli.main import app
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.layouts.answers.layout_costs import price_of
from tightfit.placement.buffers import read_problem
from tightfit.watch.alerts.alert_rules import KINDS, read_alerts

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("tests/**/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block between fences: its language, empty where none is given, and its text."""

    page: str
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=str(page.relative_to(ROOT)),
            line=text[: found.start()].count("\n") + 1,
            language=found[2],
            text=found[3],
        )
        for found in _FENCE.finditer(text)
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> list[Any]:
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in BLOCKS if b.language in languages]


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command line: all lines of a shell block; those after `$ `, or of a program, where the block shows output or names none."""
    lines = [line.strip() for line in block.text.replace("\\\n", " ").splitlines()]
    if block.language != "sh":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith(("$ ", "python -m ", "make "))]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_command(words: list[str]) -> None:
    """Fails where the command is none that the program, the Makefile or the project takes."""
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "tightfit":
        app.parse_args(rest, exit_on_error=False, print_error=False)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), words
    elif program == "pip":
        extras = {extra for text in re.findall(r"\[([\w,]+)\]", " ".join(rest)) for extra in text.split(",")}
        assert rest[0] == "install" and extras <= set(PROJECT["optional-dependencies"]), words
    elif program == "python" and rest[0] == "-m":
        check_module(rest[1], [word for word in rest[2:] if word.startswith("--")])
    elif program == "python":
        assert (ROOT / rest[0]).exists(), words
    else:
        pytest.fail(f"{program} is not known here: {' '.join(words)}")


def check_module(name: str, options: list[str]) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    if name.startswith("benchmarks."):
        # A package's options are in its __main__; none of them is started here, which would take minutes.
        folder = Path(spec.origin).parent if spec.submodule_search_locations else None
        texts = [file.read_text(encoding="utf-8") for file in (folder.glob("*.py") if folder else [Path(spec.origin)])]
        for option in options:
            assert any(f'"{option}"' in text for text in texts), f"{name} {option}"


def names_in(tree: ast.Module) -> list[tuple[str, ast.Attribute, ast.Call | None]]:
    """Dotted names of torch and of tightfit, with the call of each where it is called."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"(torch|tightfit)(\.\w+)+", dotted):
            found.append((dotted, node, calls.get(id(node))))
    return found


def resolve(dotted: str) -> Any:
    root, *rest = dotted.split(".")
    value = importlib.import_module(root)
    for number, name in enumerate(rest, 1):
        # A module of a package that nothing has imported so far is no attribute of it.
        if not hasattr(value, name):
            importlib.import_module(".".join((root, *rest[:number])))
        value = getattr(value, name)
    return value


def test_all_blocks_are_of_a_kind_that_is_tried() -> None:
    assert {block.language for block in BLOCKS} <= {"sh", "python", "toml", "yaml", ""}
    assert sum(block.language == "sh" for block in BLOCKS) > 25
    assert sum(block.language == "python" for block in BLOCKS) > 10


@pytest.mark.parametrize("block", of("sh", ""))
def test_commands_are_ones_that_can_be_given(block: Block) -> None:
    commands = commands_of(block)
    assert commands or block.language != "sh"
    for words in commands:
        check_command(words)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_commands_in_the_head_of_an_example(example: Path) -> None:
    head = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))) or ""
    # After a question, before a remark, or both.
    commands = [
        found[1]
        for line in head.splitlines()
        if (found := re.search(r"(?:^|\s)((?:tightfit|python) .*?)(?:\s{2,}|$)", line.strip()))
    ]
    assert commands
    for command in commands:
        check_command(shlex.split(command))


@pytest.mark.parametrize("block", of("python"))
def test_python_is_what_the_library_takes(block: Block) -> None:
    """It compiles, each name of torch and tightfit is there, and their functions take the arguments that are given."""
    text = "".join(line + "\n" for line in block.text.splitlines() if not line.startswith("%"))
    for dotted, _, call in names_in(ast.parse(text)):
        value = resolve(dotted)
        if call is not None and dotted.startswith("tightfit."):
            keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            inspect.signature(value).bind(*call.args, **keywords)
    for line in block.text.splitlines():
        if line.startswith("%tightfit "):
            check_command(shlex.split(line.removeprefix("%")))


SCRIPT = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# What the text around a block has already. One that needs a card, a notebook or a package that is not installed is not run.
GIVEN = {
    "README.md": "",
    "docs/guide/estimate.md": "",
    "docs/guide/plan.md": "",
    "docs/guide/record.md": "import torch, tightfit\ndef train(): torch.ones(3).sum()\n",
    "docs/guide/targets.md": "import torch\nfrom torch.nn import Linear\ndef Model(): return Linear(224, 8)\n",
}


@pytest.mark.parametrize("page", GIVEN)
def test_python_runs_as_it_is_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    text = next(block.text for block in BLOCKS if block.page == page and block.language == "python")
    if page == "docs/guide/targets.md":
        (tmp_path / "mine.py").write_text(GIVEN[page] + text)
        assert tightfit.estimate("mine.py:workload", "RTX 4090", parameters=["batch_size=2"]).fits
        return
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(GIVEN[page] + text, page, "exec"), {})
    assert said.getvalue().strip() or "print(" not in text


def test_the_figures_of_a_card_and_a_calibration_are_read(tmp_path: Path) -> None:
    blocks = [block for block in BLOCKS if block.language == "toml"]
    for number, block in enumerate(blocks):
        tables = tomllib.loads(block.text)
        file = tmp_path / f"{number}.toml"
        file.write_text(block.text)
        if "capacity_bytes" in tables:
            assert find(file).name == tables["name"]
        elif "rule" in tables:
            assert {rule.kind for rule in read_alerts(file).rules} == set(KINDS)
        elif "schema" in tables:
            assert Calibration.load(file).device == tables["device"]
        elif "per_node_hour" in tables:
            assert price_of(str(file), node_of(find("H100"), "p5.48xlarge"), "an H100").amount > 0
            assert price_of(str(file), node_of(find("H200")), find("H200").name).is_per_gpu
        elif "card" in tables:
            pass  # of the tutorial, tried in test_tutorials.py
        else:
            assert set(tables["project"]["entry-points"]) <= {"tightfit.techniques", "tightfit.reports"}


def test_a_workflow_gives_commands_that_can_be_given() -> None:
    texts = [block.text for block in BLOCKS if block.language == "yaml"]
    commands = re.findall(r"run: (tightfit .*)", "".join(texts))
    assert commands
    for command in commands:
        check_command(shlex.split(command.split(" > ")[0]))


def test_a_problem_of_placement_is_read(tmp_path: Path) -> None:
    (text,) = (block.text for block in BLOCKS if block.text.startswith("id,"))
    (tmp_path / "buffers.csv").write_text(text)
    assert len(read_problem(tmp_path / "buffers.csv").buffers) == 3
