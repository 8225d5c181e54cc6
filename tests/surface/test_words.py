"""The words that users read: what strangers stumbled over stands nowhere in the source, its templates and scripts, the documentation or the README.

Each row is a phrase of before, as a pattern, and what is written in its place. CHANGELOG.md and docs/log.md are history and keep theirs.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PHRASES = {
    # A step as a heading, a label, or the unit of a rate.
    r"(?<!\w)(?:adds|costs|saves|less) a step\b|[\"'>#]a step[\"'<]|\ba step (?:\{|takes \{|\d)|(?:[\d}] ?(?:[mµu]?s)?|\}) a step\b": "time per step",
    r"\bby a roofline\b|\ba roofline's\b": "(roofline estimate), once, in a footnote",
    r"\b(?:peak|room) on the card\b|\bcard ends here\b|[\"'>]on the card[\"'<]": "peak GPU memory; available to PyTorch; GPU capacity",
    r"[\"'>]at most[\"'<]|\(at most \{|\bat most, (?:as|in step)|\bleast that was reached\b": "upper bound; lowest peak found",
    r"\} choices\b|\bfits with \d+ choices\b|\bwith 1 choices\b|\bwhat is chosen\b|\bwhat else was considered\b": "4 techniques (20 places)",
    r"name=\"nothing\"|else \"nothing\",$": "no changes",
    r"\bas promised\b|\bchoices promised\b": "predicted, not verified; predicted X, simulated Y",
    r"\bare kept free\b|\bthe doubt about\b": "safety margin (uncertainty of the peak)",
    r"\bwas found to be faster\b|\band that is proven\b": "optimal under the cost model (predicted X, simulated Y)",
    r"\baround here a GiB\b|\ba GiB more (?:would )?saves?\b": "one more GiB would save; time saved per extra GiB",
    r"\bwith all that is allowed\b": "even with every allowed technique",
    r"\btrained numbers\b": "trainable parameters",
    r"\bwould leave (?:about \S+ \S+ )?allocated\b": "would reduce allocated memory from X to Y",
    r"\bunless that is\b|\bthat is meant\b|\bdel the name\b": "if unintended, `del` the variable",
    r"\bwho asked for\b|\bwho keeps pieces\b": "top allocation sites; allocations that pin segments",
    r"\bwhat holds it at the peak\b|\b(?:is )?held at the peak\b|\bwhat holds the card\b": "memory at the peak, by category",
    r"\bleft at its end\b": "still allocated after the step",
    r"\btruths as false\b|\b(?:is|are) taken as (?:1|one|finite|\{)|; taken as large": "is assumed to be",
    r"\border of frees and requests\b": "allocation order",
    r"\bmapped meanwhile\b|[\"']retries[\"']": "segments allocated during the recording; allocation retries",
    r"\bwhat memory is worth\b|\bcould do besides\b": "memory/time trade-off; other suggestions",
    r"[\"']over the run[\"']|\bblocks then\b": "total over the run; blocks at the peak",
    r"\bnobody uses\b": "reserved but unused",
    r"\bit takes (?:\d|\{\w+\}) steps\b": "needs 3 steps; this recording has 1",
    r"\bno operator is changed\b|\btrades calls of the driver\b": "costs extra driver calls",
    r"\bputs it on\b|\bwith (?:a|the|that) plan on it\b|\bput a plan on\b|\bplan on the model\b": "with the plan applied",
    r"\basked wrongly\b": "usage error",
    r"\bis told and not refused\b": "triggers a warning, not an error",
    r"\bcan be had\b": "usable 23.65 GiB",
    r"\bsaves -|keep=\[": "signed columns `memory` and `time`; keeps the outputs of `q_proj`, ...",
}
HISTORY = ("docs/log.md",)


def _pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder, endings in (
        ("src/tightfit", (".py", ".js", ".html", ".svg", ".css")),
        ("docs", (".md", ".txt", ".svg")),
    ):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in endings)


TEXTS = {
    name: path.read_text(encoding="utf-8") for path in _pages() if (name := str(path.relative_to(ROOT))) not in HISTORY
}


@pytest.mark.parametrize(("phrase", "better"), PHRASES.items(), ids=PHRASES.values())
def test_a_phrase_that_strangers_stumbled_over_is_written_nowhere(phrase: str, better: str) -> None:
    pattern = re.compile(phrase, flags=re.IGNORECASE | re.MULTILINE)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for name, text in TEXTS.items()
        for match in pattern.finditer(text)
    ]
    assert not found, f"write {better}"
