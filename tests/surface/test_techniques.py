"""`tightfit techniques`: every technique with its page, the keys of the JSON, torch or not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.cli.main import run
from tightfit.cli.techniques import Entry, entries

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/guide/techniques"
KEYS = {"name", "exact", "exactness", "trades", "page", "defined_in"}


@pytest.fixture(scope="module")
def listed() -> list[Entry]:
    return entries()


def test_each_technique_has_a_page_of_its_own(listed: list[Entry]) -> None:
    for entry in listed:
        if entry.page is not None:
            page = (ROOT / entry.page).read_text(encoding="utf-8")
            assert page.startswith(f"# {entry.name}\n"), entry.name
            # A page says of itself what the plan goes by.
            assert entry.exact or "lossy" in page.lower(), entry.name


def test_each_page_is_of_a_technique_and_in_the_index(listed: list[Entry]) -> None:
    pages = {page.name for page in PAGES.glob("*.md")} - {"README.md"}
    assert pages == {f"{entry.name}.md" for entry in listed if entry.page is not None}
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+\.md)\)", index)) == sorted(pages)


def test_each_says_in_a_sentence_what_it_trades(listed: list[Entry]) -> None:
    for entry in listed:
        assert re.fullmatch(r"[A-Z].{15,160}\.", entry.trades), entry.name
        assert entry.exactness.startswith("lossy: ") is not entry.exact, entry.name


def test_as_json(listed: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["techniques", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == 1
    assert [set(technique) for technique in answer["techniques"]] == [KEYS] * len(listed)
    by_name = {technique["name"]: technique for technique in answer["techniques"]}
    assert by_name["checkpointing"]["page"] == "docs/guide/techniques/checkpointing.md"
    assert by_name["checkpointing"]["exact"]
    assert not by_name["low_bit_states"]["exact"]


def test_as_text_within_120_columns(listed: list[Entry], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["techniques"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if re.match(r"\w+ +(exact|lossy) ", line)] == [
        [entry.name, "exact" if entry.exact else "lossy"] for entry in listed
    ]
    assert max(map(len, lines)) <= 120


def test_the_list_needs_no_torch(listed: list[Entry]) -> None:
    program = "import sys; sys.modules['torch'] = None; from tightfit.cli.main import run; sys.exit(run(['techniques', '--json']))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [technique["name"] for technique in json.loads(answer.stdout)["techniques"]] == [
        entry.name for entry in listed
    ]
