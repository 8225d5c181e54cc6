"""A causal kernel leaves out the scores above the diagonal, forward and backward, whichever kernel it is."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from tightfit.capture.dispatch.flops import computed_share, formula
from tightfit.capture.dispatch.geometry import sizes_of

aten = torch.ops.aten
KERNELS = ("flash", "efficient", "cudnn")


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "share"),
    [
        pytest.param(100, 100, 1.0, id="one tile, computed whole"),
        pytest.param(256, 256, 3 / 4, id="two by two"),
        pytest.param(1024, 1024, 36 / 64, id="the context of GPT-2"),
        pytest.param(65536, 65536, 0.5, id="half in the limit"),
        pytest.param(128, 1024, 1 / 8, id="one row of tiles"),
        pytest.param(1024, 128, 1.0, id="one column of tiles"),
    ],
)
def test_the_tiles_above_the_diagonal_are_left_out(num_queries, num_keys, share):
    assert computed_share(num_queries, num_keys) == pytest.approx(share, rel=2e-3)


def arguments(operator, **given):
    """Meta tensors for the first tensors of an operator, and the values given by name for the rest."""
    tensor = torch.empty(2, 4, 1024, 64, device="meta")
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    wanted = {"query": tensor, "key": tensor, "value": tensor, "grad_out": tensor, "grad_out_": tensor, "out": tensor}
    return [(wanted | given).get(name) for name in names]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("way", ["", "_backward"])
def test_every_fused_kernel_is_counted_so(kernel, way):
    operator = getattr(aten, f"_scaled_dot_product_{kernel}_attention{way}").default
    count, whole = formula(operator), flop_registry[operator._overloadpacket]
    output = torch.empty(2, 4, 1024, 64, device="meta")
    plain, causal = (arguments(operator, is_causal=is_causal) for is_causal in (False, True))
    full = whole(*plain, out_val=output)
    products = 5 if way else 2
    assert full == products * 2 * 2 * 4 * 1024 * 1024 * 64
    assert count(*plain, out_val=output) == full
    assert count(*causal, out_val=output) == full * 36 // 64


def test_heads_of_keys_that_queries_share_are_counted_for_each_head_of_queries():
    operator = aten._scaled_dot_product_flash_attention.default
    whole, shared = (
        [torch.empty(2, heads, 64, 16, device="meta") for heads in (8, num_keys, num_keys)] for num_keys in (8, 2)
    )
    results = [formula(operator)(*given, out_val=None) for given in (whole, shared)]
    assert results == [2 * 2 * 2 * 8 * 64 * 64 * 16] * 2


def test_what_has_no_mask_is_counted_as_torch_does():
    assert formula(aten.mm.default) is flop_registry[aten.mm]
    assert formula(aten.add.Tensor) is None


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
@pytest.mark.parametrize("overload", ["dtype", "dtype_out"])
def test_a_product_in_another_dtype_is_counted_as_the_same_product(name, overload):
    """trl's loss multiplies in bfloat16 and adds in float32, with `out`."""
    operator = getattr(getattr(aten, name), overload)
    batch = (2,) if "bmm" in name else ()
    left, right = torch.empty(*batch, 8, 16, device="meta"), torch.empty(*batch, 16, 4, device="meta")
    out = torch.empty(*batch, 8, 4, device="meta")
    given = ([out] if "add" in name else []) + [left, right]
    keywords = {"out": out} if overload == "dtype_out" else {}
    count, plain = formula(operator), flop_registry[operator._overloadpacket]
    assert count(*given, torch.float32, **keywords, out_val=out) == plain(*given, out_val=out) > 0


@pytest.mark.parametrize(
    ("weight", "stride", "is_transposed", "groups"),
    [
        pytest.param((12, 8, 3, 3), 1, False, 1, id="dense, as torch counts"),
        pytest.param((8, 12, 3, 3), 2, True, 1, id="transposed, as torch counts"),
        pytest.param((16, 2, 3, 3), 1, False, 4, id="of groups, which torch's formula forgets"),
        pytest.param((8, 1, 3, 3), 2, False, 8, id="depthwise"),
    ],
)
def test_the_gradients_of_a_convolution_take_twice_its_forward_pass(weight, stride, is_transposed, groups):
    with torch.device("meta"):
        tensor, filters = torch.empty(4, 8, 16, 16), torch.empty(weight)
        rest = ([stride] * 2, [1, 1], [1, 1], is_transposed, [0, 0], groups)
        output = aten.convolution(tensor, filters, None, *rest)
    forward = formula(aten.convolution.default)(tensor, filters, None, *rest, out_val=output)
    backward = formula(aten.convolution_backward.default)
    operands = (output, tensor, filters, None, *rest)
    assert backward(*operands, [True, True, False], out_val=None) == 2 * forward
    assert backward(*operands, [False, True, True], out_val=None) == forward
    batch, rows, columns, depth, *_ = sizes_of(aten.convolution.default)((tensor, filters, None, *rest), output)
    assert 2 * batch * rows * columns * depth == forward
    assert sizes_of(aten.convolution_backward.default)((*operands, [True, True, False]), None)[:4] == (
        batch,
        rows,
        columns,
        depth,
    )


@pytest.mark.parametrize(
    ("left", "right", "out", "sizes"),
    [
        pytest.param((40, 16), (4, 16, 24), (40, 24), (4, 10, 24, 16), id="rows in groups, as of experts"),
        pytest.param((24, 40), (40, 16), (4, 24, 16), (4, 24, 16, 10), id="the gradient of the experts' weights"),
        pytest.param((4, 24, 16), (16, 40), (24, 40), (4, 24, 10, 16), id="columns in groups"),
    ],
)
def test_a_product_of_groups_meets_each_group_alone(left, right, out, sizes):
    made = [torch.empty(shape, device="meta") for shape in (left, right, out)]
    operator = aten._grouped_mm.default
    rows, columns, depth = sizes[1:4]
    assert formula(operator)(made[0], made[1], out_val=made[2]) == 2 * 4 * rows * columns * depth
    assert sizes_of(operator)(made[:2], made[2])[:4] == sizes
