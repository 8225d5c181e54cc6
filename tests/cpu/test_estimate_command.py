"""What `tightfit` says when something is wrong: one line on stderr that names it, the right exit code, nothing on stdout, no traceback."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tightfit
from tightfit.cli.main import run

MODEL = """\
import torch


def workload(batch_size=8):
    layer = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(layer.parameters())
    while True:
        loss = layer(torch.randn(batch_size, 64, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def plain():
    return 3


def yields_nothing():
    torch.nn.Linear(64, 64).cuda()
    return
    yield


def on_two_cards():
    layer = torch.nn.Linear(64, 64).to("cuda:1")
    yield layer(torch.randn(8, 64, device="cuda:1"))
"""
SCRIPTS = {
    "raises.py": 'import torch\n\ndef load():\n    raise ValueError("no rows\\nin the data set")\n\nload()\n',
    "syntax.py": "import torch\ndef (\n",
    "exits.py": "import sys\nsys.exit(4)\n",
    "exits_with_words.py": 'import sys\nsys.exit("give me a data set")\n',
    "imports.py": "import torch\nimport no_such_package\n",
    "reads.py": 'import torch\nbest = torch.randn(999, 9, device="cuda").sum(0).argmax()\n{7: "seven"}[best.item()]\n',
    "no_step.py": "import torch\nlayer = torch.nn.Linear(4, 4).cuda()\ntorch.optim.SGD(layer.parameters())\nlayer(torch.ones(2, 4).cuda())\n",
    "workloads.py": "import torch\nSIZE = 4\ndef helper():\n    return SIZE\ndef train(size=SIZE):\n    yield torch.ones(size)\n",
    "uncalled.py": '"""Trains."""\nimport torch\ndef main():\n    def batches():\n        yield 1\n    return batches\n',
    "resumes.py": 'import torch\nfor epoch in range(torch.load("last.pt")["epoch"], 3):\n    pass\n',
    "leaves.py": "import os\nos._exit(3)\n",
    "leaves_at_its_end.py": """\
import os, torch
weight = torch.ones(64, device="cuda", requires_grad=True)
for _ in range(5):
    weight.sum().backward()
if not os.fork():
    os._exit(0)
os.wait()
os._exit(0)
""",
    "on_the_host.py": "import torch\nweight = torch.ones(4, requires_grad=True)\nfor _ in range(9):\n    weight.sum().backward()\n",
    "aborts.py": "import os\nos.abort()\n",
    "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "arguments.py": "import sys\nraise ValueError(sys.argv[1:])\n",
    "prints.py": 'print("the first line")\nraise ValueError("then this")\n',
}

Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command line that must end with `code`; gives the one line that it says, without its `tightfit: `."""
    (tmp_path / "model.py").write_text(MODEL)
    torch.save({"epoch": 3}, tmp_path / "last.pt")
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str, code: int) -> str:
        assert run(arguments) == code
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("tightfit: ")
        assert "Traceback" not in err
        line = err.removeprefix("tightfit: ").removesuffix("\n")
        assert "\n" not in line
        return line

    return command


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("nowhere.py", "there is no file nowhere.py"),
        ("nowhere.py:workload", "there is no file nowhere.py"),
        ("modle.py", "there is no file modle.py; nearest: model.py"),
        ("raises.py GiB", "GiB stands alone: write a size as one word, such as 2GiB"),
        ("raises.py %", "% stands alone: write a size as one word, such as 2%"),
        (
            "torchrun --nproc_per_node 2 raises.py",
            "leave out torchrun: give the script itself, and its own arguments after --, as in tightfit estimate train.py -- --epochs 1; "
            "--gpus 2 traces one of two processes",
        ),
        ("nowhere.npz", "there is no file nowhere.npz"),
        (
            "nowhere.npz --steps 9 --allow-writes",
            "nowhere.npz is a finished run, which is not traced again: it takes no --steps, --allow-writes",
        ),
        ("no_such_module.inner:workload", "no_such_module.inner:workload: No module named 'no_such_module'"),
        ("model.py:not-a-name", "'not-a-name' in model.py:not-a-name is not the name of a function"),
        (
            "model.py:wrkload",
            "model.py has no function wrkload; it has workload, yields_nothing, on_two_cards",
        ),
        (
            "model.py:plain",
            "model.py:plain is not a generator function: set up, then `yield` once per step",
        ),
        (
            "model.py:workload -p batch=3",
            "model.py:workload: got an unexpected keyword argument 'batch'; its parameters: batch_size",
        ),
        ("model.py:workload -p batch_size", "-p batch_size: write name=value"),
        (
            "raises.py -p batch_size=3",
            "-p sets a parameter of a generator function; raises.py is a script: give it its own arguments after --",
        ),
        (
            "model.py:workload --batch-size 3",
            "batch_size: only for a Hugging Face config, and model.py:workload is your own code; "
            "a script takes its arguments after --, a function its parameters with -p name=value",
        ),
        ("gpt2 --batch-size 0", "batch_size is 0; it must be at least 1"),
        ("model.py:workload --save-tape nowhere/run.npz", "--save-tape nowhere/run.npz: there is no folder nowhere"),
        ("model.py:workload --steps 0", "steps is 0: at least one step must be traced"),
        (
            "model.py:workload --steps two",
            'Invalid value for --steps: unable to convert "two" into a whole number or all. (see tightfit --help)',
        ),
        (
            "model.py:workload --alloc-conf max_split_size_mb",
            "max_split_size_mb needs a value: write max_split_size_mb:VALUE",
        ),
    ],
)
def test_a_wrong_argument_is_named(refused: Refused, arguments: str, line: str) -> None:
    assert refused("estimate", *arguments.split(), "--device", "4090", code=2) == line


def test_an_unknown_allocator_setting_is_named_with_those_that_exist(refused: Refused) -> None:
    line = refused("estimate", "model.py:workload", "--device", "4090", "--alloc-conf", "split:3", code=2)
    assert line.startswith("'split' is no key of PYTORCH_CUDA_ALLOC_CONF")
    assert "expandable_segments" in line


def test_an_option_that_is_not_ours_is_a_question_of_where_it_belongs(refused: Refused) -> None:
    line = refused("estimate", "arguments.py", "--device", "4090", "--epochs", "3", code=2)
    assert line.startswith("Unknown option: --epochs.")
    assert "a script's own options go after --" in line


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("estimate", "arguments.py", "--budget", "3GiB"), "it is one of tightfit plan, run; a script's own options"),
        (("forecast", "a.csv", "--budget", "3GiB"), "Unknown option: --budget. (it is one of tightfit plan, run; see"),
        (("techniques", "foo"), "techniques takes no foo (see tightfit --help)"),
        (("forecast", "a.csv", "--tokens"), "Unknown option: --tokens. (see tightfit --help)"),
    ],
)
def test_an_option_of_another_command_is_said_to_be(words: tuple[str, ...], hint: str, refused: Refused) -> None:
    assert hint in refused(*words, code=2)


def test_words_that_a_program_ends_itself_with_are_no_number(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(ValueError('no data'))\n")
    line = refused("estimate", str(tmp_path / "ends.py"), "--device", "4090", code=3)
    assert "exited before its steps were complete: no data (--show-output" in line


def test_a_folder_that_is_a_program_is_named_as_one(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "__main__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert refused("estimate", "./work/", "--device", "4090", code=2).endswith("; its program is -m work")


def test_what_follows_two_hyphens_goes_to_the_script_as_it_is(refused: Refused) -> None:
    line = refused("estimate", "arguments.py", "--device", "4090", "--", "--device", "h100", "-x", "--lr=3", code=3)
    assert line == (
        "arguments.py raised ValueError at arguments.py:2: ['--device', 'h100', '-x', '--lr=3'] (--debug shows the traceback)"
    )


@pytest.mark.parametrize("also", [(), ("--device", "4090")])
def test_an_unknown_card_is_answered_with_the_nearest_names_and_before_anything_runs(
    refused: Refused, also: tuple[str, ...]
) -> None:
    line = refused("estimate", "killed.py", *also, "--device", "4909", code=2)
    assert line.startswith("no GPU is called '4909'; the nearest are NVIDIA GeForce RTX 4090")


def test_without_a_card_one_must_be_named(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refused("estimate", "model.py:workload", code=2)
    assert line.startswith('which GPU? There is none on this machine: name one, such as --device "RTX 4090"')
    line = refused("estimate", "model.py", "--", "--device", "4090", code=2)
    assert line.endswith("your --device comes after --, where options belong to the script")


def test_a_card_file_is_told_apart_from_no_file_and_from_another_file(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "torn.toml").write_text("not toml [")
    torn = refused("estimate", "model.py:workload", "--device", "torn.toml", code=2)
    assert torn.startswith("the GPU file torn.toml cannot be read: ")
    assert "line 1" in torn
    none = refused("estimate", "model.py:workload", "--device", "none.toml", code=2)
    assert none.startswith("the GPU file: there is no file none.toml")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("raises.py", "raises.py raised ValueError at raises.py:4: no rows (--debug shows the traceback)"),
        (
            "imports.py",
            "imports.py raised ModuleNotFoundError at imports.py:2: No module named 'no_such_package'; "
            f"programs run with {sys.executable}: install it there (--debug shows the traceback)",
        ),
        (
            "exits.py",
            "exits.py exited before its steps were complete: exit code 4 (--show-output shows what it printed)",
        ),
        (
            "reads.py",
            "reads.py raised KeyError at reads.py:3: 1; a trace has no values of the GPU: the one read at reads.py:3 was assumed to be 1, "
            "which may have led here (--debug shows the traceback)",
        ),
        (
            "no_step.py",
            "the workload ended without a step: no optimizer stepped and no backward pass was run; "
            "for inference, give a generator function that yields once per step",
        ),
        (
            "workloads.py",
            "the workload ended without a step: no optimizer stepped and no backward pass was run; "
            "workloads.py only defines functions: name one that yields once per step, workloads.py:train",
        ),
        (
            "uncalled.py",
            "the workload ended without a step: no optimizer stepped and no backward pass was run; "
            "uncalled.py only defines main(), and calls nothing: call what trains at its end",
        ),
        (
            "resumes.py",
            "the workload ended without a step: no optimizer stepped and no backward pass was run; it loaded last.pt: if that checkpoint is from a finished run, "
            "let it train longer, or start from scratch; for inference, give a generator function that yields once per step",
        ),
        (
            "leaves.py",
            "leaves.py exited before its steps were complete: exit code 3 (--show-output shows what it printed)",
        ),
        (
            "on_the_host.py",
            'the workload took its steps without a tensor on the GPU; does it move its model to "cuda"?',
        ),
    ],
)
def test_a_workload_that_fails_is_answered_with_its_reason_and_place(refused: Refused, target: str, line: str) -> None:
    assert refused("estimate", target, "--device", "4090", code=3) == line


def test_a_program_that_leaves_by_the_system_at_its_end_fits(
    refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", "leaves_at_its_end.py", "--device", "4090"]) == 0
    assert capfd.readouterr().out.startswith("fits: ")


CHAINED = """\
import torch

def load(name):
    return {}[name]

def workload():
    try:
        load("train")
    except KeyError as error:
        raise ValueError("no data set") from error
    yield
"""


def test_debug_shows_the_programs_own_traceback_with_its_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As plain Python would print it: from the program's first line, without the frames of what ran it."""
    (tmp_path / "own.py").write_text(CHAINED)
    monkeypatch.chdir(tmp_path)
    assert run(["estimate", "own.py:workload", "--device", "4090", "--debug"]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert 'own.py", line 8, in workload' in err.splitlines()[1]
    assert "KeyError: 'train'" in err
    assert "The above exception was the direct cause" in err
    assert "tightfit/" not in err
    assert "importlib" not in err
    assert err.splitlines()[-2:] == [
        "ValueError: no data set",
        "tightfit: own.py:workload raised ValueError at own.py:10: no data set (caused by KeyError at own.py:4: 'train')",
    ]


def test_a_syntax_error_is_answered_with_its_file_and_line(refused: Refused) -> None:
    assert "syntax.py:2" in refused("estimate", "syntax.py", "--device", "4090", code=3)


def test_a_script_that_ends_itself_with_words_is_answered_with_them(refused: Refused) -> None:
    line = refused("estimate", "exits_with_words.py", "--device", "4090", code=3)
    assert "give me a data set" in line
    assert "exit code give" not in line


def test_a_generator_that_yields_nothing_is_told_so(refused: Refused) -> None:
    assert "yield" in refused("estimate", "model.py:yields_nothing", "--device", "4090", code=3).partition(";")[0]


def test_a_workload_that_needs_a_second_card_is_told_that_there_is_one(refused: Refused) -> None:
    line = refused("estimate", "model.py:on_two_cards", "--device", "4090", code=3)
    assert "cuda:1" in line
    assert "model.py:26" in line


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("target", "signal"), [("aborts.py", "SIGABRT at aborts.py:2"), ("killed.py", "SIGKILL (out of host memory?)")]
)
def test_a_workload_that_dies_is_answered_with_the_signal(refused: Refused, target: str, signal: str) -> None:
    line = refused("estimate", target, "--device", "4090", code=3)
    assert line.startswith(f"the process that traced {target} died with signal {signal}")
    assert line.endswith("run again with --show-output to see what it printed last")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_workload_that_dies_is_answered_with_the_line_it_was_at(refused: Refused) -> None:
    line = refused("estimate", "aborts.py", "--device", "4090", code=3)
    assert "aborts.py" in line.removeprefix("the process that traced aborts.py")
    assert "Extension modules" not in line


@pytest.mark.usefixtures("traces_import_libraries_themselves")
@pytest.mark.parametrize(
    ("package", "arguments", "advice"),
    [
        pytest.param("torch", "model.py:workload", "pip install 'tightfit[torch]'", marks=pytest.mark.slow),
        ("transformers", "gpt2", "tightfit[hf]"),
        pytest.param("peft", "gpt2 --lora-rank 4", "pip install peft", marks=pytest.mark.slow),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, arguments: str, advice: str
) -> None:
    hidden = tmp_path / "hidden" / package
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text(f'raise ModuleNotFoundError("No module named {package!r}", name={package!r})\n')
    monkeypatch.setenv("PYTHONPATH", str(hidden.parent))
    line = refused("estimate", *arguments.split(), "--device", "4090", code=3)
    assert package in line
    assert advice in line
    assert "not installed" in line


@pytest.mark.usefixtures("traces_import_libraries_themselves")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("import torchvision\n", marks=pytest.mark.slow),
        "try:\n    import torchvision\nexcept RuntimeError as error:\n    raise ModuleNotFoundError('no such model') from error\n",
    ],
    ids=["imported by the script", "imported by a library"],
)
def test_a_torchvision_that_was_built_for_another_torch_is_told_with_what_helps(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """PyPI's torchvision is built for CUDA and registers its operators with a CPU build of torch in vain."""
    package = tmp_path / "broken" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
    (tmp_path / "vision.py").write_text(text)
    line = refused("estimate", "vision.py", "--device", "4090", code=3)
    assert "operator torchvision::nms does not exist" in line
    assert "install the torchvision that was built with your torch" in line
    assert "uninstall" in line


def test_what_the_workload_prints_is_shown_on_stderr_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prints.py").write_text(SCRIPTS["prints.py"])
    monkeypatch.chdir(tmp_path)
    assert run(["estimate", "prints.py", "--device", "4090", "--show-output"]) == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "the first line",
        "tightfit: prints.py raised ValueError at prints.py:2: then this (--debug shows the traceback)",
    ]


class Malicious:
    """A pickle of this would make a file when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("was-run"),)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(Malicious()), "is not a memory recording that can be read"),
        (b"\x80\x04 torn", "is not a memory recording that can be read"),
        (b"", "is not a memory recording that can be read"),
        (pickle.dumps({"segments": 3}), ""),
    ],
    ids=["malicious", "torn", "empty", "other"],
)
def test_a_recording_that_is_none_is_refused_and_never_run(
    refused: Refused, tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "recording.pickle").write_bytes(content)
    line = refused("replay", "recording.pickle", code=3)
    assert line.startswith("recording.pickle ")
    assert reason in line
    assert not (tmp_path / "was-run").exists()


def test_a_recording_that_is_not_there_is_refused(refused: Refused) -> None:
    assert refused("replay", "nowhere.pickle", code=2) == "there is no file nowhere.pickle"


ASKS_FOR_ITS_CARD = """\
import torch

def workload():
    free, total = torch.cuda.mem_get_info()
    rows = free // (1 << 22)
    layer = torch.nn.Linear(1024, 1024).cuda()
    while True:
        layer(torch.ones(rows, 1024, device="cuda")).sum().backward()
        yield
"""


def test_a_program_that_asks_for_free_memory_does_not_find_what_others_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks.py").write_text(ASKS_FOR_ITS_CARD)
    monkeypatch.chdir(tmp_path)
    plain, less = (tightfit.estimate("asks.py:workload", "RTX 4090", used=used) for used in (None, "12GiB"))
    # 1 KiB a row for the input and as much for the output, of each 4 MiB that are free.
    assert plain.peak.allocated_bytes - less.peak.allocated_bytes > (12 << 30) // (1 << 22) * 4096


def test_a_thread_that_uses_the_gpu_and_is_not_followed_is_named(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        """
import torch
from multiprocessing.pool import ThreadPool

def load(_):
    return torch.randn(4, 8).cuda()

ThreadPool(1).map(load, [0])
"""
    )
    line = refused("estimate", "threads.py", "--device", "T4", code=3)
    import torch

    # Builds for CUDA look for a card first.
    said = (
        "RuntimeError at threads.py:6: Found no"
        if torch.backends.cuda.is_built()
        else "NotImplementedError at threads.py:6: Could not run 'aten::"
    )
    assert line.startswith(f"threads.py raised {said}")
    assert "the program uses the GPU in a thread of its own, where a trace does not follow it" in line
