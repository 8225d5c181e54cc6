"""Rules of `row_flow` for matrix products, attention and recurrent kernels."""

from collections.abc import Sequence

import torch

from tightfit.effects.independence.row_flow import Flow, OperatorCall, Result
from tightfit.effects.independence.row_states import Uniform
from tightfit.effects.independence.rows import Mixes, RowLayout
from tightfit.effects.independence.rules import behind, only, rule

_CONTRACTS = "sums over the rows"


def _product(flow: Flow, left: torch.Tensor, right: torch.Tensor, num_batch: int) -> RowLayout | None:
    """The layout of the rows in a matrix product whose first `num_batch` dimensions are batch dimensions."""
    if flow.rows.is_uniform(left) or flow.rows.is_uniform(right):
        raise Mixes("multiplies a tensor sized by the number of rows")
    mine, its = flow.rows.layout(left), flow.rows.layout(right)
    last = num_batch + 1
    if mine is not None and its is not None:
        if mine != its or mine.dim >= num_batch:
            raise Mixes(_CONTRACTS if mine.dim == last or its.dim == num_batch else "combines rows with other rows")
        return mine
    found = mine or its
    if found is None:
        return None
    other = right if mine is not None else left
    if found.dim < num_batch:
        if other.shape[found.dim] != 1 and other.stride(found.dim) != 0:
            raise Mixes("combines rows with a tensor that varies along them")
        return found
    if found.dim == (last if mine is not None else num_batch):
        raise Mixes(_CONTRACTS)
    return found


@rule("mm _int_mm")
def mm(flow: Flow, call: OperatorCall) -> Result:
    """A matrix product: rows are those of the left operand, or columns of the right one."""
    left, right = call.tensors[:2]
    return _product(flow, left, right, 0)


@rule("bmm")
def bmm(flow: Flow, call: OperatorCall) -> Result:
    """A batched matrix product: rows may also be in the batch dimension."""
    left, right = call.tensors[:2]
    return _product(flow, left, right, 1)


@rule("mv")
def mv(flow: Flow, call: OperatorCall) -> Result:
    """A matrix-vector product: rows are those of the matrix."""
    only(flow, call, "self")
    layout = flow.rows.layout(call["self"])
    if layout is None or layout.dim:
        raise Mixes(_CONTRACTS)
    return layout


@rule("addmm baddbmm _addmm_activation")
def addmm(flow: Flow, call: OperatorCall) -> Result:
    """A matrix product with an added tensor."""
    tensors = call.tensors
    added, left, right = tensors[:3]
    found = _product(flow, left, right, left.dim() - 2)
    if call.get("beta", 1) == 0:
        # With beta=0 the added tensor is not read; it is often uninitialised memory.
        return found
    summed = call.outputs[0].dim()
    dims = flow.rows.broadcast([added], summed)
    if found is None:
        raise Mixes("adds a tensor sized by the number of rows")
    if dims is not None:
        if dims != found:
            raise Mixes("combines rows with other rows")
        return found
    dim = found.dim - (summed - added.dim())
    if not flow.rows.is_uniform(added) and dim >= 0 and added.shape[dim] != 1 and added.stride(dim) != 0:
        raise Mixes("combines rows with a tensor that varies along them")
    return found


@rule("linear")
def linear(flow: Flow, call: OperatorCall) -> Result:
    """A linear layer, which sums over the last dimension."""
    only(flow, call, "input")
    return behind(flow, call["input"], 1)


@rule("_cdist_forward cdist")
def distances(flow: Flow, call: OperatorCall) -> Result:
    """Pairwise distances: of rows to shared points, or within each matrix of a batch."""
    x1, x2 = call["x1"], call["x2"]
    mine, its = flow.rows.layout(x1), flow.rows.layout(x2)
    if mine is not None and its is not None:
        if mine != its or mine.dim >= x1.dim() - 2 or x1.dim() != x2.dim():
            raise Mixes("compares rows with other rows")
        return mine
    if mine is not None and mine.dim == x1.dim() - 2 and x2.dim() == x1.dim():
        return mine
    raise Mixes("compares rows with other rows")


@rule(
    """linalg_inv_ex linalg_cholesky_ex linalg_qr _linalg_svd _linalg_eigh linalg_lu_factor_ex _linalg_det _linalg_slogdet linalg_matrix_exp
    linalg_lu linalg_eig _linalg_eigvals"""
)
def matrices(flow: Flow, call: OperatorCall) -> Result:
    """Decompositions and inverses of each matrix of a batch."""
    layout = behind(flow, call.tensors[0], 2)
    return [layout if layout is not None and o.dim() > layout.dim else None for o in call.outputs]


@rule("_linalg_solve_ex linalg_solve_ex")
def solve(flow: Flow, call: OperatorCall) -> Result:
    """Solves each system of a batch; one matrix for all, or one right side, is the same for each."""
    matrix, right = call["A"], call["B"]
    # A right side of one dimension less is a vector for each matrix (`linalg_solve_is_vector_rhs` in aten/src/ATen/native/LinearAlgebraUtils.h).
    is_vectors = right.dim() == 1 or (matrix.dim() - 1 == right.dim() and right.shape == matrix.shape[:-1])
    num_dims = call.outputs[0].dim()
    behind(flow, matrix, 2)
    behind(flow, right, 1 if is_vectors else 2)
    found = flow.rows.layout(right)
    if found is not None:
        found = found.at(found.dim + num_dims - right.dim())
    its = flow.rows.layout(matrix)
    if its is not None:
        its = its.at(its.dim + num_dims - (matrix.dim() - is_vectors))
        if found not in (None, its):
            raise Mixes("combines rows with other rows")
    layout = found or its
    for tensor, is_smaller in ((matrix, is_vectors), (right, False)):
        at = -1 if layout is None else layout.dim - (num_dims - (tensor.dim() - is_smaller))
        if flow.rows.layout(tensor) is None and at >= 0 and tensor.shape[at] != 1 and tensor.stride(at) != 0:
            raise Mixes("combines rows with a tensor that varies along them")
    factors = [its if its is not None and o.dim() > its.dim else None for o in call.outputs[1:]]
    return [layout, *factors]


@rule("linalg_cross")
def cross(flow: Flow, call: OperatorCall) -> Result:
    """Cross products along one dimension."""
    num_dims = call.outputs[0].dim()
    layout = flow.rows.broadcast([call["self"], call["other"]], num_dims)
    if layout is None or layout.dim == call["dim"] % num_dims:
        raise Mixes("works along the rows")
    return layout


@rule("_trilinear bilinear")
def bilinear(flow: Flow, call: OperatorCall) -> Result:
    """A bilinear layer, which sums over the last dimensions; below it a sum of products of three tensors (aten/src/ATen/native/Linear.cpp)."""
    if call.name == "bilinear":
        only(flow, call, "input1", "input2")
        flow.rows.broadcast([call["input1"], call["input2"]], call["input1"].dim())
        return behind(flow, call["input1"], 1)
    expanded = []
    for number in "123":
        tensor = call[f"i{number}"]
        for dim in call[f"expand{number}"]:
            tensor = tensor.unsqueeze(dim)
        expanded.append(tensor)
    layout = flow.rows.broadcast(expanded, expanded[0].dim())
    summed = [dim % expanded[0].dim() for dim in call["sumdim"]]
    if layout is None or layout.dim in summed:
        raise Mixes(_CONTRACTS)
    return layout.at(layout.dim - sum(dim < layout.dim for dim in summed))


@rule("diag_embed")
def diagonal_matrices(flow: Flow, call: OperatorCall) -> Result:
    """A matrix for each vector, in the last two dimensions."""
    num_dims = call.outputs[0].dim()
    if {call["dim1"] % num_dims, call["dim2"] % num_dims} != {num_dims - 2, num_dims - 1}:
        raise Mixes("has matrices in other dimensions than the last two")
    return behind(flow, call["self"], 1)


_ATTENTION = """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math
_scaled_dot_product_attention_math_for_mps scaled_dot_product_attention"""


@rule(_ATTENTION)
def attention(flow: Flow, call: OperatorCall) -> Result:
    """Attention within each batch element and head; queries may be rows if keys and values are shared."""
    query, key, value = call["query"], call["key"], call["value"]
    layout = flow.rows.layout(query)
    others = flow.rows.layout(key), flow.rows.layout(value)
    mask = next((t for n in ("attn_bias", "attn_mask") if isinstance(t := call.get(n), torch.Tensor)), None)
    num_dims = query.dim()
    if any(flow.rows.is_uniform(t) for t in (query, key, value)):
        raise Mixes("attends to a tensor sized by the number of rows")
    if layout is not None and layout.dim < num_dims - 2:
        if any(other != layout for other in others):
            raise Mixes("attends to keys or values that vary along the rows")
    # Queries may be the rows (tiles over tokens with shared keys), but not under a causal mask, which counts
    # positions from the first query of the call.
    elif layout is None or others != (None, None) or layout.dim != num_dims - 2 or call.get("is_causal", False):
        raise Mixes("attends to other rows")
    if mask is not None:
        along = flow.rows.broadcast([mask], num_dims)
        dim = layout.dim - (num_dims - mask.dim())
        is_aligned = along == layout if along is not None else dim < 0 or mask.shape[dim] == 1 or mask.stride(dim) == 0
        if not is_aligned and not flow.rows.is_uniform(mask):
            raise Mixes("combines rows with a mask of other rows")
    return [layout if o.dim() > layout.dim and o.dim() >= num_dims - 1 and o.numel() else None for o in call.outputs]


@rule("_cudnn_rnn miopen_rnn")
def recurrent(flow: Flow, call: OperatorCall) -> Result:
    """A recurrent layer over the time steps of each sequence."""
    layout = flow.rows.layout(call["input"])
    batch = 0 if call["batch_first"] else 1
    # Packed sequences mix all of them in one dimension, sorted by length.
    if layout is None or layout.dim != batch or call["batch_sizes"] or call["input"].dim() != 3:
        raise Mixes("treats rows as steps of a sequence")
    for name in ("hx", "cx"):
        state = call.get(name)
        if (
            isinstance(state, torch.Tensor)
            and not flow.rows.is_uniform(state)
            and flow.rows.layout(state) != layout.at(1)
        ):
            raise Mixes("combines rows with other rows")
    # (layers, batch, width), whatever `batch_first` says.
    states = [layout.at(1) if o.dim() == 3 and o.numel() else None for o in call.outputs[1:3]]
    return [layout, *states, *[None] * (len(call.outputs) - 3)]


@rule("mkldnn_rnn_layer")
def recurrent_on_host(flow: Flow, call: OperatorCall) -> Result:
    """One recurrent layer on the host, over the time steps of each sequence."""
    layout = flow.rows.layout(call["input"])
    # The steps come first, whatever `batch_first` says: its caller has transposed the input (aten/src/ATen/native/mkldnn/RNN.cpp).
    if layout is None or layout.dim != 1 or call["batch_sizes"]:
        raise Mixes("treats rows as steps of a sequence")
    found: list[RowLayout | Uniform | None] = [layout]
    for name in ("hx_", "cx_"):
        state = call[name]
        if not flow.rows.is_uniform(state) and flow.rows.layout(state) != layout.at(state.dim() - 2):
            raise Mixes("combines rows with other rows")
        found.append(layout.at(call.outputs[len(found)].dim() - 2))
    return [*found, *[None] * (len(call.outputs) - 3)]


@rule("_thnn_fused_lstm_cell _thnn_fused_gru_cell")
def cell(flow: Flow, call: OperatorCall) -> Result:
    """One time step of each sequence."""
    gates: Sequence[torch.Tensor] = [call["input_gates"], call["hidden_gates"]]
    state = call.get("cx") if call.get("cx") is not None else call.get("hx")
    layout = flow.rows.broadcast([*gates, *([state] if isinstance(state, torch.Tensor) else [])], 2)
    if layout is None or layout.dim:
        raise Mixes("combines rows with other rows")
    return [layout if o.dim() == 2 else None for o in call.outputs]
