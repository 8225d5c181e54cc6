"""`tightfit run` with a plan: the script is unmodified, the plan is on before its first forward, and what went wrong is one line."""

import copy
import dataclasses
import gc
import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.cpu.applied import CHOICES, GIB, Block, Net, batch_of, choice, made, plan_of, root, train

from tightfit.cli.main import run
from tightfit.planner.plan import Choice
from tightfit.runtime.attach import Attachment
from tightfit.units import parse_bytes

SCRIPT = """\
import sys
from tests.cpu.applied import *

model, optimizer = made()
print(train(model, optimizer, range(int(sys.argv[1]))), model.layers[0].forward.__class__.__name__)
"""
WRAPPED = "WrappedForward"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def attach() -> Iterator[Callable[..., Attachment]]:
    ends = []

    def begin(*choices: Choice, **options: object) -> Attachment:
        attachment = Attachment(choices or CHOICES, **options)  # type: ignore[arg-type]
        ends.append(attachment.install())
        return attachment

    yield begin
    for end in ends:
        end()
    assert torch.nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert torch.optim.Optimizer.__init__.__module__ == "torch.optim.optimizer"


def is_on(module: torch.nn.Module) -> bool:
    return type(module.forward).__name__ == WRAPPED


def script(text: str, name: str = "train.py") -> str:
    Path(name).write_text(text)
    return name


def test_a_script_runs_with_its_plan_and_says_so_in_three_lines(capfd: pytest.CaptureFixture[str]) -> None:
    plan_of().save("plan.json")
    assert run(["run", "--plan", "plan.json", script(SCRIPT), "--", "3"]) == 0
    said = capfd.readouterr()
    assert said.out == f"{train(*made(), range(3))} {WRAPPED}\n"
    assert said.err.splitlines() == [
        "tightfit: on Net: checkpointing of Net.layers.[0,2], optimizer_kernel of optimizer",
        "tightfit: peak 1.00 GiB (upper bound 1.00 GiB) instead of 1.00 GiB on NVIDIA GeForce RTX 4090",
        "tightfit: estimated time per step 100.0 ms instead of 100.0 ms (+0.0%)",
    ]


ANNEALED = """\
import torch


class Annealed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.rate = torch.nn.Linear(8, 8), 1.0

    def forward(self, rows):
        return (self.layer(rows) * self.rate).square().mean()


model = Annealed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model.rate = 1 - step / 20
    optimizer.zero_grad()
    model(torch.randn(4, 8)).backward()
    optimizer.step()
"""


def test_what_a_run_shows_later_is_said_when_it_shows(capfd: pytest.CaptureFixture[str]) -> None:
    parts = choice("micro_batches", "batch", num_parts=2, draws_anew=False)
    plan_of((parts,), roots=()).save("plan.json")
    assert run(["run", "--plan", "plan.json", script(ANNEALED)]) == 0
    said = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("tightfit: micro_batches repeats its check in every step") for line in said) == 1


def test_a_plan_made_with_other_libraries_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    here = torch.__version__.partition("+")[0]
    for version, said in ((f"{here}+cu130", ""), ("1.2.3", f"the plan was made with torch 1.2.3 (here {here}")):
        plan_of(versions={"python": "3.9.1", "torch": version, "cuda": "13.0", "gone": "1"}).save("plan.json")
        assert run(["run", "--plan", "plan.json", script(SCRIPT), "--", "1"]) == 0
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 3 + bool(said)
        assert lines[0].startswith(f"tightfit: {said or 'on Net'}")


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("sys.exit('no data')", 1), ("sys.exit()", 0)])
def test_the_exit_code_is_the_scripts_own(ending: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    plan_of().save("plan.json")
    assert run(["run", "--plan", "plan.json", script(f"import sys\n{ending}\n")]) == code
    assert capfd.readouterr().err == ("no data\n" if code == 1 else "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "print('nothing to train')",
            "the plan names Net, which the program never called with gradients (it called no model with them); make a plan",
        ),
        (
            "from tests.cpu.applied import *\nmodel = Block()\nmodel(batch_of(0)[0]).sum().backward()",
            "the plan is for a Net, and this model is a Block; make a plan for it",
        ),
        (
            "from tests.cpu.applied import *\nmodel = Net(4)\nmodel(batch_of(0)[0]).sum().backward()",
            "the plan is for a Net of 2,154 parameters, and this one has 2,722; make a plan for it",
        ),
    ],
)
def test_a_plan_for_something_else_is_one_line(text: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan_of().save("plan.json")
    assert run(["run", "--plan", "plan.json", script(text)]) == 3
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"tightfit: {reason}")


def test_a_larger_batch_than_planned_is_a_warning_in_a_run_and_on_the_virtual_card(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And the virtual run's peak is that of the larger batch, compared with the budget."""
    plan_of().save("plan.json")
    text = "from tests.cpu.applied import *\nmodel, optimizer = made()\nrows = torch.zeros({rows}, 8)\n"
    text += "if torch.cuda.is_available():\n    rows = rows.cuda()\n    model.cuda()\n"
    text += "for _ in range(2):\n    model(rows).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    warning = "tightfit: input 0 is {rows} x 8, larger than the 4 x 8 that the plan was made for"
    assert run(["run", "--plan", "plan.json", script(text.format(rows=64))]) == 0
    assert capfd.readouterr().err.splitlines()[-1].startswith(warning.format(rows=64))
    for rows, code in ((64, 0), (1 << 22, 1)):
        assert run(["run", "--virtual", "--plan", "plan.json", script(text.format(rows=rows))]) == code
        said = capfd.readouterr()
        assert said.err.splitlines()[-1].startswith(warning.format(rows=rows))
        assert "of 2.00 GiB" in said.out


def test_what_found_no_place_is_told_when_the_script_has_ended(capfd: pytest.CaptureFixture[str]) -> None:
    plan_of([*CHOICES, choice("checkpointing", "Critic.layers.0")]).save("plan.json")
    assert run(["run", "--plan", "plan.json", script(SCRIPT), "--", "1"]) == 0
    assert capfd.readouterr().err.splitlines()[3:] == [
        "tightfit: the plan names Critic, which the program never called with gradients (it called Net with them); make a plan for it"
    ]


def test_a_script_without_a_model_is_told_so_where_nothing_was_planned(capfd: pytest.CaptureFixture[str]) -> None:
    plan_of([], roots=[]).save("plan.json")
    assert run(["run", "--plan", "plan.json", script("print('done')")]) == 0
    assert "called no model with gradients: the plan was applied to nothing" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["nothing.py"], 2, "there is no file nothing.py"),
        (["plan.json"], 2, "there is no script plan.json; run takes a Python file"),
        (["--plan", "nothing.json", "train.py"], 2, "there is no file nothing.json"),
        (["--plan", "train.py", "train.py"], 3, "train.py is not a plan"),
        (["--plan", "other.json", "train.py"], 3, "other.json: this is no plan; make one with tightfit plan -o FILE"),
        (["--plan", "lacking.json", "train.py"], 3, "lacking.json: this plan lacks 'baseline'; make it again"),
        (["--plan", "unknown.json", "train.py"], 3, "unknown.json: there is no technique 'magic'; there are "),
        (
            ["--plan", "large.json", "train.py"],
            1,
            "large.json is a plan with which train.py does not fit 512.0 MiB on NVIDIA GeForce RTX 4090",
        ),
        (
            ["--plan", "likely.json", "train.py"],
            1,
            "likely.json is a plan with which train.py fits 2.00 GiB on NVIDIA GeForce RTX 4090 only without the safety margin: its likely peak is ",
        ),
        (["link.py"], 2, "there is no file link.py: it is a link to gone.py, which is not there"),
        (
            ["--plan", "plan.json", "--budget", "4GiB", "train.py"],
            2,
            "--plan names a finished plan: it takes no --bu",
        ),
        (["train.py"], 2, "there is no GPU on this machine to plan for: name one with --device"),
        (
            ["--device", "4090", "--budget", "0", "train.py"],
            2,
            "the budget is 0; give the GPU memory that the process may use",
        ),
        (["--device", "4090", "--allow", "magic", "train.py"], 2, "--allow magic: no such technique; allow lossy"),
        (["--device", "no such card", "train.py"], 2, "no GPU is called 'no such card'"),
        (
            ["--plan", "plan.json", "--allow-writes", "train.py"],
            2,
            "--allow-network and --allow-writes are for tracing",
        ),
        (["--guard", "--allow-network", "train.py"], 2, "--allow-network and --allow-writes are for tracing"),
        (
            ["--post-mortems", "post", "--plan", "plan.json", "train.py"],
            2,
            "--post-mortems is for a guarded run",
        ),
    ],
)
def test_errors_are_one_line_each(
    arguments: list[str], code: int, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_of().save("plan.json")
    plan_of([choice("magic", "Net")]).save("unknown.json")
    plan_of(fits=False, budget_bytes=GIB // 2).save("large.json")
    plan_of(fits=False, budget_bytes=2 * GIB).save("likely.json")
    Path("other.json").write_text(json.dumps({"schema": 2}))
    whole = json.loads(Path("plan.json").read_text())
    Path("lacking.json").write_text(json.dumps({k: v for k, v in whole.items() if k != "baseline"}))
    script("from tests.cpu.applied import *\ntrain(*made())\n")
    Path("link.py").symlink_to("gone.py")
    assert run(["run", *arguments]) == code
    said = capfd.readouterr()
    assert said.err.startswith(f"tightfit: {reason}")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_nothing_happens_before_the_first_forward_with_gradients(attach: Callable[..., Attachment]) -> None:
    attach()
    model, optimizer = made()
    with torch.no_grad():
        model.eval()(batch_of(0)[0])
    assert not is_on(model.layers[0])
    train(model.train(), optimizer, range(1))
    assert is_on(model.layers[0])
    assert optimizer.param_groups[0]["foreach"] is False


def test_frozen_models_and_what_is_called_in_the_backward_pass_are_no_roots(attach: Callable[..., Attachment]) -> None:
    attachment = attach()
    teacher = Net(1).requires_grad_(False)
    teacher(batch_of(0)[0])
    train(*made())
    assert [entry["num_parameters"] for entry in attachment.report()["roots"]] == [2154]


def test_an_optimizer_that_comes_after_the_first_forward_is_met(attach: Callable[..., Attachment]) -> None:
    attachment = attach(planned=[root(Net())])
    model = Net()
    model(batch_of(0)[0])
    assert is_on(model.layers[0])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["foreach"] is False
    attachment.report()


def test_an_optimizer_in_place_of_another_is_met_and_the_old_one_let_go(attach: Callable[..., Attachment]) -> None:
    attach(planned=[root(Net())])
    model, optimizer = made()
    train(model, optimizer)
    old = weakref.ref(optimizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    train(model, optimizer)
    assert optimizer.param_groups[0]["foreach"] is False
    assert old() is None


def test_a_model_that_is_built_anew_gets_the_plan_and_the_old_one_is_let_go(attach: Callable[..., Attachment]) -> None:
    attachment = attach(planned=[root(Net())])
    expected = train(*made())
    assert torch.nn.Module.__call__.__name__ == "_wrapped_call_impl", "nothing is waited for"
    old = []
    for _ in range(3):
        model, optimizer = made()
        assert train(model, optimizer) == expected
        assert is_on(model.layers[0])
        old.append(weakref.ref(model))
    del model, optimizer
    gc.collect()
    assert [model() for model in old] == [None] * 3
    assert len(attachment.report()["roots"]) == 1


def test_models_of_one_class_and_several_sizes_are_told_apart(attach: Callable[..., Attachment]) -> None:
    large, small = Net(3), Net(1)
    attachment = attach(planned=[root(small), root(large)])
    for model in (small, large):
        train(model, torch.optim.AdamW(model.parameters(), foreach=True), range(1))
    assert [is_on(layer) for layer in (*small.layers, *large.layers)] == [True, True, False, True]
    assert len(attachment.report()["roots"]) == 2
    # Others have been trained: this one runs unchanged.
    middle = Net(2)
    train(middle, torch.optim.SGD(middle.parameters()))
    assert not any(is_on(layer) for layer in middle.layers)


def test_two_models_with_optimizers_of_their_own_both_get_what_names_no_model(
    attach: Callable[..., Attachment],
) -> None:
    class Critic(Net):
        pass

    attachment = attach(*CHOICES, choice("checkpointing", "Critic.layers.1"))
    optimizers = []
    for model in (Net(), Critic()):
        optimizers.append(torch.optim.AdamW(model.parameters(), foreach=True))
        train(model, optimizers[-1], range(1))
    assert [o.param_groups[0]["foreach"] for o in optimizers] == [False, False]
    assert is_on(model.layers[1])
    assert not is_on(model.layers[0])
    assert [entry["class"] for entry in attachment.report()["roots"]] == ["Net", "Critic"]


def test_two_models_that_share_an_optimizer_have_it_changed_once(attach: Callable[..., Attachment]) -> None:
    class Tower(Net):
        pass

    attachment = attach()
    first, second = Net(), Tower()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], foreach=True)
    hooks = len(optimizer._optimizer_state_dict_post_hooks)
    (first(batch_of(0)[0]) + second(batch_of(0)[0])).sum().backward()
    assert optimizer.param_groups[0]["foreach"] is False
    assert len(optimizer._optimizer_state_dict_post_hooks) == hooks + 1
    assert len(attachment.report()["roots"]) == 2


def test_a_part_that_was_evaluated_alone_first_is_named_by_its_own_class(attach: Callable[..., Attachment]) -> None:
    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Net()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.encoder(rows)

    attachment = attach(choice("checkpointing", "Net.layers.1"))
    model = Whole()
    with torch.no_grad():
        model.encoder(batch_of(0)[0])
    model(batch_of(0)[0]).sum().backward()
    assert is_on(model.encoder.layers[1])
    attachment.report()


def test_a_model_that_the_plan_does_not_know_runs_as_it_is_once_the_plans_own_is_there(
    attach: Callable[..., Attachment],
) -> None:
    told: list[str] = []
    attach(planned=[root(Net())], tell=told.append)
    train(*made())
    other = Block()
    optimizer = torch.optim.SGD(other.parameters())
    other(batch_of(0)[0]).sum().backward()
    optimizer.step()
    assert told == ["the plan knows of no Block, which runs unchanged"]
    assert inspect.ismethod(other.forward)


def test_inputs_are_reported_at_their_largest(attach: Callable[..., Attachment]) -> None:
    attachment = attach(choice("checkpointing", "Net.layers.1"))
    model = Net()
    for rows in (2, 6, 3):
        model(torch.randn(rows, 8))
    assert attachment.report()["roots"] == [
        {"class": "Net", "num_parameters": 2154, "inputs": {"0": [6, 8]}, "varying": ["0"]}
    ]


def test_a_copy_for_averages_is_no_model_of_its_own(attach: Callable[..., Attachment]) -> None:
    attachment = attach(planned=[root(Net())])
    model, optimizer = made()
    average = copy.deepcopy(model).requires_grad_(False)
    train(model, optimizer)
    average(batch_of(0)[0])
    later = copy.deepcopy(model).eval()
    with torch.no_grad():
        later(batch_of(0)[0])
    assert len(attachment.report()["roots"]) == 1


def test_a_virtual_run_of_a_plan_ends_with_its_verdict_at_the_margin_of_the_plan(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = "from tests.cpu.applied import *\nmodel, optimizer = made()\nmodel.cuda()\nrows = torch.zeros(4, 8).cuda()\n"
    text += "for _ in range(2):\n    model(rows).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    named = script(text)
    for budget, margin, verdict, code in (
        ("2GiB", "safe", "fits", 0),
        ("440MiB", "0", "fits at best", 0),
        ("440MiB", "likely", "does not fit", 1),
        ("470MiB", "likely", "fits without the safety margin", 0),
        ("470MiB", "safe", "fits without the safety margin", 1),
    ):
        dataclasses.replace(plan_of(), budget_bytes=parse_bytes(budget), margin=margin).save("plan.json")
        assert run(["run", "--virtual", "--plan", "plan.json", named]) == code
        said = capfd.readouterr().out
        assert said.startswith(f"{verdict}: 2 steps ran on a virtual")
        assert (", likely " in said) is (budget == "440MiB")


def test_an_interrupt_before_the_script_begins_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    plan_of().save("plan.json")
    monkeypatch.setattr("tightfit.runtime.run_script.run", interrupted)
    assert run(["run", "--plan", "plan.json", script(SCRIPT)]) == 130
    assert capfd.readouterr().err == "tightfit: interrupted\n"
