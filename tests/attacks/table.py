"""The verdicts as tables in docs/exactness.md: python -m tests.attacks.table writes what lies between the page's markers."""

import concurrent.futures
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from tests.attacks.harness import Outcome, Verdict, run
from tests.attacks.places import VARIANTS
from tests.attacks.registry import KINDS, Attack, attacks

Verdicts = Mapping[str, Mapping[str, Verdict]]
PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
BEGIN, END = "<!-- attacks: begin -->", "<!-- attacks: end -->"
CODES = {
    "checkpointing": "C",
    "checkpointing, all but the last": "Cf",
    "selective checkpointing": "Cs",
    "nested checkpointing": "Cn",
    "sequential checkpointing": "Cq",
    "offloaded checkpointing": "Co",
    "offloaded checkpointing, selective": "Cp",
    "activation offload": "Oa",
    "weight streaming": "Ow",
    "trained weight streaming": "Ot",
    "activation offload, partly": "Op",
    "tiled tokens": "T",
    "tiled convolutions": "Tc",
    "chunked loss, gradients in forward": "Lf",
    "chunked loss, gradients in backward": "Lb",
    "attention": "A",
    "micro-batches": "M",
    "update in backward": "U",
    "update in backward, clips": "Uc",
    "optimizer kernel": "K",
    "zero_grad": "Z",
    "empty_cache": "E",
    "8-bit states": "S",
    "8-bit states in backward": "Su",
    "optimizer offload": "Os",
    "optimizer offload in backward": "Ou",
    "optimizer offload on the host": "Oh",
    "8-bit states at the host": "Sh",
    "pure bf16": "B",
}
MARKS = {
    Outcome.RIGHT: "✓",
    Outcome.REFUSED: "r",
    Outcome.NO_PLACE: "",
    Outcome.WRONG: "**wrong**",
    Outcome.CRASHED: "**crashed**",
}


def tables(verdicts: Verdicts) -> str:
    """All tables, one for each kind of attack; what there are no verdicts on is as the page has it."""
    return "\n".join(_lines(verdicts))


def marks_on_page() -> dict[str, dict[str, str]]:
    """What the page says of each program, by the line that tells what it does, with each technique."""
    rows = [[cell.strip() for cell in line.split(" | ")] for line in on_page().splitlines() if line.startswith("| ")]
    if not rows:
        return {}
    # By the codes above the columns: the page may be older than the last technique.
    name_of = {code: name for name, code in CODES.items()}
    names = [name_of.get(code, code) for code in rows[0][1:-1]]
    return {cells[0].removeprefix("| "): dict(zip(names, cells[1:], strict=False)) for cells in rows}


def counts_of_rows(text: str) -> Counter[Outcome]:
    """How often each mark stands in the rows of a page's tables."""
    cells = [cell.strip() for line in text.splitlines() for cell in line.split("|")[2:-2] if line.startswith("| ")]
    return Counter({outcome: cells.count(mark) for outcome, mark in MARKS.items() if mark})


def summary(num_programs: int, counts: Counter[Outcome]) -> str:
    """The line above the tables."""
    return (
        f"{num_programs} programs, {counts.total() - counts[Outcome.NO_PLACE]:,} pairs of program and technique: {counts[Outcome.RIGHT]:,} right, "
        f"{counts[Outcome.REFUSED]:,} refused, {counts[Outcome.WRONG]:,} wrong, {counts[Outcome.CRASHED]:,} crashed."
    )


def verdicts_of(names: Sequence[str], variants: Sequence[str] = tuple(VARIANTS)) -> Verdicts:
    """The verdicts on attacks with each technique, by name, found by as many processes as there are processors."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        found = pool.map(_verdicts_of_one, names, itertools.repeat(variants), chunksize=4)
        return dict(zip(names, found, strict=True))


def _verdicts_of_one(name: str, variants: Sequence[str]) -> dict[str, Verdict]:
    torch.set_num_threads(1)
    return {variant: run(attacks()[name], variant) for variant in variants}


def on_page() -> str:
    """The tables as the page has them."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def _lines(verdicts: Verdicts) -> Iterator[str]:
    rows = _rows(verdicts)
    yield summary(len(rows), counts_of_rows("\n".join(rows.values())))
    yield ""
    yield "Techniques: " + ", ".join(f"{code} {name}" for name, code in CODES.items()) + "."
    for kind, title in KINDS.items():
        yield from ("", f"### {title}", "")
        yield "| program | " + " | ".join(CODES[name] for name in VARIANTS) + " | a refusal says |"
        yield "|---|" + "---|" * len(VARIANTS) + "---|"
        yield from (rows[name] for name, attack in attacks().items() if attack.kind == kind)


def _rows(verdicts: Verdicts) -> dict[str, str]:
    """The row of each attack by name; as the page has it where there are no verdicts on it."""
    marks = marks_on_page()
    said = {
        line.removeprefix("| ").partition(" | ")[0]: line.removesuffix(" |").rpartition(" | ")[2]
        for line in on_page().splitlines()
        if line.startswith("| ")
    }
    return {
        name: row(attack, verdicts.get(name, {}), marks.get(attack.what, {}), said.get(attack.what, "").strip())
        for name, attack in attacks().items()
    }


def row(attack: Attack, verdicts: Mapping[str, Verdict], on_page: Mapping[str, str], said: str = "") -> str:
    """The row of an attack, with its verdicts by technique; the others are `on_page`, with what a refusal has `said` there."""
    reasons = [verdict.reason for verdict in verdicts.values() if verdict.outcome is Outcome.REFUSED]
    is_whole = all(name in verdicts for name in VARIANTS)
    if is_whole or not said:
        said = reasons[0].replace("|", "\\|") if reasons else ""
    marks = (MARKS[verdicts[name].outcome] if name in verdicts else on_page.get(name, "") for name in VARIANTS)
    return f"| {attack.what} | {' | '.join(marks)} | {said} |"


def write(verdicts: Verdicts) -> None:
    """Writes the tables into the page."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{tables(verdicts)}\n\n{END}{tail}")


if __name__ == "__main__":
    write(verdicts_of(list(attacks())))
