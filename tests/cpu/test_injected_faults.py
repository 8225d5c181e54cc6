"""A fault of our own, wherever it is, ends as an internal error: exit code 4, one line that says so, a file with the traceback.

Each technique's `options` and `apply` is broken in turn, and so are the recorders, a kernel rule, the solver and the reports. Nothing of that is ever
a refusal, or an error of the user's program; and what the user's program raises is never ours.
"""

import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.applied import CHOICES, Net, choice, plan_of
from tests.forked_python import forked_python

import tightfit
from tightfit.capture import trace as capture_trace
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Traced, trace
from tightfit.cli.main import run
from tightfit.errors import InternalError, faults
from tightfit.errors.faults import is_ours
from tightfit.errors.program_errors import one_line
from tightfit.fit import planning as fit_plan
from tightfit.fit import traced_runs
from tightfit.fit.searching import candidates, variants
from tightfit.reports import plans
from tightfit.reports.text import estimates as text
from tightfit.runtime import attach, record_host
from tightfit.runtime.apply import apply_choices
from tightfit.simulate import peak
from tightfit.techniques.registry import techniques

# Many processes and traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

WORKLOAD = """\
import torch
from torch import nn

def workload(broken=""):
    if broken:
        import faults
        faults.inject(broken)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        try:
            model(torch.randn(4096, 64, device="cuda")).sum().backward()
        except Exception:
            if not broken.endswith("swallowed"):
                raise
        optimizer.step()
        optimizer.zero_grad()
        yield
"""
FAULTS = """\
from tightfit.capture.dispatch import handlers
from tightfit.capture.observe import kernel_memory, recorder
from tightfit.techniques.recomputation import checkpointing

def broken(*args, **kwargs):
    raise KeyError("injected")

def inject(what):
    owner, name = {
        "rule": (kernel_memory, "scratch_events"),
        "allocate": (recorder.Recorder, "allocate"),
        "free": (recorder.Recorder, "free"),
        "apply": (checkpointing.Checkpointing, "apply"),
        "handler": (handlers, "_stride_of_copy"),
    }[what.split()[0]]
    setattr(owner, name, broken)
"""
TRAIN = """\
from tests.cpu.applied import *
model, optimizer = made()
train(model, optimizer, range(2))
"""
SWALLOWING = """\
from tests.cpu.applied import *
model, optimizer = made()
for _ in range(2):
    try:
        train(model, optimizer, range(1))
    except Exception:
        pass
print("done")
"""
NAMES = sorted(techniques())
COMMAND = ["plan", "work.py:workload", "--device", "RTX 4090", "--budget", "540MiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("faults")
    (made / "work.py").write_text(WORKLOAD)
    (made / "faults.py").write_text(FAULTS)
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Traced:
    """The plain run, traced once."""
    target = GeneratorFunction(location=str(folder / "work.py"), function="workload", parameters={})
    prepared = traced_runs.Preparation(function="tightfit.runtime.attach:prepare", argument={"choices": []})
    return trace(target, label="work.py:workload", device="RTX 4090", preparation=prepared)


@pytest.fixture(autouse=True)
def in_a_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def broken(*_: Any, **__: Any) -> Any:
    raise KeyError("injected")


def is_internal(code: int, said: str, *words: str) -> bool:
    """Whether a command ended with an internal error that names `words` and a file with the traceback."""
    line = said.splitlines()[-1]
    assert line.startswith("tightfit: internal error in "), said
    assert "refused" not in said and "raised" not in said
    assert all(word in line for word in ("KeyError", "injected", "a fault of tightfit, not of your program", *words))
    file = re.search(r"please report it with the file (\S+)$", line)
    assert file is not None
    kept = Path(file[1]).read_text()
    assert "Traceback (most recent call last)" in kept and "KeyError: 'injected'" in kept
    return code == 4


def test_a_tape_that_breaks_a_rule_is_a_fault_of_the_capture(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capture_trace, "verify_tape", lambda _: ["a storage that is freed twice"])
    code = run(["estimate", "work.py:workload", "--device", "RTX 4090"])
    line = capfd.readouterr().err.splitlines()[-1]
    assert code == 4
    assert line.startswith("tightfit: internal error in the capture: AssertionError at tightfit/capture/trace.py")
    # pytest rewrites the assertions of packages that bring a plugin, ours too: what was compared then follows the words.
    assert ": a storage that is freed twice" in line


@pytest.mark.parametrize("name", NAMES)
def test_in_the_options_of_each_technique(
    name: str, plain: Traced, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traced_runs, "trace", lambda *_, **__: plain)
    monkeypatch.setattr(type(techniques()[name]), "options", broken)
    assert is_internal(run(COMMAND), (said := capfd.readouterr()).err, f"technique {name}")
    assert said.out == ""
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_in_putting_on_each_technique(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_of([choice(name, "Net.layers.0" if name == "checkpointing" else "optimizer")]).save("plan.json")
    Path("train.py").write_text(TRAIN)
    monkeypatch.setattr(type(techniques()[name]), "apply", broken)
    assert is_internal(run(["run", "--plan", "plan.json", "train.py"]), capfd.readouterr().err, f"technique {name}")


def test_in_python_it_names_the_technique_and_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(techniques()["optimizer_kernel"]), "apply", broken)
    model = Net()
    with pytest.raises(InternalError) as caught:
        apply_choices(CHOICES, model, [torch.optim.SGD(model.parameters())])
    assert caught.value.technique == "optimizer_kernel"
    assert "KeyError: 'injected'" in caught.value.trace
    assert isinstance(caught.value.__cause__, KeyError)
    assert "forward" not in vars(model.layers[0])


def test_a_program_that_swallows_it_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_of().save("plan.json")
    Path("train.py").write_text(SWALLOWING)
    monkeypatch.setattr(type(techniques()["checkpointing"]), "apply", broken)
    assert is_internal(run(["run", "--plan", "plan.json", "train.py"]), (said := capfd.readouterr()).err)
    assert said.out == "done\n"


@pytest.mark.parametrize("name", ["input_shapes", "num_parameters", "choices_for"])
@pytest.mark.parametrize("script", [TRAIN, SWALLOWING], ids=["shown", "swallowed"])
def test_in_what_waits_for_models(
    name: str, script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_of().save("plan.json")
    Path("train.py").write_text(script)
    monkeypatch.setattr(attach, name, broken)
    assert is_internal(run(["run", "--plan", "plan.json", "train.py"]), capfd.readouterr().err)


@pytest.mark.parametrize("what", ["rule", "free", "allocate swallowed", "handler swallowed"])
def test_in_the_capture(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In the process that traces; also where the program swallows it, and where Python drops it: in the callback of a weak reference."""
    code = run(["estimate", "work.py:workload", "-p", f"broken={what}", "--device", "RTX 4090", "--steps", "1"])
    assert is_internal(code, (said := capfd.readouterr()).err, "capture")
    assert said.out == ""
    assert said.err.count("\n") == 1


def test_in_putting_a_technique_on_a_traced_run(capfd: pytest.CaptureFixture[str]) -> None:
    plan_of().save("plan.json")
    Path("train.py").write_text(f"import faults\nfaults.inject('apply')\n{TRAIN}")
    code = run(["run", "--virtual", "--plan", "plan.json", "train.py"])
    assert is_internal(code, capfd.readouterr().err, "technique checkpointing")


def test_a_trial_that_meets_one_ends_the_search(plain: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no refusal that the plan goes on from: no plan that met one is called proven."""

    def traced(*_: Any, preparation: traced_runs.Preparation, **__: Any) -> Traced:
        if preparation.argument["choices"]:
            raise InternalError("internal error in technique x")
        return plain

    monkeypatch.setattr(traced_runs, "trace", traced)
    with pytest.raises(InternalError, match="technique x"):
        tightfit.plan("work.py:workload", "RTX 4090", budget="520MiB")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (candidates, "solve"),
        (variants, "replay_timeline"),
        (fit_plan, "_alternatives"),
        (fit_plan, "suggestions_for"),
        (traced_runs, "estimate_peak"),
        (plans, "write_plan"),
    ],
)
def test_in_the_planner_and_its_report(
    owner: Any, name: str, plain: Traced, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traced_runs, "trace", lambda *_, **__: plain)
    monkeypatch.setattr(owner, name, broken)
    assert is_internal(run(COMMAND), capfd.readouterr().err)


@pytest.mark.parametrize(("owner", "name"), [(peak, "timeline_on"), (text, "write_estimate")])
def test_in_the_estimate_and_its_report(
    owner: Any, name: str, plain: Traced, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain.tape.save("tape.npz")
    monkeypatch.setattr(owner, name, broken)
    assert is_internal(run(["estimate", "tape.npz", "--device", "RTX 4090"]), capfd.readouterr().err)


@pytest.mark.parametrize("name", ["is_lazy", "HostEvent"])
def test_in_the_recorder_of_a_real_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text(SWALLOWING)
    plain_start = record_host.HostRecorder.start

    def start(recorder: record_host.HostRecorder) -> None:
        plain_start(recorder)
        monkeypatch.setattr(record_host, name, broken)

    monkeypatch.setattr(record_host.HostRecorder, "start", start)
    assert is_internal(run(["record", "--host", "train.py"]), capfd.readouterr().err, "recorder")


def test_debug_shows_the_traceback_before_the_line(
    monkeypatch: pytest.MonkeyPatch, plain: Traced, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traced_runs, "trace", lambda *_, **__: plain)
    monkeypatch.setattr(candidates, "solve", broken)
    assert is_internal(run([*COMMAND, "--debug"]), (said := capfd.readouterr().err))
    assert said.startswith("Traceback (most recent call last)")
    assert run(["estimate", "no_such.py", "--device", "RTX 4090", "--debug"]) == 2
    assert "UsageError" in capfd.readouterr().err


def test_where_no_file_can_be_written_the_line_says_how_to_see_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr("tightfit.cli.main.app", broken)
    monkeypatch.setattr("tempfile.mkstemp", full)
    assert run(["devices"]) == 4
    assert capfd.readouterr().err.endswith("please report it with what --debug shows\n")


def test_only_the_newest_files_with_tracebacks_are_kept(tmp_path: Path) -> None:
    other = tmp_path / "tightfit-faulty.txt"
    other.touch()
    files = [faults.internal_error(KeyError(number), "the test").file for number in range(faults.MAX_FILES + 3)]
    kept = {str(path) for path in tmp_path.iterdir()}
    assert kept == {*files[-faults.MAX_FILES :], str(other)}


def test_what_a_callback_of_the_users_raises_is_theirs(plain: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    class TheirsError(Exception):
        pass

    def say(_: str) -> None:
        raise TheirsError

    monkeypatch.setattr(traced_runs, "trace", lambda *_, **__: plain)
    with pytest.raises(TheirsError):
        tightfit.plan("work.py:workload", "RTX 4090", say=say)


OURS = str(Path(tightfit.__file__).with_name("made_up.py"))


@pytest.mark.parametrize(
    ("code", "ours"),
    [
        ("def call(function, *args):\n    return function(*args)", False),
        ("def call(function, *args, **kwargs):\n    return function(*args, **kwargs)", False),
        ("def call(function, rows, weight):\n    return function(rows, weight)", True),
        ("def call(function, *args):\n    return len(function, *args)", False),
        ("def call(function, *args):\n    return args[7]", True),
        ("def call(function, *args):\n    return args.nothing", True),
        ("def call(function, *args):\n    assert not args", True),
        ("def call(function, *args):\n    import json\n    return json.loads('x')", True),
    ],
)
def test_what_torch_says_to_arguments_that_were_handed_on_is_its_answer_to_the_program(code: str, ours: bool) -> None:
    """As a mode of ours around the program's calls does; functions of torch in C have no frame of their own."""
    names: dict[str, Any] = {}
    exec(compile(code, OURS, "exec"), names)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of several kinds
        names["call"](torch._C._nn.linear, torch.ones(2, 3), torch.ones(5, 7))
    assert is_ours(caught.value) is ours


def test_a_shape_that_does_not_fit_under_a_mode_of_ours_is_the_programs_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    plan_of([choice("optimizer_kernel", "optimizer", kernel="for-loop")]).save("plan.json")
    Path("train.py").write_text(
        "from tests.cpu.applied import *\nmodel, optimizer = made()\ntrain(model, optimizer, range(1))\nmodel(torch.ones(4, 3))\n"
    )
    assert run(["run", "--plan", "plan.json", "train.py"]) == 1
    said = capfd.readouterr().err
    assert "internal error" not in said
    assert "train.py" in said and "Error" in said.splitlines()[-1]


USERS: list[tuple[str, str]] = [
    ("model(torch.randn(4, 7, device='cuda'))", "RuntimeError"),
    ("model(None)", "TypeError"),
    ("torch.ones(2, device='cuda') @ torch.ones(3, device='cuda')", "RuntimeError"),
    ("torch.ones(2, device='cuda').numpy()", "TypeError"),
    ("torch.tensor([[1], [1, 2]])", "ValueError"),
    ("torch.ones(2, device='cuda').type('no.type')", "ValueError"),
    ("torch.ones(2, device='cuda')[5]", "IndexError"),
    ("torch.cuda.set_device('nothing')", "RuntimeError"),
    ("torch.load('nothing.pt')", "FileNotFoundError"),
    ("model.weight.data = 3", "TypeError"),
    ("f'{torch.ones(2):q}'", "TypeError"),
    ("model.register_forward_hook(lambda *_: {}['mine']); model(torch.ones(2, 8, device='cuda'))", "KeyError"),
    ("torch.optim.SGD([])", "ValueError"),
    ("torch.nn.functional.cross_entropy(torch.ones(2, 3, device='cuda'), torch.ones(3, device='cuda'))", "ValueError"),
    ("torch.ones(2, device='cuda').data = 3", "TypeError"),
    ("(lambda f: f(f))(lambda f: f(f))", "RecursionError"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of the users' faults is said to be: all of them in one process that traces."""
    made = tmp_path_factory.mktemp("users")
    (made / "all.py").write_text(
        "import json, sys, torch\nfrom tightfit.errors import faults\nfound = {}\n"
        f"for line, _ in {USERS!r}:\n"
        "    model = torch.nn.Linear(8, 8).cuda()\n"
        "    try:\n        exec(compile(line, 'mine.py', 'exec'))\n"
        "    except Exception as error:\n"
        "        own = faults.our_error(error, 'the test')\n"
        "        found[line] = type(error).__name__ if own is None else str(own)\n"
        "json.dump(found, open('found.json', 'w'))\n"
        "print('noted', faults._noted, file=sys.stderr)\n"
    )
    import json

    asked = ("--device", "RTX 4090", "--show-output", "--allow-writes")
    done = forked_python("-m", "tightfit", "estimate", "all.py", *asked, cwd=made)
    assert "noted []" in done.stderr, done.stderr
    return json.loads((made / "found.json").read_text())


@pytest.mark.parametrize(("line", "kind"), USERS)
def test_the_users_faults_are_theirs(line: str, kind: str, answers: dict[str, str]) -> None:
    assert answers[line] == kind


CAUSES: list[tuple[str, Callable[[str], bool]]] = [
    (
        "try:\n    import no_such_package\nexcept ImportError as error:\n"
        "    raise RuntimeError('Failed to import transformers.models.x because of the following error "
        "(look up to see its traceback):\\nNo module') from error\n",
        lambda said: (
            "raised RuntimeError at train.py:4: Failed to import transformers.models.x because of the following error "
            "(caused by ModuleNotFoundError at train.py:2: No module named 'no_such_package')" in said
        ),
    ),
    (
        "def read():\n    return {}['learning_rate']\ntry:\n    read()\nexcept KeyError:\n    raise ValueError('bad file')\n",
        lambda said: (
            "raised ValueError at train.py:6: bad file (caused by KeyError at train.py:2: 'learning_rate')" in said
        ),
    ),
    (
        "try:\n    {}['x']\nexcept KeyError:\n    raise ValueError('bad file') from None\n",
        lambda said: said.rstrip().endswith("raised ValueError at train.py:4: bad file"),
    ),
]


@pytest.mark.parametrize(("script", "is_right"), CAUSES)
def test_an_error_of_the_users_keeps_its_first_cause(script: str, is_right: Callable[[str], bool]) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        exec(compile(script, "train.py", "exec"), {})
    said = one_line("train.py", caught.value)
    assert is_right(said), said
    assert "\n" not in said


def test_arguments_that_do_not_belong_together_are_an_error_of_the_users(capfd: pytest.CaptureFixture[str]) -> None:
    text = "import torch\nx = torch.ones(2).cuda()\n"
    Path("train.py").write_text(f"{text}torch.allclose(x, x.double())\n")
    assert run(["estimate", "train.py", "--device", "RTX 4090"]) == 3
    line = "train.py raised RuntimeError at train.py:3: Float did not match Double (--debug shows the traceback)"
    assert capfd.readouterr().err == f"tightfit: {line}\n"


def test_an_error_of_the_users_is_one_line_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(CAUSES[0][0])
    assert run(["estimate", "train.py", "--device", "RTX 4090"]) == 3
    said = capfd.readouterr().err
    assert said.startswith("tightfit: train.py raised RuntimeError at train.py:4: Failed to import transformers")
    assert "(caused by ModuleNotFoundError" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    ["torch.nn.Linear(3, 2).cuda()(rows)", "rows + torch.ones(4)", "torch.stack([torch.ones(2), torch.ones(3)])"],
)
def test_an_error_of_the_program_is_its_own_where_torch_is_in_another_environment(tmp_path: Path, wrong: str) -> None:
    """`python -m venv --system-site-packages`, a container with torch and an environment on top, `pip install --user`."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    packages.joinpath("others.pth").write_text(
        "\n".join([str(Path(tightfit.__file__).parents[1]), sysconfig.get_path("purelib")]) + "\n"
    )
    (tmp_path / "wrong.py").write_text(f"import torch\nrows = torch.ones(4, 4).cuda()\n{wrong}\n")
    command = [str(tmp_path / "env" / "bin" / "python"), "-m", "tightfit", "estimate", "wrong.py", "--device", "4090"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "wrong.py raised RuntimeError at wrong.py:3: " in done.stderr
