"""What the virtual GPU relies on inside torch: a release that moves any of it breaks these tests, and not the product."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.forked_python import forked_python

from tightfit.capture.patches import native
from tightfit.errors import CaptureError

INCLUDE = Path(torch.__file__).parent / "include"


def test_the_hooks_begin_with_the_three_questions_that_are_answered():
    header = (INCLUDE / "ATen" / "detail" / "AcceleratorHooksInterface.h").read_text()
    virtuals = re.findall(r"^\s*virtual\s+(.*?)\(", header, re.MULTILINE)
    names = [declaration.split()[-1] for declaration in virtuals[:4]]
    assert names == ["~AcceleratorHooksInterface", "isBuilt", "isAvailable", "hasPrimaryContext"]


def test_the_guard_registry_is_a_plain_array_indexed_by_device_type():
    header = (INCLUDE / "c10" / "core" / "impl" / "DeviceGuardImplInterface.h").read_text()
    assert re.search(r"std::atomic<const DeviceGuardImplInterface\*>", header)
    assert "device_guard_impl_registry" in header
    # torch 2.9 has moved it.
    homes = (INCLUDE / "torch" / "headeronly" / "core", INCLUDE / "c10" / "core")
    types = next(home / "DeviceType.h" for home in homes if (home / "DeviceType.h").exists())
    assert re.search(r"\bCUDA = 1\b", types.read_text())


BACKWARD = """
import os
import torch
from tightfit.capture.patches import native
{change}
native.pretend_cuda_is_built()
native.pretend_cuda_is_built()
torch.cuda._lazy_init = lambda: None
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    weight = torch.ones(3, 3, device="cuda", requires_grad=True)
    hidden = torch.ones(2, 3, device="cuda") @ weight
    # The gradient of what is used twice is a sum, which is made in a stream that the guard says.
    (hidden @ weight + hidden).sum().backward()
    print(torch.accelerator.current_accelerator(), weight.grad.device, tuple(weight.grad.shape), flush=True)
os._exit(0)
"""
OWN_GUARD = """
import dataclasses
native.ENSURE_GUARD = dataclasses.replace(native.ENSURE_GUARD, first="99.0")
"""


@pytest.mark.parametrize("change", ["", OWN_GUARD], ids=["torch's guard", "ours, as up to torch 2.9"])
def test_backward_runs_on_cuda_tensors_without_data(change: str):
    done = forked_python("-c", BACKWARD.format(change=change))
    assert done.stdout == "cuda cuda:0 (3, 3)\n", done.stderr


def test_a_machine_with_other_instructions_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: "riscv64")
    native.ones_and_zero.cache_clear()
    with pytest.raises(CaptureError, match=r"no device guard for \w+ on riscv64, .* torch 2.10 and later need none"):
        native.ones_and_zero()


def test_a_process_that_ends_by_itself_ends_without_a_fault():
    program = """
from tightfit.capture.patches import native
native.pretend_cuda_is_built()
"""
    # What is freed is overwritten.
    environ = {**os.environ, "PYTHONMALLOC": "malloc", "MALLOC_PERTURB_": "85"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr


def test_every_private_name_that_is_replaced_or_called_exists():
    private = {
        torch._C: (
            "_current_autograd_node",
            "_set_only_lift_cpu_tensors",
            "_storage_Use_Count",
            "_swap_tensor_impl",
        ),
        torch.autograd: ("_engine_run_backward", "_get_sequence_nr"),
        torch.nn.Module: ("_apply",),
        torch: ("_has_compatible_shallow_copy_type",),
    }
    missing = [f"{owner}.{name}" for owner, names in private.items() for name in names if not hasattr(owner, name)]
    assert missing == []


MISSING = """
from tightfit.capture.patches import manifest, native
import dataclasses, torch
{change}
try:
    native.pretend_cuda_is_built()
except native.UnsupportedTorch as error:
    print(error)
print(torch.accelerator.current_accelerator(), len(native._kept_alive))
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            'native.CUDA_HOOKS = dataclasses.replace(manifest.CUDA_HOOKS, name="gone")',
            "has no symbol gone in its libtorch_cpu, which the virtual GPU needs to have cuda count as an accelerator",
        ),
        pytest.param(
            "native.SLOTS = tuple(dataclasses.replace(slot, index=slot.index + 1) for slot in manifest.SLOTS)",
            "has no isBuilt in slot 3 of its CUDA hooks, which the virtual GPU needs to say that torch was built with CUDA",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "native._registry()[native._CUDA] = native._registry()[native._CPU]",
            "keeps its device guards in another way, which the virtual GPU needs to register a device guard",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build has a guard of its own")
def test_what_is_elsewhere_is_told_before_anything_is_redirected(change: str, said: str) -> None:
    done = forked_python("-c", MISSING.format(change=change), check=True)
    line, state = done.stdout.splitlines()
    assert line.startswith(f"torch {torch.__version__} {said}")
    assert "are known to work: install one of them" in line
    assert state == "None 0"
