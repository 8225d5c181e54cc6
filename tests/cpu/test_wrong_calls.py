"""Wrong arguments of the library are the caller's: a line that says what is asked for, and no fault of ours."""

from pathlib import Path

import pytest
from tests.plans import a_plan

import tightfit
from tightfit.errors import UsageError

torch = pytest.importorskip("torch")


def test_a_target_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        tightfit.estimate(tmp_path / "train.py", "RTX 4090")
    with pytest.raises(UsageError, match="there is no file"):
        tightfit.plan(tmp_path / "train.py", "RTX 4090")


@pytest.mark.parametrize("target", [3, None, Path])
def test_what_is_no_target_is_said(target: object) -> None:
    for function in (tightfit.estimate, tightfit.plan):
        with pytest.raises(UsageError, match=r"give the name of what runs, such as 'train\.py'"):
            function(target, "RTX 4090")  # type: ignore[arg-type]


def test_a_function_is_given_by_its_file_and_name() -> None:
    scope: dict[str, object] = {}
    exec(compile("def train():\n    yield", "/tmp/ipykernel_1/2.py", "exec"), scope)
    for target, said in (
        (scope["train"], "%%writefile work.py as the first line of its cell), and give 'work.py:train'"),
        (test_a_target_may_be_a_path, "test_wrong_calls.py:test_a_target_may_be_a_path'"),
        (lambda: 1, "such as 'train.py:workload'"),
    ):
        with pytest.raises(UsageError, match="the target is a function: give the name of what runs") as error:
            tightfit.estimate(target, "RTX 4090")  # type: ignore[arg-type]
        assert str(error.value).endswith(said)


def test_an_argument_that_there_is_not_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepz'"):
        tightfit.estimate("train.py", "RTX 4090", stepz=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        tightfit.plan("train.py")  # type: ignore[call-arg]


def test_what_a_plan_cannot_be_applied_to_is_said() -> None:
    with pytest.raises(UsageError, match=r"not a Plan; tightfit.Plan.load\(FILE\) reads one"):
        tightfit.apply("plan.json", torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a dict, not a Plan"):
        tightfit.apply({}, torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a str, not a Module"):
        tightfit.apply(a_plan(), "model")  # type: ignore[arg-type]


def test_a_command_that_a_package_installed_is_told_by_its_module(tmp_path: Path) -> None:
    for text in ("pytest", str(tmp_path / "pytest")):
        with pytest.raises(
            UsageError,
            match=r"give the module that it runs \(-m _pytest\S*\), or a script with the line: from ",
        ):
            tightfit.estimate(text, "RTX 4090")
        (tmp_path / "pytest").write_text("#!/usr/bin/python\n")
    (tmp_path / "train").write_text("#!/usr/bin/env python3\nprint()\n")
    with pytest.raises(UsageError, match=r"is a Python script without the ending .*: copy it to train\.py"):
        tightfit.estimate(tmp_path / "train", "RTX 4090")
