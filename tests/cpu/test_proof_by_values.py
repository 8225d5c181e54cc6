"""Where a few steps of a program are affordable on the host, a plan is proven by values; where they differ, nobody is told that it is exact."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.null.test_tape import small_tape as tape_of_one_operator

import tightfit
from tightfit.capture.targets.target_kinds import GeneratorFunction, Script, Target
from tightfit.fit.planning_progress import ProgressLog
from tightfit.fit.proof import Mismatch, Prover
from tightfit.fit.values import MODULES_WITH_DTYPES, differences
from tightfit.planner.plan import Choice, Proof
from tightfit.tape import Phase, Tape

# Many processes and traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

PROGRAM = """\
import sys
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, rows):
        return rows + self.drop(self.narrow(torch.nn.functional.gelu(self.wide(rows))))


class Counting(Block):
    def forward(self, rows):
        number = sys.getrecursionlimit()  # a place that nobody looks at
        sys.setrecursionlimit(number + 1)
        return super().forward(rows * (1 + number % 3))


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return rows


def workload(counts=False, num_rows=8192):
    model = Stack(Counting if counts else Block).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        rows = torch.randn(num_rows, 64, device="cuda")
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values") / "program.py"
    path.write_text(PROGRAM)
    return path


def small_tape() -> Tape:
    """One operator, of a backward pass."""
    tape = tape_of_one_operator()
    phases = np.full_like(tape.operators.phase, Phase.BACKWARD)
    return dataclasses.replace(tape, operators=dataclasses.replace(tape.operators, phase=phases))


def choice(where: str, technique: str = "checkpointing", *, exact: bool = True) -> Choice:
    return Choice(technique=technique, where=where, settings={}, saves_bytes=0, adds_seconds=0.0, exact=exact)


def proven(target: Target, chosen: Choice) -> Proof | list[Mismatch]:
    return Prover(target, small_tape(), device="RTX 4090", seconds=120.0, log=ProgressLog()).prove([chosen])


def test_a_plan_whose_values_are_those_of_the_plain_run_says_so_with_its_steps(file: Path) -> None:
    target = GeneratorFunction(location=str(file), function="workload", parameters={"num_rows": 16})
    proof = proven(target, choice("Stack.blocks.1"))
    assert isinstance(proof, Proof)
    assert (proof.kind, proof.steps) == ("values", 3)
    assert proof.seconds > 0
    assert proof.what.endswith("bit for bit")


def script_of(folder: Path, loop: str, *, counts: bool = False) -> Script:
    begin = PROGRAM[: PROGRAM.index("def workload")]
    begin += f"model = Stack({'Counting' if counts else 'Block'}).cuda()\n"
    begin += "optimizer = torch.optim.AdamW(model.parameters())\n"
    path = folder / "train.py"
    path.write_text(begin + loop)
    return Script(path=str(path), arguments=())


LOOP = """
for step in range(100):
    loss = model(torch.randn(16, 64, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    open("log.txt", "a").write("x")
"""


def test_a_script_is_proven_by_its_first_steps_and_leaves_nothing_behind(tmp_path: Path) -> None:
    proof = proven(script_of(tmp_path, LOOP + "raise SystemExit(1)  # not reached"), choice("Stack.blocks.1"))
    assert isinstance(proof, Proof)
    assert (proof.kind, proof.steps) == ("values", 3)
    assert proof.what.endswith("bit for bit")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


FOLLOWED = """
import threading
import torch
from tightfit.capture.child_process.host_script import ScriptOnHost

script = ScriptOnHost(1)
script.install()
inside, ended = threading.Event(), threading.Event()


class Transform(torch.nn.Module):
    def forward(self):
        inside.set()
        ended.wait()


thread = threading.Thread(target=Transform())
thread.start()
inside.wait()
torch.nn.BatchNorm1d(2)(torch.zeros(2, 2))
ended.set()
thread.join()
print(*(name for name, _ in script.buffers()))
"""


def test_a_model_is_followed_while_a_thread_is_inside_of_a_transform() -> None:
    run = subprocess.run([sys.executable, "-c", FOLLOWED], capture_output=True, text=True, check=True)
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert run.stdout.split() == [f"0:BatchNorm1d.{name}" for name in names]


def test_a_technique_that_changes_what_a_script_trains_is_named(tmp_path: Path) -> None:
    (found,) = proven(script_of(tmp_path, LOOP, counts=True), choice("Stack.blocks.1"))
    assert isinstance(found, Mismatch)
    assert (found.technique, found.what) == ("checkpointing", "0:Stack.blocks.0.wide.weight ends with other values")


AMP = """
scaler = torch.amp.GradScaler("cuda")
for step in range(100):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(16, 64, device="cuda")).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.is_enabled() and scaler.get_scale() > 1
"""

ASKED = "; ".join(
    (
        "torch.cuda.synchronize()",
        "print(torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info(), torch.cuda.memory_summary()[:3])",
        "stream = torch.cuda.Stream()",
        "event = stream.record_event()",
        "event.synchronize()",
        "loss.record_stream(stream)",
        "torch.cuda.empty_cache()",
        "print(torch.cuda.get_rng_state(), torch.cuda.get_device_capability(), torch.cuda.is_bf16_supported())",
        "torch.cuda.set_device(0)",
    )
)


NARROW = """
import io
wide = (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2).to(torch.float16), torch.zeros(2).float(), torch.zeros(2).half())
assert all(tensor.dtype == torch.float64 for tensor in (*wide, *model.to(torch.float32).parameters()))
assert torch.zeros(2, dtype=torch.complex64).dtype == torch.complex128
file = io.BytesIO()
torch.save(wide, file)
file.seek(0)
assert [tensor.dtype for tensor in torch.load(file)] == 4 * [torch.float64]
"""


@pytest.mark.parametrize(
    ("loop", "kind", "words"),
    [
        (NARROW + LOOP, "values", "bit for bit"),
        (LOOP.replace("range(100)", "range(2)"), "values", "2 steps on the host"),
        ("def main():\n" + "".join(f"    {line}\n" for line in LOOP.splitlines()) + "main()\n", "values", ""),
        (LOOP.replace("    loss = ", "    try:\n        0 / 0\n    except:\n        pass\n    loss = "), "values", ""),
        (
            LOOP.replace(
                "randn(16, 64",
                "from_numpy(__import__('numpy').random.default_rng().normal(size=(16, 64))).to(torch.get_default_dtype()).to(",
            ).replace('to(, device="cuda")', 'to("cuda")'),
            "structure",
            "two plain runs",
        ),
        ("assert torch.cuda.is_available()\n" + LOOP, "values", "bit for bit"),
        ("assert torch.cuda.get_device_name() == 'NVIDIA GeForce RTX 4090'\n" + LOOP, "values", "bit for bit"),
        (LOOP.replace("    optimizer.step()", "    optimizer.step()\n    " + ASKED), "values", "bit for bit"),
        (AMP, "values", "bit for bit"),
        (
            "assert not torch.cuda.is_available()\n" + LOOP,
            "values",
            "gave the same weights, buffers and random states bit for bit, as the program runs without a card",
        ),
        ("raise OSError('no data')\n" + LOOP, "structure", ": no data"),
        ("model(torch.randn(16, 64).cuda()).sum().backward()\n", "structure", "no optimizer of torch.optim stepped"),
    ],
    ids=[
        "less than double precision by name",
        "few steps",
        "a function",
        "a bare except",
        "random from outside",
        "only with a card",
        "the card's name",
        "the card is asked",
        "AMP",
        "only without a card",
        "not at all",
        "no optimizer",
    ],
)
def test_scripts_are_followed_to_where_their_steps_are_over(tmp_path: Path, loop: str, kind: str, words: str) -> None:
    found = proven(script_of(tmp_path, loop), choice("Stack.blocks.1"))
    assert isinstance(found, Proof)
    assert found.kind == kind, found.what
    assert words in found.what


TABLES = """
import importlib, pkgutil, sys
import torch
import tightfit.effects, tightfit.engine, tightfit.runtime, tightfit.techniques, tightfit.torch_hooks

NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)

def holds(value):
    if isinstance(value, dict):
        return any(map(holds, [*value, *value.values()]))
    return any(map(holds, value)) if isinstance(value, list | tuple | set | frozenset) else value in NARROW if isinstance(value, torch.dtype) else False

for room in (tightfit.effects, tightfit.engine, tightfit.runtime, tightfit.techniques, tightfit.torch_hooks):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        try:
            names = vars(importlib.import_module(module.name))
        except ModuleNotFoundError:
            continue
        if any(holds(value) for name, value in names.items() if not name.startswith("__")):
            print(module.name)
"""


def test_tables_of_dtypes_are_made_before_narrow_types_are_replaced_by_wide_ones() -> None:
    found = subprocess.run([sys.executable, "-c", TABLES], capture_output=True, text=True, check=True)
    assert tuple(found.stdout.split()) == MODULES_WITH_DTYPES


def test_a_technique_that_changes_values_is_named(file: Path) -> None:
    parameters = {"num_rows": 16, "counts": True}
    target = GeneratorFunction(location=str(file), function="workload", parameters=parameters)
    (found,) = proven(target, choice("Stack.blocks.1"))
    assert isinstance(found, Mismatch)
    assert found.technique == "checkpointing"
    assert found.what.startswith("what step 2 yields is ")


def test_a_plan_is_made_without_the_technique_whose_values_differ(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.fit.planning.DEFAULT_SECONDS", 600.0)
    left_out = ("selective_checkpointing", "nested_checkpointing", "tiled_tokens", "optimizer_kernel", "empty_cache")
    left_out += ("update_in_backward", "allocator_settings", "zero_grad")
    plan = tightfit.plan(
        f"{file}:workload", "RTX 4090", budget="585MiB", parameters=["counts=True"], without=left_out, steps=2
    )
    assert "checkpointing" not in {c.technique for c in plan.choices}
    assert not plan.fits
    (row,) = [a for a in plan.alternatives if a.name == "checkpointing" and a.why.startswith("refused: ")]
    assert "its results on the host differ from those of the plain run: what step 2 yields is " in row.why


@pytest.mark.parametrize(
    ("target", "chosen", "flops", "why"),
    [
        (Script(path="train.py", arguments=()), choice("Net.h.0"), 1e13, "on the host"),
        (GeneratorFunction(location="m.py", function="f", parameters={}), choice("Net.h.0"), 1e13, "on the host"),
        (
            GeneratorFunction(location="m.py", function="f", parameters={}),
            choice("optimizer", "low_bit_states", exact=False),
            1.0,
            "the plan is lossy",
        ),
    ],
)
def test_what_is_not_affordable_or_has_side_effects_is_not_run(
    target: Target, chosen: Choice, flops: float, why: str
) -> None:
    tape = small_tape()
    operators = dataclasses.replace(tape.operators, flops=tape.operators.flops * 0 + flops)
    tape = dataclasses.replace(tape, operators=operators)
    proof = Prover(target, tape, device="RTX 4090", seconds=20.0, log=ProgressLog()).prove([chosen])
    assert isinstance(proof, Proof)
    assert proof.kind == "structure"
    assert proof.what.startswith("not verified by values: ") and why in proof.what


def test_values_that_differ_by_rounding_are_the_same_up_to_the_order_of_sums_alone() -> None:
    plain = {"losses": [1.0], "weights": {}, "buffers": {}, "torch": 1, "python": "", "numpy": ""}
    other = {**plain, "losses": [1.0 + 1e-9]}
    assert list(differences(plain, other, is_bitwise=False)) == []
    assert list(differences(plain, other, is_bitwise=True)) == ["what step 1 yields is 1 instead of 1"]
    assert list(differences(plain, {**plain, "numpy": "drawn"}, is_bitwise=False)) == [
        "the random state of numpy ends as another"
    ]


def test_an_infinite_value_does_not_hide_what_is_beside_it() -> None:
    plain = {"losses": [], "weights": {}, "buffers": {}, "torch": 1, "python": "", "numpy": ""}
    one, other = ({**plain, "buffers": {"mask": torch.tensor([-torch.inf, each])}} for each in (1.0, 2.0))
    assert list(differences(one, one, is_bitwise=False)) == []
    assert list(differences(one, other, is_bitwise=False)) == ["mask ends with other values"]
