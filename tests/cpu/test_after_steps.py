"""What comes after the steps asked for counts, or the verdict names it: evaluation, checkpoints, sampling, later stages of training."""

import ast
from pathlib import Path
from typing import Any

import pytest
from tests.cpu import ends_of_programs
from tests.cpu.after_steps_programs import (
    COUNTED,
    HELD_IN_NAMES,
    LARGE_BYTES,
    LEFT_EARLY,
    MODULE,
    NAMED,
    PLAIN,
    PRELUDE,
    WEIGHTS,
)

from tightfit import estimate
from tightfit.capture.after_steps import differing_batches
from tightfit.capture.after_steps.rewriting import SEEN, Branch, Rewriter
from tightfit.reports.results import Estimate
from tightfit.reports.verdicts import verdict_words

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

CARD = "RTX 4090"
NAMED_OF_ALL = {**NAMED, **ends_of_programs.NAMED}
PLAIN_OF_ALL = {**PLAIN, **ends_of_programs.PLAIN}


def estimated(folder: Path, program: str, *, prelude: str = PRELUDE, **settings: object) -> Estimate:
    script = folder / "train.py"
    script.write_text(prelude + program)
    (folder / "another.py").write_text(MODULE)
    return estimate(str(script), CARD, **settings)  # type: ignore[arg-type]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", COUNTED)
def test_what_follows_the_steps_is_in_the_peak(tmp_path: Path, name: str) -> None:
    if "transformers" in COUNTED[name]:
        pytest.importorskip("transformers", minversion="5")
        pytest.importorskip("accelerate")
    found = estimated(tmp_path, COUNTED[name])
    assert found.peak.allocated_bytes >= LARGE_BYTES
    steps = [span.peak_allocated_bytes for span in found.spans if span.kind == "step"]
    assert max(steps) + LARGE_BYTES // 2 < found.peak.allocated_bytes
    assert found.moment.span.startswith("after the steps")
    assert verdict_words(found)[0] == "fits"


@pytest.mark.parametrize("name", ends_of_programs.COUNTED)
def test_what_follows_a_generator_or_the_script_is_in_the_peak(tmp_path: Path, name: str) -> None:
    found = estimated(tmp_path, ends_of_programs.COUNTED[name])
    assert found.peak.allocated_bytes >= LARGE_BYTES
    assert verdict_words(found)[0] == "fits"


@pytest.mark.parametrize("name", NAMED_OF_ALL)
def test_what_is_not_reached_is_named_in_the_verdict(tmp_path: Path, name: str) -> None:
    program, words = NAMED_OF_ALL[name]
    found = estimated(tmp_path, program)
    assert verdict_words(found)[0] == "fits as far as seen"
    for word in words:
        assert word in found.coverage.words
    assert found.coverage.words in found.explain()


def test_a_line_that_the_program_never_came_to_is_named(tmp_path: Path) -> None:
    program = PLAIN["the loop ends by itself"] + "\n\ndef never_called() -> None:\n    print()\n"
    line = len((PRELUDE + program).splitlines())
    found = estimated(tmp_path, program, until=line)
    assert verdict_words(found)[0] == "fits as far as seen"
    # The program was not left anywhere: it ended.
    assert found.coverage.words.startswith("not reached: the line of --until at ")
    assert found.coverage.words.endswith(f"train.py:{line}")
    # The definition itself is reached.
    assert estimated(tmp_path, program, until=line - 1).coverage.stopped == "--until"


@pytest.mark.parametrize("name", PLAIN_OF_ALL)
def test_a_program_with_nothing_after_its_steps_just_fits(tmp_path: Path, name: str) -> None:
    found = estimated(tmp_path, PLAIN_OF_ALL[name])
    assert verdict_words(found)[0] == "fits"
    # What three steps need, to the byte.
    three = estimated(tmp_path, PLAIN["the loop ends by itself"])
    assert found.peak == three.peak
    assert [span.peak_allocated_bytes for span in found.spans if span.kind == "step"] == [
        span.peak_allocated_bytes for span in three.spans if span.kind == "step"
    ]


def test_what_names_hold_from_turn_to_turn_is_no_growth(tmp_path: Path) -> None:
    found = estimated(tmp_path, HELD_IN_NAMES)
    assert verdict_words(found)[0] == "fits"
    assert any("the loop was left after" in note.what for note in found.assumptions)


@pytest.mark.parametrize("name", LEFT_EARLY)
def test_a_loop_that_is_left_before_its_next_step_leaves_what_a_whole_turn_leaves(tmp_path: Path, name: str) -> None:
    def program(num_turns: int) -> str:
        end = "\nassert num_ended == 3, num_ended\nlast = [torch.empty(1 << 26, device='cuda') for _ in range(4)]\n"
        return LEFT_EARLY[name].replace("TURNS", str(num_turns)) + end

    found = estimated(tmp_path, program(100), prelude=WEIGHTS)
    by_itself = estimated(tmp_path, program(3), prelude=WEIGHTS)
    assert not found.coverage.stopped
    assert found.peak.allocated_bytes == by_itself.peak.allocated_bytes
    assert found.moment.span.startswith("after the steps")


EVALUATES = "[model(torch.ones(8, 64).cuda()).detach() for _ in range(5 * (number % 2))]"


@pytest.mark.parametrize(
    ("length", "before", "is_told"), [("8 + number", "", True), ("8", "", False), ("8", EVALUATES, False)]
)
def test_batches_that_differ_in_size_are_told(tmp_path: Path, length: str, before: str, is_told: bool) -> None:
    program = f"""
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(100):
    {before}
    loss = model(torch.ones({length}, 64).cuda()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = estimated(tmp_path, program, prelude="")
    told = [each.what for each in found.assumptions if each.what.startswith("batches differ in size from step to step")]
    assert bool(told) == is_told
    # They grow with the number of the step.
    assert (verdict_words(found)[0] == "fits as far as seen") == is_told
    if is_told:
        assert "those of the traced steps have 2.2 KiB to 2.8 KiB" in told[0]
        assert "larger batches at" in found.coverage.words
        assert "grow from 2.2 KiB to 2.8 KiB" in found.coverage.words


def test_batches_grow_from_the_smaller_size_to_the_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    # The two micro-batches of the first step have one size.
    steps = [differing_batches._Batch(4, 24), differing_batches._Batch(5, 18), differing_batches._Batch(7, 21)]
    monkeypatch.setattr(differing_batches, "_batches", lambda recorder: [steps])
    recorder: Any = None
    assert differing_batches.growing_batches(recorder).endswith("grow from 21 B to 24 B")


def test_conditional_expressions_keep_their_values_and_their_order() -> None:
    program = """
def f(x):
    done.append(x)
    return x

done = []
values = [f(1) if f(2) else f(3), f(0) and f(4), f(0) or f(5), f(1) and f(0) or f(6), (lambda: f(7) if f(0) else f(8))()]
values += [f(9) if f(0) else f(10) if f(0) else f(11), (n := f(12)) and f(n), [f(i) if i % 2 else None for i in range(3)]]
"""
    plain: dict[str, object] = {}
    exec(program, plain)
    branches: list[Branch] = []
    marked: dict[str, object] = {SEEN: (seen := bytearray(64))}
    exec(compile(Rewriter("m.py", [], branches).rewrite(ast.parse(program)), "m.py", "exec"), marked)
    assert (marked["values"], marked["done"]) == (plain["values"], plain["done"])
    unseen = [branch.condition for number, branch in enumerate(branches) if not seen[number]]
    assert unseen == ["unless f(2)", "if f(0)", "if f(0)", "if f(0)"]
