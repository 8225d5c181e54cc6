"""Triton launches, operators of the program's own and extensions in CUDA are recorded where their memory is known, and else named in one line."""

import json
from pathlib import Path

import pytest
from tests.forked_python import forked_python

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.errors import CaptureError
from tightfit.tape import Tape

PROGRAMS = Path(__file__).parent / "launch_programs.py"


def traced(function: str, num_steps: int = 1, **parameters: object) -> Tape:
    target = GeneratorFunction(location=str(PROGRAMS), function=function, parameters=parameters)
    return trace(target, label=function, device="A100 80GB", num_steps=num_steps).tape


def operators(tape: Tape) -> list[str]:
    return [tape.strings[name] for name in tape.operators.name]


def assumptions(tape: Tape) -> str:
    return "\n".join(f"{each.where}: {each.what}" for each in tape.assumptions)


def test_a_launch_is_an_operator_that_allocates_nothing() -> None:
    tape, without = traced("in_a_function", launches=True), traced("in_a_function", launches=False)
    assert operators(tape).count("triton.add_kernel") == 2
    assert [n for n in operators(tape) if not n.startswith("triton.")] == operators(without)
    assert tape.storages.num_bytes.tolist() == without.storages.num_bytes.tolist()
    launch = operators(tape).index("triton.add_kernel")
    num_bytes = 64 * 256 * 4
    assert (tape.operators.bytes_read[launch], tape.operators.bytes_written[launch]) == (2 * num_bytes, num_bytes)
    assert "Triton kernels: a launch allocates nothing" in assumptions(tape)


def test_tuning_takes_the_first_configuration_and_its_buffer_counts_in_the_first_step() -> None:
    tape = traced("tuned", num_steps=2)
    assert operators(tape).count("triton.tuned_kernel") == 2  # the runs of the benchmark are none of the program's
    assert operators(tape).count("aten.clone") == 2 * 3  # of what tuning restores, twice for each configuration
    buffers = [n for n in tape.storages.num_bytes.tolist() if n == 256 << 20]
    assert len(buffers) == 3
    assert "the 256 MiB that tuning allocates in the first step count" in assumptions(tape)


def test_a_launch_on_a_host_tensor_fails_as_on_a_card() -> None:
    with pytest.raises(
        CaptureError, match=r"ValueError at .*: Pointer argument \(at 1\) cannot be accessed from Triton"
    ):
        traced("of_host_tensors")


def test_the_driver_answers_for_the_card_and_an_empty_grid_launches_nothing() -> None:
    assert operators(traced("asks_the_driver")).count("triton.add_kernel") == 1


def test_what_a_kernel_writes_to_is_unknown_and_what_it_reads_is_not() -> None:
    assert "a value read back from the GPU" in assumptions(traced("written_values"))


def test_operators_run_their_python_or_take_the_shapes_of_their_fakes() -> None:
    tape = traced("operators")
    names = operators(tape)
    assert {"triton.add_kernel", "aten.sigmoid", "launch_programs.faked"} <= set(names)
    assert not {"launch_programs.composed", "launch_programs.in_python"} & set(names)
    # Also what is allocated inside of them.
    assert {3 << 22, 5 << 22} <= set(tape.storages.num_bytes.tolist())
    assert 2 * 8 * 64 * 4 in tape.storages.num_bytes.tolist()
    assert "launch_programs.faked: its outputs are those of its fake implementation" in assumptions(tape)


def test_an_operator_without_a_known_shape_says_what_it_needs() -> None:
    with pytest.raises(CaptureError) as raised:
        traced("native")
    said = str(raised.value)
    assert "\n" not in said
    assert "launch_programs.native" in said
    assert 'torch.library.register_fake("launch_programs::native")' in said


RUNS_ON_ZEROS = """\
import resource

import torch

torch.library.define("mine::first_row", "(Tensor x) -> Tensor")
torch.library.impl("mine::first_row", "cpu", lambda x: x[:1].clone())


def workload():
    weight = torch.ones(1, 1 << 20, device="cuda", requires_grad=True)
    while True:
        table = torch.empty(1 << 10, 1 << 20, device="cuda", dtype=torch.bfloat16)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = torch.ops.mine.first_row(table)
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert taken < 300 << 10, f"{taken} KiB"
        (weight * row).sum().backward()
        yield
"""


def test_an_operator_that_is_run_on_zeros_takes_no_memory_of_the_host_for_them(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(RUNS_ON_ZEROS)
    target = GeneratorFunction(location=str(tmp_path / "work.py"), function="workload", parameters={})
    tape = trace(target, label="work.py", device="A100 80GB", num_steps=1).tape
    assert tape.storages.num_bytes.max() == 2 << 30
    assert "mine.first_row: torch has no shape rule for it; its sizes are those of a run on host zeros" in assumptions(
        tape
    )


def test_an_extension_in_cuda_is_not_built_and_its_functions_say_what_they_need() -> None:
    with pytest.raises(CaptureError) as raised:
        traced("extension", is_wrapped=False)
    assert "twice.twice is a function of a CUDA extension" in str(raised.value)
    assert "register_fake" in str(raised.value)
    assert "launch_programs.twice" in operators(traced("extension", is_wrapped=True))


def test_a_parameter_that_is_given_other_data_keeps_its_gradient() -> None:
    assert "aten.add_.Tensor" in operators(traced("packs_its_parameters"))


def test_what_a_tensor_that_wraps_another_allocates_is_seen() -> None:
    tape = traced("wrapped")
    assert tape.storages.num_bytes.tolist() == [4 << 20, 4 << 20]
    assert "aten.add.Tensor" in operators(tape)


KERNELS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import triton, triton.language as tl
from triton.language import store
from tightfit.capture.patches.triton.stores import accesses

@triton.jit
def plain(x, y, out, n, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(out + o, tl.load(x + o) + tl.load(y + o), mask=o < n)

@triton.jit
def renamed(x, out, stride):
    p = out
    x += tl.program_id(0) * stride
    for i in range(4):
        store(p, tl.load(x))
        p += stride

@triton.jit
def swapped(a, b, flip):
    if flip:
        first, second = a, b
    else:
        first, second = b, a
    tl.atomic_add(first, tl.load(second))

@triton.jit
def indexed(x, index, out):
    tl.store(out + tl.load(index), tl.load(x))

@triton.jit
def block(x, out):
    p = tl.make_block_ptr(base=out, shape=(4,))
    tl.store(tl.advance(p, (1,)), tl.exp(tl.load(x)).to(out.dtype.element_ty))

@triton.jit
def helper(value, target):
    tl.store(target, value)

@triton.jit
def _load_row(rows, number):
    return rows + number

@triton.jit
def nested(x, out):
    helper(tl.load(_load_row(x, 1)), target=out + 1)

@triton.jit
def through_a_helper(x, rows):
    tl.store(_load_row(rows, 1), tl.load(x))

@triton.jit
def descriptor(x_desc, out_desc):
    out_desc.store([0, 0], x_desc.load([0, 0]))

@triton.jit
def assembly(x, out):
    tl.inline_asm_elementwise("st.global.f32 [$0], 0;", "=r,l", [out], dtype=tl.float32)

@triton.jit
def addresses(table, n):
    tl.store(tl.load(table).to(tl.pointer_type(tl.float32)), 0.0)

@triton.jit
def addresses_by_type(table, other):
    tl.store(tl.load(table).to(other.dtype), 0.0)

@triton.jit
def recursive(x, n):
    recursive(x, n - 1)

@triton.jit
def unknown(x, helps):
    helps(x)

@triton.jit
def of_all(*rest):
    tl.store(rest[0], 0.0)

found = {name: accesses(k, {}) for name, k in list(globals().items()) if isinstance(k, triton.runtime.jit.JITFunction)}
print(json.dumps({n: [sorted(a.read), sorted(a.written)] if a.is_known else None for n, a in found.items()}))
"""


def test_what_a_kernel_writes_to_is_found_in_its_source(tmp_path: Path) -> None:
    program = tmp_path / "kernels.py"
    program.write_text(KERNELS)
    stand_ins = str(PROGRAMS.parent.parent / "stand_ins")
    out = forked_python(str(program), stand_ins, check=True)
    found = json.loads(out.stdout)
    assert found["plain"] == [["B", "x", "y"], ["B", "out"]]  # constants are no tensors, and do no harm
    assert found["renamed"] == [["stride", "x"], ["out", "stride"]]
    assert found["swapped"] == [["a", "b"], ["a", "b"]]
    assert found["indexed"] == [["index", "x"], ["out"]]
    assert found["block"] == [["x"], ["out"]]
    assert found["nested"] == [["x"], ["out"]]
    assert found["through_a_helper"] == [["x"], ["rows"]]
    assert found["descriptor"] == [["x_desc"], ["out_desc"]]
    assert found["assembly"] == [["out"], ["out"]]
    assert found["unknown"] == [["helps", "x"], ["helps", "x"]]
    # Any argument of these may be written to.
    assert [found[name] for name in ("addresses", "addresses_by_type", "recursive", "of_all")] == [None] * 4


def test_of_an_expanded_tensor_its_elements_are_read_once(tmp_path: Path) -> None:
    program = tmp_path / "expanded.py"
    program.write_text(
        "import torch\n"
        "def steps():\n"
        "    whole, part = torch.ones(8, 256, 64, device='cuda'), torch.ones(8, 1, 64, device='cuda')\n"
        "    while True:\n"
        "        (whole * part.expand(8, 256, 64), part.expand(8, 256, 64).clone())\n"
        "        yield\n"
    )
    tape = trace(
        GeneratorFunction(location=str(program), function="steps", parameters={}),
        label="expanded",
        device="A100 80GB",
        num_steps=1,
    ).tape
    whole, part = 8 * 256 * 64 * 4, 8 * 64 * 4
    for name, read in (("aten.mul.Tensor", whole + part), ("aten.clone", part)):
        row = operators(tape).index(name)
        assert (tape.operators.bytes_read[row], tape.operators.bytes_written[row]) == (read, whole)
