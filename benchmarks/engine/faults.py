"""What is left after a fault: a copy that raises or is interrupted at any place, threads that are gone, hooks that raise, forks, disks that are full or fail.

    python -m benchmarks.engine faults [--places 12] [--csv docs/engine/faults.csv]

Everything that the engine moves, to the host and to disk, real numbers on the host. After the fault each parameter is, with its optimizer states, as before the step or as
after it; the next steps are those of a plain run from there, or are refused with what was lost; once the plan is taken off training goes on; and nothing is left over.
"""

import contextlib
import csv
import dataclasses
import errno
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.engine.architectures import ResidualNet
from benchmarks.engine.growth import forget, held_now
from benchmarks.engine.ways import TIERS, WAYS, freeze
from tightfit.engine.copy_engines import HostCopies
from tightfit.engine.disk.disk_copies import DiskCopies
from tightfit.errors import TightfitError
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session

_CALLS = tuple(
    (owner, name)
    for owner in (HostCopies, DiskCopies)
    for name in ("begin", "wait", "finish", "move")
    if hasattr(owner, name)
)


# The exit code of a fork that is refused.
_IS_TOLD = 7


class FaultError(RuntimeError):
    """As a driver raises it."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """A model that is trained; `session` where a plan is on it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    session: Session | None = None

    def step(self, seed: int) -> None:
        """One step on the batch of this seed."""
        self.optimizer.zero_grad()
        self.backward(seed)
        self.optimizer.step()

    def backward(self, seed: int) -> None:
        """The passes of a step alone."""
        images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        nn.functional.cross_entropy(self.model(images), torch.arange(3)).backward()

    def values(self) -> list[tuple[torch.Tensor, ...]]:
        """Each parameter that is trained, with its states."""
        states = self.optimizer.state_dict()["state"]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return [
            (p.detach().clone(), *(v.clone() for v in states.get(at, {}).values() if isinstance(v, torch.Tensor)))
            for at, p in enumerate(trained)
        ]


def run_of(way: str, tier: str = "host", *, is_plain: bool = False) -> Run:
    """A small convolutional net, from the same beginning every time."""
    torch.manual_seed(0)
    model = ResidualNet(num_blocks=3, width=4)
    if way == "frozen weights":
        freeze(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run = Run(model=model, optimizer=optimizer)
    if not is_plain:
        run.session = apply_choices(WAYS[way](model, tier), model, [optimizer])
    return run


def same(one: list[tuple[torch.Tensor, ...]], other: list[tuple[torch.Tensor, ...]]) -> bool:
    """Whether all values are equal, to the bit."""
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def failing_at(number: int, error: type[BaseException]) -> Iterator[list[int]]:
    """The `number`-th call of the copies, of whatever kind and in whatever thread, raises; the list has how many calls there were."""
    calls = [0]

    def counted(kept: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise error("injected")
            return kept(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for owner, name in _CALLS:
            patches.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield calls


@contextmanager
def threads_gone() -> Iterator[None]:
    """Nothing can be given to a thread any more."""

    def submit(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    # A mock would keep what it was called with.
    with mock.patch("concurrent.futures.ThreadPoolExecutor.submit", submit):
        yield


@contextmanager
def disk_fails(call: str, code: int) -> Iterator[None]:
    """Every write (`pwritev`) or read (`preadv`) fails."""
    with mock.patch.object(os, call, side_effect=OSError(code, os.strerror(code))):
        yield


def after_fault(way: str, tier: str, fault: contextlib.AbstractContextManager[Any]) -> str:
    """What a fault in the third step leaves: one of the sentences that the table counts, those that begin with a capital letter being wrong."""
    before, after = (_plain_values(way, num_steps) for num_steps in (2, 3))
    run = run_of(way, tier)
    assert run.session is not None
    for seed in range(2):
        run.step(seed)
    raised = _raised(lambda: run.step(2), fault)
    try:
        found = run.values()
    except TightfitError as error:
        return f"a state is lost, and said to be ({_first_words(error)})" if _says_what(error) else f"LOST: {error}"
    updated = [[_equal(value, values[at]) for values in (before, after)] for at, value in enumerate(found)]
    if not all(any(each) for each in updated):
        return "TORN: a parameter is neither as before the step nor as after it, or its states are not"
    state = (
        "all updated"
        if all(each[1] for each in updated)
        else "none updated"
        if all(each[0] for each in updated)
        else "some updated"
    )
    how = "no error" if raised is None else "an error"
    if isinstance(raised, TightfitError):
        how = "refused"
    later = _later(run, way, state)
    return f"{how}, {state}, {later}"


def _later(run: Run, way: str, state: str) -> str:
    try:
        run.step(3)
        outcome = "the next step is right"
        if state != "some updated" and not same(
            run.values(), _plain_values(way, 3 if state == "all updated" else 2, then=3)
        ):
            return "THE NEXT STEP IS WRONG"
    except TightfitError as error:
        outcome = "the next step is refused"
        if not _says_what(error):
            return f"REFUSED WITHOUT A REASON: {error}"
    assert run.session is not None
    run.session.undo()
    run.step(4)
    return outcome


def _raised(act: Callable[[], None], fault: contextlib.AbstractContextManager[Any]) -> BaseException | None:
    with fault:
        try:
            act()
        except (FaultError, KeyboardInterrupt, TightfitError, OSError, RuntimeError) as error:
            # What its frames refer to would be views that the program holds.
            traceback.clear_frames(error.__traceback__)
            return error
    return None


def _equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _says_what(error: TightfitError) -> bool:
    return any(
        word in str(error) for word in ("not lost", "is lost", "load the last checkpoint", "incomplete", "damaged")
    )


def _first_words(error: TightfitError) -> str:
    return " ".join(str(error).split()[:6])


def _plain_values(way: str, num_steps: int, then: int | None = None) -> list[tuple[torch.Tensor, ...]]:
    key = (way == "frozen weights", num_steps, then)
    if key not in _PLAIN:
        plain = run_of(way, is_plain=True)
        for seed in (*range(num_steps), *(() if then is None else (then,))):
            plain.step(seed)
        _PLAIN[key] = plain.values()
    return _PLAIN[key]


_PLAIN: dict[tuple[bool, int, int | None], list[tuple[torch.Tensor, ...]]] = {}


def num_calls(way: str, tier: str) -> int:
    """How often the copies are called in the third step."""
    run = run_of(way, tier)
    for seed in range(2):
        run.step(seed)
    with failing_at(-1, FaultError) as calls:
        run.step(2)
    return calls[0]


def after_hook(way: str, tier: str, where: str) -> str:
    """What a hook of the program's that raises in a pass leaves, beside what it leaves in a plain run."""

    def fail(*_: Any) -> None:
        raise FaultError("of the program")

    found = []
    for run in (run_of(way, is_plain=True), run_of(way, tier)):
        run.step(0)
        block: Any = run.model.get_submodule("blocks.1")
        hooked = {
            "forward": lambda block=block: block.register_forward_hook(fail),
            "backward": lambda block=block: block.register_full_backward_hook(fail),
            "gradient": lambda block=block: block.norm_1.weight.register_post_accumulate_grad_hook(fail),
        }[where]()
        with contextlib.suppress(FaultError):
            run.step(1)
        hooked.remove()
        # What is half done is added to.
        run.backward(2)
        run.optimizer.step()
        run.step(3)
        found.append(run.values())
    return "as in a plain run" if same(*found) else "OTHER THAN IN A PLAIN RUN"


def after_fork(way: str, tier: str) -> str:
    """Whether a fork and its parent both train on as plain runs."""
    run = run_of(way, tier)
    for seed in range(2):
        run.step(seed)
    pid = os.fork()
    if not pid:
        is_right = False
        try:
            run.step(2)
            is_right = same(run.values(), _plain_values(way, 3))
        except TightfitError as error:
            os._exit(_IS_TOLD if "a forked process" in str(error) else 1)
        finally:
            os._exit(0 if is_right else 1)
    child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    run.step(2)
    parent = same(run.values(), _plain_values(way, 3))
    if parent and child == _IS_TOLD:
        return "the parent trains on, and the fork is told that it cannot"
    return "both train on" if parent and child == 0 else f"PARENT {parent}, CHILD {child}"


def outcomes(way: str, tier: str, num_places: int) -> Iterator[tuple[str, str]]:
    """Each fault of a way of moving with what it leaves; of copies, at so many places of a step."""
    total = num_calls(way, tier)
    for error in (FaultError, KeyboardInterrupt):
        for number in range(1, total + 1, max(1, total // num_places)):
            name = "a copy raises" if error is FaultError else "Ctrl-C in a copy"
            yield name, after_fault(way, tier, failing_at(number, error))
    yield "threads are gone", after_fault(way, tier, threads_gone())
    for where in ("forward", "backward", "gradient"):
        yield f"a {where} hook raises", after_hook(way, tier, where)
    yield "a fork", after_fork(way, tier)
    if tier == "disk":
        yield "the disk is full", after_fault(way, tier, disk_fails("pwritev", errno.ENOSPC))
        yield "the disk cannot be read", after_fault(way, tier, disk_fails("preadv", errno.EIO))


def faults(num_places: int, path: Path | None) -> int:
    """Prints how often each fault of each way left what, and writes it to `path`; how many were wrong."""
    torch.set_num_threads(1)
    rows: list[tuple[str, str, str, str, int]] = []
    for way in WAYS:
        for tier in TIERS:
            forget()
            before = held_now()
            found = Counter(outcomes(way, tier, num_places))
            forget()
            left = held_now()
            outcome = "nothing is left over" if left == before else f"LEFT OVER: {left}, {before}"
            found["all of them together", outcome] = 1
            for (fault, outcome), count in sorted(found.items()):
                rows.append((way, tier, fault, outcome, count))
                print(f"{way:15} {tier:5} {fault:24} {count:3} x {outcome}", flush=True)
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["moved", "tier", "fault", "outcome", "places"])
            writer.writerows(rows)
    return sum(count for *_, outcome, count in rows if is_wrong(outcome))


def is_wrong(outcome: str) -> bool:
    """Whether an outcome has a word in capitals."""
    return any(word.isupper() and len(word) > 1 for word in outcome.replace(":", " ").split())
