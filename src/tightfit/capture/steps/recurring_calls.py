"""Calls of a model without gradients that are part of every turn of a training loop: a teacher, a reference model, an encoder that is frozen.

Between two steps they look like an evaluation at first. What comes before each step but the first, at the same lines, is a part of the steps: their
seconds and their memory are those of the turn.
"""

from collections.abc import Callable, Sequence

from tightfit.capture.observe.recorder import Recorder
from tightfit.tape import SpanKind

Span = tuple[str, SpanKind, int, int]
REPEATED = "(repeated)"
"""How the name of an operator ends that stands for a call which was answered, and not traced."""


def merge_recurring_calls(recorder: Recorder) -> None:
    """Makes calls that are a part of each turn a part of the steps that were traced."""
    spans, names = recorder.spans, recorder.operators["name"]
    ends = [*(first for *_, first in spans[1:]), recorder.num_operators]

    def is_whole(number: int) -> bool:
        of_span = set(names[spans[number][3] : ends[number]])
        return not any(recorder.strings.texts[int(name)].endswith(REPEATED) for name in of_span)

    spans[:] = with_recurring_calls(spans, is_whole)


def with_recurring_calls(spans: Sequence[Span], is_whole: Callable[[int], bool]) -> list[Span]:
    """The spans, where those between two steps that come before every step have become a part of the step that they precede.

    `is_whole` says of a span, by its number, whether all that it did was traced: a loop of an evaluation that was cut short would give a part of its seconds.
    """
    before = _spans_before_steps(spans)
    if len(before) < 2:
        return list(spans)
    first, *later = before.items()
    recurring = set.intersection(*({spans[n][0] for n in numbers} for _, numbers in later))
    recurring -= {spans[n][0] for _, numbers in (first, *later) for n in numbers if not is_whole(n)}
    merged: dict[int, int] = {}
    for step, numbers in before.items():
        for number in reversed(numbers):
            if spans[number][0] not in recurring:
                break
            merged[step] = number
    dropped = {n for step, begin in merged.items() for n in range(begin, step)}
    return [
        (*span[:2], *spans[merged[number]][2:]) if number in merged else span
        for number, span in enumerate(spans)
        if number not in dropped
    ]


def _spans_before_steps(spans: Sequence[Span]) -> dict[int, list[int]]:
    """By the number of each step's span, those of what is outside of steps right before it."""
    found: dict[int, list[int]] = {}
    waiting: list[int] = []
    for number, (_, kind, *_) in enumerate(spans):
        if kind == SpanKind.STEP:
            found[number] = waiting
        waiting = [*waiting, number] if kind == SpanKind.ASIDE else []
    return found
