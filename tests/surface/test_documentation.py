"""The documentation keeps up: its links lead somewhere, its counts are right; its blocks are tried in `test_documentation_blocks.py`."""

import re
from pathlib import Path

import pytest

from tightfit.devices.catalogue import all_devices

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings], target


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_the_number_of_cards(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"(\d+) (?:of them|cards)", text)] == [len(all_devices())]


def test_the_picture_loads_nothing_from_elsewhere() -> None:
    picture = (ROOT / "docs/images/estimate.svg").read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"' )]+", picture) == ["http://www.w3.org/2000/svg"]
