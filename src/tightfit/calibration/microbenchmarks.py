"""The operators that are measured: a small set of shapes of each class, as they occur in training.

FLOPs and bytes are counted as the virtual GPU counts them on a tape, because the measured fractions are applied to those.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from tightfit.devices.calibration import OperatorClass
from tightfit.devices.device import DType

_TYPES: Mapping[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}
_ITEM_BYTES: Mapping[DType, int] = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operator on one shape: `make` allocates its tensors on the GPU and returns a callable that runs it."""

    name: str
    kind: OperatorClass
    dtype: DType
    flops: float
    num_bytes: int
    make: Callable[[], Callable[[], Any]]


def works() -> Iterator[Work]:
    """Every shape, by class."""
    for dtype in _TYPES:
        yield from _products(dtype)
        yield from _convolutions(dtype)
    for dtype in ("bfloat16", "float16"):
        yield from _attention(dtype)
    yield from _pointwise()
    yield from _normalisation()
    yield from _others()


def _tensor(*shape: int, dtype: DType = "float32", gradient: bool = False) -> torch.Tensor:
    # Random data: products of constants draw less power, and are up to a tenth faster than real ones.
    return torch.randn(*shape, device="cuda", dtype=_TYPES[dtype], requires_grad=gradient)


def _products(dtype: DType) -> Iterator[Work]:
    shapes = {
        "8192 cubed": (1, 8192, 8192, 8192),
        "4096 cubed": (1, 4096, 4096, 4096),
        "feed-forward 8192 x 4096 x 14336": (1, 8192, 14336, 4096),
        "skinny 16 x 8192 x 8192": (1, 16, 8192, 8192),
        "batched 64 x 1024 x 1024 x 512": (64, 1024, 1024, 512),
    }
    for name, (count, rows, columns, inner) in shapes.items():

        def make(count: int = count, rows: int = rows, columns: int = columns, inner: int = inner) -> Callable[[], Any]:
            batch = (count,) if count > 1 else ()
            left, right = _tensor(*batch, rows, inner, dtype=dtype), _tensor(*batch, inner, columns, dtype=dtype)
            product = torch.bmm if batch else torch.mm
            out = product(left, right)
            return lambda: product(left, right, out=out)

        num_items = count * (rows * inner + inner * columns + rows * columns)
        yield Work(
            name=f"product {name}, {dtype}",
            kind="matmul",
            dtype=dtype,
            flops=2.0 * count * rows * columns * inner,
            num_bytes=num_items * _ITEM_BYTES[dtype],
            make=make,
        )


def _convolutions(dtype: DType) -> Iterator[Work]:
    shapes = {
        "3 x 3, 64 to 64 at 56": (64, 64, 64, 56, 3),
        "3 x 3, 256 to 256 at 14": (128, 256, 256, 14, 3),
        "1 x 1, 256 to 1024 at 14": (128, 256, 1024, 14, 1),
    }
    for name, (batch, inner, outer, side, kernel) in shapes.items():
        flops = 2.0 * batch * outer * side * side * inner * kernel * kernel
        image, weight, out = batch * inner * side * side, outer * inner * kernel * kernel, batch * outer * side * side

        def tensors(
            batch: int = batch, inner: int = inner, outer: int = outer, side: int = side, kernel: int = kernel
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return (
                _tensor(batch, inner, side, side, dtype=dtype, gradient=True),
                _tensor(outer, inner, kernel, kernel, dtype=dtype, gradient=True),
            )

        def forward(tensors: Any = tensors, kernel: int = kernel) -> Callable[[], Any]:
            image, weight = (tensor.detach() for tensor in tensors())
            return lambda: functional.conv2d(image, weight, padding=kernel // 2)

        def backward(tensors: Any = tensors, kernel: int = kernel) -> Callable[[], Any]:
            image, weight = tensors()
            # The forward pass runs once, in `make`; only its backward is timed.
            return _backward(functional.conv2d(image, weight, padding=kernel // 2), image, weight)

        for direction, make, factor, num_items in (
            ("forward", forward, 1, image + weight + out),
            ("backward", backward, 2, 2 * (image + weight) + out),
        ):
            yield Work(
                name=f"convolution {name}, {direction}, {dtype}",
                kind="convolution",
                dtype=dtype,
                flops=factor * flops,
                num_bytes=num_items * _ITEM_BYTES[dtype],
                make=make,
            )


def _attention(dtype: DType) -> Iterator[Work]:
    """Not causal: a tape counts the FLOPs of all pairs, and a causal kernel leaves half of them out."""
    for length, head in ((4096, 64), (4096, 128), (1024, 64)):
        batch, heads = 4, 16
        flops = 4.0 * batch * heads * length * length * head
        num_items = batch * heads * length * head

        def tensors(length: int = length, head: int = head) -> list[torch.Tensor]:
            return [_tensor(4, 16, length, head, dtype=dtype, gradient=True) for _ in range(3)]

        def forward(tensors: Any = tensors) -> Callable[[], Any]:
            query, key, value = (tensor.detach() for tensor in tensors())
            return lambda: functional.scaled_dot_product_attention(query, key, value)

        def backward(tensors: Any = tensors) -> Callable[[], Any]:
            inputs = tensors()
            return _backward(functional.scaled_dot_product_attention(*inputs), *inputs)

        for direction, make, factor, count in (("forward", forward, 1.0, 4), ("backward", backward, 2.5, 8)):
            yield Work(
                name=f"attention of {length} tokens, heads of {head}, {direction}, {dtype}",
                kind="attention",
                dtype=dtype,
                flops=factor * flops,
                num_bytes=count * num_items * _ITEM_BYTES[dtype],
                make=make,
            )


def _pointwise() -> Iterator[Work]:
    # 256 MiB in bfloat16, far larger than any L2 cache (50 MB on an H100), so that the bandwidth is that of DRAM.
    num_items = 1 << 27
    for name, function, num_read in (
        ("gelu", functional.gelu, 1),
        ("add", torch.add, 2),
        ("dropout", lambda x: functional.dropout(x, 0.1), 1),
    ):

        def make(function: Any = function, num_read: int = num_read) -> Callable[[], Any]:
            # Separate tensors: x + x would read the second operand from the cache.
            values = [_tensor(num_items, dtype="bfloat16") for _ in range(num_read)]
            return lambda: function(*values)

        extra = num_items if name == "dropout" else 0  # the mask, a byte each
        yield Work(
            name=f"{name} of 2^27",
            kind="elementwise",
            dtype="float32",
            flops=0.0,
            num_bytes=(num_read + 1) * 2 * num_items + extra,
            make=make,
        )

    def clone() -> Callable[[], Any]:
        values = _tensor(num_items, dtype="bfloat16")
        return values.clone

    yield Work(
        name="copy of 256 MiB on the card",
        kind="copy",
        dtype="float32",
        flops=0.0,
        num_bytes=4 * num_items,
        make=clone,
    )

    def softmax() -> Callable[[], Any]:
        values = _tensor(1 << 14, 1 << 12)
        return lambda: torch.softmax(values, -1)

    yield Work(
        name="softmax of 2^14 x 2^12",
        kind="reduction",
        dtype="float32",
        flops=0.0,
        num_bytes=2 * 4 << 26,
        make=softmax,
    )


def _normalisation() -> Iterator[Work]:
    rows, width = 1 << 14, 1 << 12

    def layer(is_backward: bool) -> Callable[[], Any]:
        values, weight, bias = _tensor(rows, width, gradient=True), *(_tensor(width, gradient=True) for _ in range(2))
        if is_backward:
            return _backward(functional.layer_norm(values, (width,), weight, bias), values, weight, bias)
        # Detached, so that no autograd node is created and no input saved.
        return lambda: functional.layer_norm(values.detach(), (width,), weight.detach(), bias.detach())

    yield Work(
        name="layer norm of 2^14 x 2^12, forward",
        kind="normalisation",
        dtype="float32",
        flops=0.0,
        num_bytes=2 * 4 << 26,
        make=lambda: layer(False),
    )
    yield Work(
        name="layer norm of 2^14 x 2^12, backward",
        kind="normalisation_backward",
        dtype="float32",
        flops=0.0,
        num_bytes=3 * 4 << 26,
        make=lambda: layer(True),
    )


def _others() -> Iterator[Work]:
    rows, width, num_tokens = 50_000, 1 << 10, 1 << 16

    def lookup() -> Callable[[], Any]:
        table, tokens = _tensor(rows, width), torch.randint(rows, (num_tokens,), device="cuda")
        return lambda: functional.embedding(tokens, table)

    yield Work(
        name="lookup of 2^16 rows of 2^10",
        kind="embedding",
        dtype="float32",
        flops=0.0,
        num_bytes=2 * 4 * num_tokens * width,
        make=lookup,
    )
    num_items = 1 << 26

    def adamw() -> Callable[[], Any]:
        parameter = _tensor(num_items)
        parameter.grad = _tensor(num_items)
        return torch.optim.AdamW([parameter], fused=True).step

    yield Work(
        name="fused AdamW of 2^26",
        kind="optimizer",
        dtype="float32",
        flops=0.0,
        num_bytes=8 * 4 * num_items,  # a tape counts the gradient as written too, since the operator may
        make=adamw,
    )


def _backward(out: torch.Tensor, *inputs: torch.Tensor) -> Callable[[], Any]:
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
