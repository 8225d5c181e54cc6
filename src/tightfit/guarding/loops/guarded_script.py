"""Runs an unmodified script with its training loops guarded: `tightfit run --guard`."""

import builtins
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from tightfit.errors.ends import end_all, ended_by
from tightfit.guarding.attempts import Attempts
from tightfit.guarding.loops.find_loops import GuardedProgram, training_loops
from tightfit.guarding.loops.framework_steps import STEPS, run_framework_step
from tightfit.guarding.loops.guarded_loops import LoopGuard
from tightfit.guarding.loops.outside_effects import OutsideEffects
from tightfit.guarding.loops.rewrite_loops import GUARD, rewrite
from tightfit.guarding.loops.script_models import ScriptModels
from tightfit.guarding.memory.ballast import Ballast
from tightfit.guarding.memory.out_of_memory import is_out_of_memory
from tightfit.guarding.plan_on_model import Put
from tightfit.guarding.rungs import CALM_STEPS, Rungs
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import apply
from tightfit.torch_hooks.calls import StepOwner, on_new_optimizer, on_outermost_call, on_training_step
from tightfit.torch_hooks.manifest import Name
from tightfit.torch_hooks.replaced import Leave


class GuardedScript(StepOwner):
    """The guard of one script, which finds what it imports in `imports_from`, by default its own folder. `plans` are tried in turn, each applied by `put`; the first of them is on already, where `has_first`.

    `is_found` is whether the script has a training loop that can be guarded; `statistics` counts steps, errors, replays.
    """

    def __init__(
        self,
        path: str,
        plans: Sequence[Plan],
        *,
        has_first: bool,
        folder: Path,
        imports_from: Path | None = None,
        put: Put = apply,
        calm_steps: int = CALM_STEPS,
        ballast_bytes: int = 0,
    ) -> None:
        self._program = GuardedProgram.of(Path(path), imports_from)
        self._models = ScriptModels()
        rungs = Rungs(
            plans,
            self._models.planned,
            self._models.optimizers_of_planned,
            first=self._models.session,
            has_first=has_first,
            put=put,
            calm_steps=calm_steps,
        )
        self._attempts = Attempts(
            None,
            self._models.optimizers,
            rungs=rungs,
            folder=folder,
            models=self._models.all,
            ballast=Ballast(ballast_bytes, _current_card, calm_steps=calm_steps),
        )
        self._guard = LoopGuard(self._attempts, OutsideEffects())
        self._frameworks: dict[Name, Leave] = {}

    @property
    def statistics(self) -> Counter[str]:
        """Counts of steps, errors and replays."""
        return self._attempts.statistics

    @property
    def num_loops(self) -> int:
        """How many loops were guarded, in the files that were loaded, and of the frameworks that were imported."""
        return len(self._guard.names) + len(self._frameworks)

    @contextmanager
    def running(self) -> Iterator[Callable[[bytes, str], CodeType | None]]:
        """While a script runs; gives what makes code of its source. An out-of-memory error outside of the loops leaves a post-mortem as well."""
        plain = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            path = loader.get_filename(fullname)
            code = self._compiled(loader.get_data(path), path) if self._is_own(path) else None
            return plain(loader, fullname) if code is None else code

        with ExitStack() as leaves, ended_by(self._guard.effects.end, leaves.close, self._attempts.end):
            leaves.callback(on_new_optimizer(self))
            leaves.callback(on_outermost_call(self))
            leaves.callback(lambda: end_all(*self._frameworks.values()))
            setattr(builtins, GUARD, self._guard)
            leaves.callback(delattr, builtins, GUARD)
            SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
            leaves.callback(setattr, SourceFileLoader, "get_code", plain)
            self._guard.effects.begin()
            try:
                yield self._compiled
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error) and not any("tightfit:" in n for n in getattr(error, "__notes__", ())):
                    why = "the error was raised outside of the turns of a training loop"
                    self._attempts.post_mortem.added_to(error, step=self._attempts.num_steps, tried=[], why=why)
                raise

    def after_optimizer_was_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Its steps are covered from the next turn on."""
        self._models.made(optimizer)
        # A script imports its framework late, but before its trainer makes an optimizer.
        for name in STEPS:
            if name.module in sys.modules and name not in self._frameworks:
                self._frameworks[name] = on_training_step(name, self)

    def around_training_step(self, owner: Any, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """The passes that a framework makes for a batch; within a turn of the script's own loop they are that turn's."""
        if self._attempts.is_running:
            return call()
        (name,) = (name for name in self._frameworks if isinstance(owner, name.holder()))
        return run_framework_step(self._attempts, self._guard.effects, STEPS[name](owner, arguments), call)

    def before_outermost_call(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The models of the script are those that it calls."""
        self._models.called(module)

    def _is_own(self, path: str) -> bool:
        return os.path.realpath(path) in self._program.trees

    def _compiled(self, source: bytes, path: str) -> CodeType | None:
        """The code of a file with its training loops guarded; None if it has none."""
        real = os.path.realpath(path)
        loops = training_loops(self._program, real)
        if not loops:
            return None
        tree = self._program.trees[real]
        names = rewrite(tree, loops, first=len(self._guard.names))
        try:
            code = compile(tree, path, "exec", dont_inherit=True)
        except SyntaxError:
            # Python says it of the file itself, or runs it unguarded.
            return None
        self._guard.names += names
        return code


def _current_card() -> torch.device | None:
    """The GPU that the script uses, once it uses one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
