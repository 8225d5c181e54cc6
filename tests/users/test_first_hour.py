"""The first hour of five users, command by command at a terminal: the exit code, the first line that each shows, and that their files stay as they are.

Their programs are in the folder beside; models are tiny and made from configs. What is said of memory is tested elsewhere: here it is read.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.driver import browser
from tests.users.terminal import Shown, typed

from tightfit.units import MIB, parse

PROGRAMS = Path(__file__).parent / "programs"
SIZE = r"[\d.]+ [GM]iB"
# What only the program itself, or Python, calls so.
PRIVATE = re.compile(r"Traceback|site-packages|\b(None|nan|aten)\b|, other, ")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the programs and a log of an earlier run. A command changes nothing in it but the outputs that it was asked for (`out*`)."""
    shutil.copytree(PROGRAMS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log.jsonl").write_text('{"epoch": 0, "dice": 0.5}\n')
    before = _files(tmp_path)
    yield tmp_path
    assert {path: data for path, data in _files(tmp_path).items() if not path.startswith("out")} == before


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _shows(shown: Shown, exit_code: int, first: str) -> None:
    """The exit code, the first line, nothing private in any line, and no table that is wider than the terminal."""
    assert shown.exit_code == exit_code, shown.text
    assert re.fullmatch(first, shown.first), shown.first
    assert not PRIVATE.search(shown.text), PRIVATE.search(shown.text)
    # An error is one line, which the terminal wraps.
    assert all(len(line) <= 120 for line in shown.lines if not line.startswith("tightfit: "))


class TestFineTunesALlama:
    def test_with_an_evaluation_a_sample_and_a_model_that_is_saved(self, folder: Path) -> None:
        pytest.importorskip("transformers", minversion="5")
        shown = typed(folder, "estimate", "llama_finetune.py", "--device", "RTX 4090")
        # All of it was seen, to the last line.
        _shows(shown, 0, rf"fits: {SIZE} left")
        assert re.search(r"after the steps: without gradients at [^\n]*\nllama_finetune\.py:41", shown.text)
        assert "finetuned/model.safetensors; --allow-writes makes" in shown.text
        # While it ran: what is done, for how long, and the steps seen; erased before the answer.
        assert re.search(r"\r\x1b\[K\d:\d\d estimate llama_finetune\.py: tracing", shown.raw)


class TestUsesTheTrainer:
    def test_plans(self, folder: Path) -> None:
        pytest.importorskip("transformers", minversion="5")
        pytest.importorskip("accelerate")
        shown = typed(folder, "plan", "trainer.py", "--device", "RTX 4090", "-o", "out.json")
        _shows(shown, 0, rf"fits without changes: {SIZE} of {SIZE} on NVIDIA GeForce RTX 4090")

    @pytest.mark.slow
    def test_tries_the_plan(self, folder: Path) -> None:
        self.test_plans(folder)
        shown = typed(folder, "run", "--virtual", "--plan", "out.json", "trainer.py")
        _shows(shown, 0, r"tightfit: on BertForSequenceClassification: no technique, it fits without changes")
        assert re.search(rf"3 steps ran on a virtual NVIDIA GeForce RTX 4090: peak {SIZE} of {SIZE}", shown.lines[-1])


class TestTrainsAUNet:
    def test_sends_a_page_of_it(self, folder: Path) -> None:
        shown = typed(folder, "report", "unet.py", "--device", "RTX 3060", "-o", "out.html")
        _shows(shown, 0, r"wrote out\.html \([\d.]+ KiB\)")
        with browser(folder / "out.profile") as window:
            window.open(folder / "out.html")
            assert window.requested() == [(folder / "out.html").as_uri()]
            assert window.logs("browser") == []
            heading, text = window.run("return [document.getElementById('verdict').innerText, document.body.innerText]")
            assert re.fullmatch(rf"Fits on NVIDIA GeForce RTX 3060: {SIZE} left", heading)
            assert "after the steps: without gradients at unet.py:46" in text
            assert not PRIVATE.search(text), PRIVATE.search(text)
            assert window.run("return document.documentElement.scrollWidth <= innerWidth")


class TestHasTooSmallABudget:
    def test_and_gets_a_plan_with_techniques(self, folder: Path) -> None:
        words = ["plan", "unet.py", "--device", "RTX 3060", "--budget", "800MiB", "--no-prove"]
        shown = typed(folder, *words, "--", "--size", "256", "--batch-size", "8")
        _shows(shown, 0, rf"fits with \d+ techniques: {SIZE} of 800\.0 MiB on NVIDIA GeForce RTX 3060")
        # What is done, for how long, and how many runs were traced; each line in place of the last, and gone before the answer.
        told = re.findall(r"\r\x1b\[K(\d+:\d\d plan unet\.py: [^\r\n]+)", shown.raw)
        assert not any(line in shown.lines for line in told)
        doing = list(dict.fromkeys(line.partition("unet.py: ")[2] for line in told))
        # Which of them are shown depends on how fast this machine is.
        known = r"tracing the plain run(; 1 run traced)?|tracing with \d+ techniques?(, .*)?; \d+ runs? traced"
        assert any(re.match(known, line) for line in doing)
        # The plain run and the planned one, then what is applied where, with signs and no cut settings.
        plain, planned = (next(line for line in shown.lines if line.startswith(name)) for name in ("plain", "planned"))
        rows = [[parse(size) for size in re.findall(SIZE, line)] for line in (plain, planned)]
        assert rows[0][1] > 800 * MIB >= rows[1][1] >= rows[1][0]
        table = shown.lines[shown.lines.index("techniques applied") + 1 : shown.lines.index("alternatives")]
        assert table[0].split() == ["technique", "where", "memory", "time", "exact", "settings"]
        assert "…" not in "".join(table)
        assert any(
            re.search(r"optimizer_kernel +optimizer .*−[\d.]+ [µm]s +yes +fused=True", line) for line in table[1:]
        )


class TestReadsARecording:
    def test_from_somebody_else(self, folder: Path) -> None:
        recorded = typed(folder, "record", "unet.py", "--device", "RTX 3060", "-o", "out.pickle")
        _shows(recorded, 0, r"tightfit: wrote out\.pickle: 3 steps on a virtual NVIDIA GeForce RTX 3060.*")
        shown = typed(folder, "doctor", "out.pickle", "--redact")
        _shows(shown, 0, r"out\.pickle, estimated on NVIDIA GeForce RTX 3060, 11\.76 GiB")
        shown = typed(folder, "report", "out.pickle", "--redact", "-o", "out.html")
        _shows(shown, 0, r"wrote out\.html \([\d.]+ KiB\)")
        shown = typed(folder, "replay", "out.pickle", "--memory", "4MiB")
        assert "out of memory" in shown.text
        _shows(shown, 1, r"out\.pickle")
        shown = typed(folder, "diff", "out.pickle", "out.pickle")
        assert shown.exit_code == 0


UNET = ("unet.py", "--device", "3060")
MISTAKES = {
    "no card": (
        ["estimate", "unet.py"],
        2,
        'which GPU? There is none on this machine: name one, such as --device "RTX 4090" ',
    ),
    "a card that there is not": (["estimate", "unet.py", "--device", "RTX 9999"], 2, "no GPU is called 'RTX 9999'"),
    "a file that there is not": (["estimate", "nofile.py", "--device", "4090"], 2, "there is no file nofile.py"),
    "a command that there is not": (["estimat", "unet.py"], 2, 'Unknown command "estimat". Did you mean "estimate"?'),
    "an option of the script": (["estimate", *UNET, "--epochs", "1"], 2, "Unknown option: --epochs."),
    "a budget without a unit": (["plan", *UNET, "--budget", "2000"], 2, "--budget: '2000' has no unit; "),
    "a negative budget": (["plan", *UNET, "--budget", "-3GiB"], 2, "--budget: '-3GiB' is negative; "),
    "an output in no folder": (["report", *UNET, "-o", "no/x.html"], 2, "--output no/x.html: there is no folder no"),
    "a plan that there is not": (
        ["run", "unet.py", "--plan", "x.json"],
        2,
        "there is no file x.json",
    ),
    "a script for a recording": (["replay", "unet.py"], 3, "unet.py is not a memory recording that can be read: "),
    "a line that there is not": (["estimate", *UNET, "--until", "900"], 2, "--until 900: "),
    "options that the script refuses": (
        ["estimate", *UNET, "--", "--epoch", "x"],
        3,
        "unet.py exited before its steps were complete: exit code 2; it said: unet.py: error: argument --epoch",
    ),
}


class TestMakesMistakes:
    @pytest.mark.parametrize("name", [*list(MISTAKES)[:-1], pytest.param(list(MISTAKES)[-1], marks=pytest.mark.slow)])
    def test_and_reads_one_line(self, folder: Path, name: str) -> None:
        words, exit_code, said = MISTAKES[name]
        shown = typed(folder, *words)
        assert (shown.exit_code, shown.raw.count("\n")) == (exit_code, 1), shown.raw
        assert shown.first.startswith(f"tightfit: {said}")
        assert not PRIVATE.search(shown.text)

    @pytest.mark.slow
    def test_in_the_program(self, folder: Path) -> None:
        (folder / "out").mkdir()
        (folder / "out" / "wrong.py").write_text(
            "import torch\ntorch.nn.Linear(4, 4).cuda()(torch.ones(2, 5).cuda())\n"
        )
        shown = typed(folder / "out", "estimate", "wrong.py", "--device", "4090")
        _shows(shown, 3, r"tightfit: wrong\.py raised RuntimeError at wrong\.py:2: .*\(--debug shows the traceback\)")

    def test_and_changes_his_mind(self, folder: Path) -> None:
        # However fast it is traced, it is not over before the key is pressed.
        (folder / "out").mkdir()
        script = "import threading\nimport torch\ntorch.ones(2).cuda()\nthreading.Event().wait()\n"
        (folder / "out" / "waits.py").write_text(script)
        command = ("estimate", "waits.py", "--device", "3060")
        shown = typed(folder / "out", *command, interrupt_at=lambda written: "tracing" in written)
        assert (shown.exit_code, shown.lines[-1]) == (130, "tightfit: interrupted")
