"""Programs with Triton kernels and operators of their own, for `test_triton_launches` and `test_program_operators`. Run by traced processes alone."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "stand_ins"))

import triton
import triton.language as tl
from torch.library import custom_op, triton_op, wrap_triton


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (128, 256, 512)], key=["n"], restore_value=["out_ptr"])
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets), mask=offsets < n)


def added(x, y, launches=True):
    out = torch.empty_like(x)
    if launches:
        add_kernel[lambda given: (triton.cdiv(given["n"], given["BLOCK"]),)](x, y, out, x.numel(), BLOCK=1024)
    return out


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, launches):
        ctx.launches = launches
        return added(x, y, launches)

    @staticmethod
    def backward(ctx, grad):
        return added(grad, grad, ctx.launches), grad, None


def in_a_function(launches):
    """Launches in an autograd function, forward and backward."""
    model = torch.nn.Linear(256, 256).cuda()
    while True:
        x = torch.ones(64, 256, device="cuda")
        Added.apply(model(x), x, launches).sum().backward()
        model.zero_grad()
        yield


def tuned():
    while True:
        x = torch.ones(1 << 20, device="cuda")
        tuned_kernel[(1024,)](x, torch.empty_like(x), x.numel())
        yield


def of_host_tensors():
    while True:
        added(torch.ones(4, device="cuda"), torch.ones(4))
        yield


def asks_the_driver():
    """A persistent kernel: its grid depends on the card and on the compiled kernel, as in Triton's tutorial on softmax."""
    while True:
        card = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
        assert triton.runtime.driver.active.get_current_target().arch == 80
        x = torch.ones(4096, device="cuda")
        out = torch.empty_like(x)
        kernel = add_kernel.warmup(x, x, out, 4096, BLOCK=64, num_warps=8, grid=(1,))
        per_block = kernel.n_regs * card["warpSize"] * kernel.num_warps
        kernel[(card["multiprocessor_count"] * (card["max_num_regs"] // per_block), 1, 1)](x, x, out, 4096)
        add_kernel[(0,)](x, x, out, 0, BLOCK=64)
        yield


def written_values():
    """A small tensor whose values were known until a kernel wrote to it, beside one that is only read."""
    while True:
        x, out = torch.full((4,), 7.0, device="cuda"), torch.zeros(4, device="cuda")
        add_kernel[(1,)](x, x, out, 4, BLOCK=4)
        assert x.sum().item() == 28
        assert out.sum().item() != 0
        yield


def _operators():
    @triton_op("launch_programs::composed", mutates_args={})
    def composed(x: torch.Tensor) -> torch.Tensor:
        torch.empty(3 << 20, device=x.device)
        out = torch.empty_like(x)
        wrap_triton(add_kernel)[(1,)](x, x, out, x.numel(), BLOCK=64)
        return out

    @custom_op("launch_programs::in_python", mutates_args=(), device_types="cuda")
    def in_python(x: torch.Tensor) -> torch.Tensor:
        torch.empty(5 << 20, device=x.device)
        return x.sigmoid() * x

    @custom_op("launch_programs::faked", mutates_args=(), device_types="cuda")
    def faked(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("native code")

    faked.register_fake(lambda x: x.new_empty(2, *x.shape))
    composed.register_autograd(lambda ctx, grad: grad)
    in_python.register_autograd(lambda ctx, grad: grad)
    faked.register_autograd(lambda ctx, grad: grad[0] * 1)
    return composed, in_python, faked


def operators():
    """A `triton_op`, an operator in Python without a fake implementation, and one whose native code cannot run."""
    composed, in_python, faked = _operators()
    model = torch.nn.Linear(64, 64).cuda()
    while True:
        faked(in_python(composed(model(torch.ones(8, 64, device="cuda"))))).sum().backward()
        yield


def native():
    """An operator of which nothing is known but its schema."""

    @custom_op("launch_programs::native", mutates_args=(), device_types="cuda")
    def native(x: torch.Tensor) -> torch.Tensor:
        raise OSError("libnative.so")

    while True:
        native(torch.ones(4, device="cuda"))
        yield


def extension(is_wrapped):
    """An extension in CUDA that is compiled when the program starts, called as it is or in an operator with a fake implementation."""
    from torch.utils.cpp_extension import load_inline

    built = load_inline(
        "twice", "torch::Tensor twice(torch::Tensor x);", "torch::Tensor twice(torch::Tensor x) { ... }", ["twice"]
    )

    @custom_op("launch_programs::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return built.twice(x)

    twice.register_fake(torch.empty_like)
    while True:
        (twice if is_wrapped else built.twice)(torch.ones(4, device="cuda"))
        yield


def packs_its_parameters():
    """As optimizers of libraries do before they hand addresses to a kernel of their own."""
    parameter = torch.nn.Parameter(torch.ones(8, device="cuda"))
    while True:
        (parameter * 2).sum().backward()
        parameter.data = parameter.data.contiguous()
        parameter.grad = parameter.grad.contiguous()
        parameter.data.add_(parameter.grad)
        parameter.grad = None
        yield


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as quantised and sharded tensors do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        out = func(*(a.inner if isinstance(a, Wrapped) else a for a in args), **(kwargs or {}))
        return Wrapped(out) if isinstance(out, torch.Tensor) else out


def wrapped():
    while True:
        value = Wrapped(torch.empty(1 << 20, device="cuda")) + 1
        yield
        del value
