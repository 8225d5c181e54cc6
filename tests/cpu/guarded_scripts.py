"""Runs the text of a script in this process, plainly or guarded, with out-of-memory errors injected at operators of the script's own."""

import dataclasses
import functools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.guard import Failing

from tightfit.capture.targets.target_kinds import Script, run_script
from tightfit.guarding.loops.guarded_script import GuardedScript
from tightfit.planner.plan import Plan

# What the guard itself computes at the beginning of a step is not the script's.
_OWN = ("guarding/state/", "effects/")


@functools.cache
def _kind_of(code: CodeType) -> str:
    if code.co_filename.endswith(("train.py", "head.py")):
        return "script"
    return "guard" if code.co_name != "around_backward" and any(own in code.co_filename for own in _OWN) else ""


class FailingScript(Failing):
    """Counts the operators of the script alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        # The innermost frame that is the script's or the guard's; a backward pass of the script runs inside of what watches it.
        while frame is not None and (kind := _kind_of(frame.f_code)) != "script":
            if kind == "guard":
                return func(*args, **(kwargs or {}))
            frame = frame.f_back
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run ended with: values by name, printed text, counts of the guard, the error."""

    values: dict[str, Any]
    printed: str
    statistics: Counter[str]
    num_loops: int
    num_operators: int
    num_failures: int
    error: BaseException | None = None

    @property
    def notes(self) -> str:
        """The notes of the error."""
        return "\n".join(getattr(self.error, "__notes__", []))

    def is_same(self, other: "Outcome") -> bool:
        """Whether both ended alike, to the bit."""
        return self.printed == other.printed and _same(self.values, other.values)


class Scripts:
    """Runs scripts in a folder of their own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._capsys = capsys
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def write(self, text: str, name: str = "train.py") -> Path:
        """The file of the script."""
        path = self.folder / name
        path.write_text(text)
        return path

    def run(
        self,
        path: Path,
        *numbers: int,
        names: Sequence[str] = ("model", "losses"),
        guard: bool = True,
        plans: Sequence[Plan] = (),
    ) -> Outcome:
        """Runs it; its operators of these numbers fail. `names` are the variables whose values are compared."""
        script = Script(path=str(path), arguments=())
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        failing, error, found = FailingScript(*numbers), None, {}
        guarded = GuardedScript(str(path), plans, has_first=False, folder=self.folder) if guard else None
        try:
            with failing, failing.counting():
                if guarded is None:
                    found = dict(run_script(script))
                else:
                    with guarded.running() as compiled:
                        found = dict(run_script(script, compiled=compiled))
        except RuntimeError as raised:
            error = raised
        values = {name: _values(found[name]) for name in names if name in found}
        values["random"] = [torch.get_rng_state(), random.random(), float(np.random.rand())]
        return Outcome(
            values=values,
            printed=self._capsys.readouterr().out,
            statistics=Counter() if guarded is None else guarded.statistics,
            num_loops=0 if guarded is None else guarded.num_loops,
            num_operators=failing.num_operators,
            num_failures=failing.num_failures,
            error=error,
        )


def _values(value: Any) -> Any:
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return value.state_dict()
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
