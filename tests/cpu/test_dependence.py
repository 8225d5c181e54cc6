"""Rows followed through operators: what is said to keep them apart does so in numbers, and what does not is refused by operator and line."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tightfit.effects.independence.row_flow import NeedsValues
from tightfit.effects.independence.row_proof import Computation, Unfollowed, check_graph, check_hooks, prove
from tightfit.effects.independence.rows import Mixes, Pattern, RowLayout, pattern_of

torch.set_num_threads(1)
Function = Callable[[torch.Tensor], torch.Tensor]


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.function(value)


def _layout(function: Function, value: torch.Tensor, dim: int, part: int = 2) -> RowLayout:
    module = _Module(function)
    subject = Computation(
        call=lambda inputs: module(*inputs), inputs=[value], dims=[dim], module=module, is_contiguous=True
    )
    proof = prove(subject, value.shape[dim], [part])
    layout = proof.flow.rows.layout(proof.result)
    if layout is None or proof.flow.rows.is_uniform(proof.result):
        raise Mixes("no row in the result")
    return layout


def _rows(tensor: torch.Tensor, layout: RowLayout, num_rows: int) -> torch.Tensor:
    """Row by row, each as one dimension."""
    parts = tensor.movedim(layout.dim, 0).reshape(layout.outer, num_rows, layout.inner, -1)
    return parts.transpose(0, 1).reshape(num_rows, -1)


def _fixed(*shape: int) -> torch.Tensor:
    """The same numbers each time, without a generator, which a proof would not accept."""
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    return (numbers.square() * 0.37).sin().reshape(shape)


def _written(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(x.shape, dtype=x.dtype)
    made[..., 1:] = x[..., :-1]
    return made


def _put(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[torch.arange(x.shape[0]), 0] = 0.0
    return made


def _scattered(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).scatter_(-1, x.argsort(-1), x)


_TABLES = [_fixed(2, 6), _fixed(2, 6) * 2]


def _flat_mask(x: torch.Tensor, places: slice) -> torch.Tensor:
    mask = torch.ones(x.shape[0] * x.shape[1], dtype=x.dtype)
    mask[places].zero_()
    return x.flatten(0, 1) * mask[:, None]


def _column(x: torch.Tensor) -> torch.Tensor:
    square = torch.ones(x.shape[0], x.shape[0], dtype=x.dtype)
    square[:, 0] = x[:, 0, 0]
    return square.sum(1)[:, None] * x[:, 0]


def _counted_down(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[0])
    places -= 1
    return x[places, 0]


def _counted_by_numpy(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[0])
    places.numpy()[:] = 0
    return x[places, 0]


def _slope(x: torch.Tensor, energies: Function) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(energies(x).sum(), x, create_graph=True)[0]


def _energies(x: torch.Tensor) -> torch.Tensor:
    return (
        functional.layer_norm(functional.silu(x @ _fixed(x.shape[-1], 4)), (4,)).softmax(-1).log_softmax(1) * 3
    ).square()


STEPS: dict[str, Function] = {
    "tanh": torch.tanh,
    "softmax last": lambda x: x.softmax(-1),
    "softmax first": lambda x: x.softmax(0),
    "mean last": lambda x: x - x.mean(-1, keepdim=True),
    "mean first": lambda x: x - x.mean(0, keepdim=True),
    "sum of last": lambda x: x.sum(-1),
    "max of second": lambda x: x.amax(1),
    "transpose": lambda x: x.transpose(0, 1),
    "transpose last": lambda x: x.transpose(-1, -2),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "merge": lambda x: x.flatten(0, 1),
    "merge all": lambda x: x.reshape(-1),
    "split": lambda x: x.unflatten(0, (-1, 2)),
    "split last": lambda x: x.unflatten(-1, (2, -1)),
    "by size": lambda x: x.reshape(x.shape[0], -1),
    "columns by size": lambda x: x.reshape(-1, x.shape[0]),
    "second columns by size": lambda x: x.reshape(-1, x.shape[1]),
    "half columns by size": lambda x: x.transpose(-1, -2).reshape(-1, x.shape[0]).sum(1, keepdim=True) * 2,
    "powers by size": lambda x: torch.vander(x[:, 0, 0], x.shape[0]),
    "cross last": lambda x: torch.linalg.cross(x[..., :3], x[..., 1:4]),
    "cross second": lambda x: torch.linalg.cross(x[:, :3], x[:, :3].flip(-1), dim=1),
    "bilinear": lambda x: functional.bilinear(x, x * 2, _fixed(2, x.shape[-1], x.shape[-1])),
    "bilinear of one": lambda x: functional.bilinear(x, x[:1].expand(x.shape), _fixed(2, x.shape[-1], x.shape[-1])),
    "diagonals": torch.diag_embed,
    "diagonals in front": lambda x: torch.diag_embed(x, 0, 0, 1),
    "subtracted": lambda x: torch.rsub(x, x * 2),
    "solved": lambda x: torch.linalg.solve(x.transpose(-1, -2) @ x + 9 * torch.eye(x.shape[-1], dtype=x.dtype), x.transpose(-1, -2)),
    "solved by one": lambda x: torch.linalg.solve(_fixed(x.shape[-2], x.shape[-2]) + 9 * torch.eye(x.shape[-2], dtype=x.dtype), x),
    "solved for vectors": lambda x: torch.linalg.solve(x @ x.transpose(-1, -2) + 9 * torch.eye(x.shape[-2], dtype=x.dtype), x[..., 0]),
    "eigenvalues": lambda x: torch.linalg.eigvals(x @ x.transpose(-1, -2)).abs().sort(-1).values,
    "flip first": lambda x: x.flip(0),
    "flip last": lambda x: x.flip(-1),
    "cumsum second": lambda x: x.cumsum(1),
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x, x], -1),
    "cat first": lambda x: torch.cat([x, x], 0),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "gram": lambda x: x @ x.transpose(-1, -2),
    "product": lambda x: x @ _fixed(x.shape[-1], 6),
    "product left": lambda x: _fixed(3, x.shape[-2]) @ x,
    "einsum": lambda x: torch.einsum("...c,cd->...d", x, _fixed(x.shape[-1], 4)),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "positions": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "positions first": lambda x: x + torch.arange(x.shape[0], dtype=x.dtype).reshape(-1, *[1] * (x.dim() - 1)),
    "scale by size": lambda x: x * x.shape[0],
    "scale by other size": lambda x: x * x.shape[-1],
    "counted": lambda x: x / torch.ones(x.shape[0]).sum(),
    "sort": lambda x: x.sort(-1).values,
    "sort first": lambda x: x.sort(0).values,
    "gather": lambda x: x.gather(-1, x.argsort(-1)),
    "slopes": lambda x: _slope(x, _energies),
    "slopes of a softmax": lambda x: _slope(x, lambda x: x.softmax(-1).square() + functional.gelu(x) * x.sigmoid()),
    "slopes of a softmax over rows": lambda x: _slope(x, lambda x: x.softmax(0).square()),
    "slopes of what is mixed": lambda x: _slope(x, lambda x: x * x.detach().mean(0)),
    "of one size": lambda x: x * torch.ones_like(x.mean(0)) + torch.zeros_like(x.sum()),
    "counted down": _counted_down,
    "counted by numpy": _counted_by_numpy,
    "column": _column,
    "flat mask": lambda x: _flat_mask(x, slice(2)),
    "flat mask of each": lambda x: _flat_mask(x, slice(None, None, x.shape[1])),
    "renorm": lambda x: torch.renorm(x, 2.0, 0, 0.5),
    "renorm last": lambda x: torch.renorm(x, 2.0, -1, 0.5),
    "buckets": lambda x: torch.bucketize(x[:, 0, 0].contiguous(), _fixed(5).sort().values).to(x.dtype)[:, None],
    "buckets of rows": lambda x: torch.bucketize(x[:, 0, 0].contiguous(), x[:, 0, 1].contiguous()).to(x.dtype)[:, None],
    "triangle by size": lambda x: x @ torch.ones(x.shape[-1], 6, dtype=x.dtype).tril(-x.shape[0]),
    "table by size": lambda x: x[..., :2] @ _TABLES[x.shape[0] > 2],
    "result by size": lambda x: [x.tanh(), x.sin()][x.shape[0] > 2] * 2,
    "returned by size": lambda x: [x.tanh(), x.sin()][x.shape[0] > 2],
    "pick": lambda x: x[torch.arange(x.shape[0]), x.reshape(x.shape[0], -1).argmax(1) % x.shape[1]],
    "first row": lambda x: x[:1] + x,
    "first of second": lambda x: x[:, 0],
    "pad": lambda x: functional.pad(x, (1, 0)),
    "masked": lambda x: x.masked_fill(torch.ones(x.shape[-2:]).triu().bool(), 0.0),
    "where": lambda x: torch.where(x > 0, x, torch.zeros((), dtype=x.dtype)),
    "attention": lambda x: functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0],
    "convolution": lambda x: functional.conv1d(x, _fixed(4, x.shape[1], 3), padding=1),
    "expanded": lambda x: x + _fixed(1, *x.shape[1:]).expand(x.shape) * 2,
    "written": _written,
    "put": _put,
    "filled": lambda x: x.index_fill(0, torch.arange(x.shape[0]), 0.0),
    "filled along": lambda x: x.index_fill(1, torch.tensor([0]), 0.0),
    "scattered": _scattered,
    "embedding": lambda x: functional.embedding((x > 0).long(), _fixed(2, 3)).flatten(-2),
    "bags": lambda x: functional.embedding_bag((x[..., 0] > 0).long(), _fixed(2, 3)),
    "weighted bags": lambda x: functional.embedding_bag((x[..., 0] > 0).long(), _fixed(2, 3), per_sample_weights=x[..., 1], mode="sum"),
    "bags by offsets": lambda x: functional.embedding_bag((x[:, 0, 0] > 0).long(), _fixed(2, 3), torch.tensor([0, 1])),
    "bags of one row": lambda x: functional.embedding_bag((x[:1, :, 0] > 0).long(), _fixed(2, 3)) + x[:, 0, :3],
    "index table": lambda x: _fixed(5)[(x > 0).long()],
    "loop": lambda x: torch.stack([row * 2 for row in x]),
    "unbind": lambda x: torch.stack([row * 2 for row in x.unbind(1)], 1),
    "normalised": lambda x: x / x.norm(),
    "instance norm": functional.instance_norm,
    "pool": lambda x: functional.avg_pool1d(x, 2),
    "hard swish": functional.hardswish,
    "log sigmoid": functional.logsigmoid,
    "one hot": lambda x: functional.one_hot((x > 0).long(), 2).to(x.dtype).flatten(-2),
}  # fmt: skip


@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
    st.sampled_from([(4, 3, 6), (4, 4, 4), (6, 2, 4)]),
    st.integers(0, 1),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_yes_is_true_in_numbers(names: list[str], shape: tuple[int, ...], dim: int) -> None:
    def function(value: torch.Tensor) -> torch.Tensor:
        for name in names:
            value = STEPS[name](value)
        return value

    value = _fixed(*shape)
    num_rows = shape[dim]
    try:
        expected = function(value)
        layout = _layout(function, value, dim)
    except (Mixes, NeedsValues, RuntimeError, IndexError, ValueError):
        return
    for row in range(num_rows):
        other = value.clone()
        other.select(dim, row).mul_(-1.5).add_(0.1)
        changed = (_rows(function(other), layout, num_rows) != _rows(expected, layout, num_rows)).any(1)
        assert changed.nonzero().flatten().tolist() in ([], [row])
    parts = [_rows(function(part), layout, part.shape[dim]) for part in value.split(2, dim)]
    torch.testing.assert_close(torch.cat(parts), _rows(expected, layout, num_rows))


@pytest.mark.parametrize("name", sorted(STEPS))
@pytest.mark.parametrize("dim", [0, 1])
def test_each_step_alone_is_true_in_numbers(name: str, dim: int) -> None:
    test_a_yes_is_true_in_numbers.hypothesis.inner_test([name], (4, 3, 6), dim)
    test_a_yes_is_true_in_numbers.hypothesis.inner_test([name], (4, 4, 4), dim)


KEPT_APART = """tanh;softmax last;mean last;sum of last;max of second;transpose;contiguous;merge;by size;flip last;cumsum second;cat;stack;gram;
product;product left;einsum;layer norm;positions;scale by other size;sort;gather;pick;first of second;pad;masked;where;attention;convolution;
expanded;written;put;renorm;buckets;flat mask of each;scattered;slopes of a softmax;of one size;embedding;bags;weighted bags;index table;unbind;instance norm;pool;hard swish;log sigmoid;one hot;split last;transpose last;cross last;
cross second;bilinear;diagonals;subtracted;solved;solved by one;solved for vectors;eigenvalues"""


@pytest.mark.parametrize("name", [name.strip() for name in KEPT_APART.split(";")])
def test_what_keeps_examples_apart_is_not_refused(name: str) -> None:
    assert _layout(STEPS[name], _fixed(4, 3, 6), 0)


def test_refusals_name_the_operator_and_the_line() -> None:
    with pytest.raises(Mixes, match=r"aten\.mean\.dim works along the rows at test_dependence\.py:\d+"):
        _layout(STEPS["mean first"], _fixed(4, 3, 6), 0)
    with pytest.raises(
        Mixes, match=r"passes other numbers to aten\.mul\.Tensor for 4 rows than for 2 at test_dependence\.py"
    ):
        _layout(STEPS["scale by size"], _fixed(4, 3, 6), 0)
    with pytest.raises(Mixes, match="no rule"):
        _layout(lambda x: torch.linalg.solve_triangular(x, x, upper=True), _fixed(4, 3, 3), 0)


def test_what_is_mixed_and_dropped_is_no_obstacle() -> None:
    def watched(x: torch.Tensor) -> torch.Tensor:
        (x - x.mean(0)).square().sum()
        return x * 2

    assert _layout(watched, _fixed(4, 3, 6), 0) == RowLayout(dim=0)


def test_heads_and_examples_that_are_merged_are_followed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 3)).transpose(1, 2).flatten(0, 1)
        return heads @ heads.transpose(1, 2)

    assert _layout(function, _fixed(4, 3, 6), 0) == RowLayout(dim=0, inner=2)
    heads_first = lambda x: x.unflatten(-1, (2, 3)).permute(2, 0, 1, 3).flatten(0, 1)  # noqa: E731
    assert _layout(heads_first, _fixed(4, 3, 6), 0) == RowLayout(dim=0, outer=2)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_have_examples_where_they_say(kind: type[nn.RNNBase], batch_first: bool) -> None:
    net = kind(6, 5, batch_first=batch_first).double()
    examples = 0 if batch_first else 1
    assert _layout(lambda x: net(x)[0], _fixed(4, 3, 6), examples).dim == examples
    with pytest.raises((Mixes, NeedsValues)):
        _layout(lambda x: net(x)[0], _fixed(4, 3, 6), 1 - examples)


def test_hooks_and_foreign_gradients_are_seen() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    check_hooks(module)
    handle = module[0].register_forward_hook(lambda *_: None)
    with pytest.raises(Mixes, match="0 has a hook, which would see parts"):
        check_hooks(module)
    handle.remove()
    other = torch.ones(2, requires_grad=True)
    with pytest.raises(Mixes, match="tensors that are not its own"):
        check_graph(module(torch.ones(1, 2)) * other, list(module.parameters()))


@given(st.permutations(range(4)), st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_pattern_is_read_back_from_any_order_of_dimensions(order: list[int], dim: int, inner: int) -> None:
    shape = [2, 3, 4, 5]
    shape[dim] = 3 * inner
    layout = RowLayout(dim=order.index(dim), inner=inner)
    tensor = torch.empty(shape).permute(order)
    pattern = pattern_of(tensor, layout, 3)
    assert isinstance(pattern, Pattern)
    assert pattern.layout_in(tensor) == layout
    assert pattern.layout_in(tensor.unsqueeze(0)).dim == layout.dim + 1
    with pytest.raises(Mixes):
        pattern.layout_in(tensor.narrow(layout.dim, 0, inner))


def _left_out_for_one_row(rows: torch.Tensor) -> torch.Tensor:
    """Does not do what changes nothing where there is one row, as torch and libraries do."""
    table = torch.arange(rows.shape[1], dtype=rows.dtype)[None]
    if rows.shape[0] != 1:
        table = table.expand(rows.shape[0], -1)
    return (rows.t().contiguous().t() * table).contiguous().reshape(-1, rows.shape[1])


def _otherwise_for_one_row(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 if rows.shape[0] == 1 else rows.expand(2, *rows.shape)[0]


def test_parts_of_one_row_may_leave_out_what_does_nothing_there() -> None:
    assert _layout(_left_out_for_one_row, torch.randn(4, 6), 0, part=1).dim == 0
    with pytest.raises(Mixes, match="loops over the rows, or branches"):
        _layout(_otherwise_for_one_row, torch.randn(4, 6), 0, part=1)


@pytest.mark.parametrize("name", ["table by size", "result by size", "returned by size"])
def test_parts_of_one_row_choose_what_the_whole_does(name: str) -> None:
    with pytest.raises(Mixes, match=r"another (tensor|result)"):
        _layout(STEPS[name], _fixed(4, 6), 0, part=1)


def test_an_input_of_one_row_may_need_no_copy_where_more_rows_do() -> None:
    """Targets are a slice of a batch of ids, and a reshape copies them where there are several rows."""
    targets = torch.randn(4, 7)[:, 1:]
    assert _layout(lambda rows: rows.reshape(-1) * 2, targets, 0, part=1).dim == 0
    with pytest.raises(Mixes):
        _layout(lambda rows: rows.reshape(2, -1)[0], targets, 0, part=1)


@torch.library.custom_op("test_dependence::flip_into", mutates_args={"out"})
def _flip_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.flip(0))


def _flipped_by_an_operator(x: torch.Tensor) -> torch.Tensor:
    out = x * 0
    _flip_into(x, out)
    return out


def _flipped_by_foreach(x: torch.Tensor) -> torch.Tensor:
    out = x * 0
    torch._foreach_add_([out], [x.flip(0)])
    return out


@pytest.mark.parametrize("function", [_flipped_by_an_operator, _flipped_by_foreach])
def test_what_an_operator_writes_to_and_does_not_return_is_followed(function: Function) -> None:
    with pytest.raises(Mixes):
        _layout(function, _fixed(4, 3), 0)


def test_code_that_takes_the_address_of_a_tensor_is_not_followed() -> None:
    """On a card a kernel that it launches would write to that address; tensors without data have none."""

    def launched(x: torch.Tensor) -> torch.Tensor:
        return x * (x.data_ptr() + 1)

    with pytest.raises(Unfollowed, match="Cannot access data pointer"):
        _layout(launched, _fixed(4, 3), 0)


def test_a_proof_with_a_tensor_of_the_host_does_not_import_the_compiler() -> None:
    program = """
import sys, torch
from tightfit.capture.patches.eager import keep_compiler_out
from tightfit.effects.independence.row_proof import Computation, prove
keep_compiler_out()
layer = torch.nn.Linear(4, 4)
subject = Computation(call=lambda given: layer(given[0]) * torch.arange(4.0), inputs=[torch.ones(6, 4)], dims=[0], module=layer)
proof = prove(subject, 6, [3, 3])
print(tuple(proof.result.shape), "torch._dynamo.symbolic_convert" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "(6, 4) False\n"


def _forces(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(x.exp() * x.tanh(), x, grad_outputs=torch.ones_like(x), create_graph=True)[0]


def test_a_derivative_within_the_code_is_followed_and_nothing_saved_for_it_is_kept() -> None:
    assert _layout(_forces, _fixed(4, 3), 0) == RowLayout(dim=0)
    module = _Module(lambda x: x.exp().tanh())
    subject = Computation(
        call=lambda inputs: module(*inputs),
        inputs=[_fixed(4, 3)],
        dims=[0],
        module=module,
        is_contiguous=True,
    )
    # Fake tensors are not counted by `gc` alone: a node in C++ may keep what nobody can reach.
    result = weakref.ref(prove(subject, 4, [2]).result)
    gc.collect()
    assert result() is None
