"""Recurrent networks on cuDNN: the routing of LSTM, GRU and RNN to `_cudnn_rnn`, and what that operator saves for its backward pass.

A CPU build of torch unrolls a recurrent layer into products per time step. A card with cuDNN runs one operator for all of it, which saves one
reserve block for the backward pass. cuDNN reports the sizes of reserve and workspace at run time only; here they are counted from the
equations: the gates, and for an LSTM the cells, of every layer, direction and time step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.rule import Arguments, Outputs, Rule, bind
from tightfit.errors.faults import for_torch

aten = torch.ops.aten

# cudnnRNNMode_t: RELU, TANH, LSTM, GRU.
RELU, TANH, LSTM, GRU = 0, 1, 2, 3
_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
# Layer outputs; for an LSTM the cells too, for a GRU the candidate's recurrent product.
_KEPT_BESIDES_GATES = {RELU: 1, TANH: 1, LSTM: 2, GRU: 2}


def reserve_bytes(
    mode: int,
    *,
    num_steps: int,
    batch_size: int,
    hidden_size: int,
    num_layers: int,
    num_directions: int,
    element_bytes: int,
) -> int:
    """What cuDNN saves of a recurrent layer's forward pass for its backward pass, in bytes, counted from the equations."""
    per_unit = _GATES[mode] + _KEPT_BESIDES_GATES[mode]
    return num_steps * batch_size * hidden_size * num_layers * num_directions * per_unit * element_bytes


def workspace_bytes(
    mode: int, *, num_steps: int, batch_size: int, hidden_size: int, num_directions: int, element_bytes: int
) -> int:
    """The projected inputs of one layer for all time steps, in bytes: cuDNN multiplies them at once, before the recurrence."""
    return num_steps * batch_size * hidden_size * num_directions * _GATES[mode] * element_bytes


def _steps_and_batch(arguments: Arguments) -> tuple[int, int]:
    shape = arguments["input"].shape
    batch_sizes = arguments["batch_sizes"]
    if batch_sizes:
        return len(batch_sizes), batch_sizes[0]
    return (shape[1], shape[0]) if arguments["batch_first"] else (shape[0], shape[1])


def _rnn(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`_cudnn_rnn` and `_cudnn_rnn_backward` (aten/src/ATen/native/cudnn/RNN.cpp): a batch-first input is transposed, then the workspace."""
    tensor: torch.Tensor = arguments["input"]
    if arguments["batch_first"] and not arguments["batch_sizes"]:
        yield tensor.numel() * tensor.element_size()
    steps, batch = _steps_and_batch(arguments)
    yield workspace_bytes(
        arguments["mode"],
        num_steps=steps,
        batch_size=batch,
        hidden_size=arguments["hidden_size"],
        num_directions=2 if arguments["bidirectional"] else 1,
        element_bytes=tensor.element_size(),
    )


def cudnn_rnn(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of `aten::_cudnn_rnn` by shape: output, hidden state, cell state, reserve, weight buffer."""
    call = bind(aten._cudnn_rnn.default, args, kwargs)
    tensor: torch.Tensor = call["input"]
    directions = 2 if call["bidirectional"] else 1
    kept_width = call["proj_size"] or call["hidden_size"]
    steps, batch = _steps_and_batch(call)
    if call["batch_sizes"]:
        output = tensor.new_empty(tensor.shape[0], kept_width * directions)
    else:
        output = tensor.new_empty(steps, batch, kept_width * directions)
        output = output.transpose(0, 1) if call["batch_first"] else output
    layers = call["num_layers"] * directions
    hidden = call["hx"].new_empty(layers, batch, kept_width)
    cell = tensor.new_empty(0) if call["cx"] is None else call["cx"].new_empty(layers, batch, call["hidden_size"])
    kept = reserve_bytes(
        call["mode"],
        num_steps=steps,
        batch_size=batch,
        hidden_size=call["hidden_size"],
        num_layers=call["num_layers"],
        num_directions=directions,
        element_bytes=tensor.element_size(),
    )
    # In evaluation cuDNN runs `cudnnRNNForward` in inference mode, without a reserve (`_cudnn_rnn`, RNN.cpp).
    reserve = tensor.new_empty(kept if call["train"] else 0, dtype=torch.uint8)
    return output, hidden, cell, reserve, call["weight"][0].new_empty(0)


def cudnn_rnn_backward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The outputs of `aten::_cudnn_rnn_backward` by shape; the weights' gradients are views of one buffer, as on a card."""
    call = bind(aten._cudnn_rnn_backward.default, args, kwargs)
    weights: list[torch.Tensor] = call["weight"]
    grads: list[torch.Tensor] = []
    if call["output_mask"][3]:
        # cuDNN writes the gradients of all weights into one buffer of the layout of its own parameters: as long
        # as one of them is alive, all are.
        flat = weights[0].new_empty(sum(weight.numel() for weight in weights))
        grads = [
            part.view(weight.shape)
            for part, weight in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
        ]
    grad_cell = call["hx"].new_empty(0) if call["cx"] is None else torch.empty_like(call["cx"])
    return torch.empty_like(call["input"]), torch.empty_like(call["hx"]), grad_cell, grads


def _run(operator: OpOverload, mode: int, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """`_cudnn_impl` (aten/src/ATen/native/cudnn/RNN.cpp)."""
    call = bind(operator, args, kwargs)
    params: list[torch.Tensor] = call["params"]
    hidden, cell = (call["hx"][0], call["hx"][1]) if mode == LSTM else (call["hx"], None)
    # params[1] is `weight_hh_l0`, of (gates * hidden, hidden), or (gates * hidden, projection) with a
    # projection.
    hidden_size = params[1].shape[0] // _GATES[mode]
    proj_size = hidden.shape[2] if hidden.shape[2] != hidden_size else 0
    per_layer = (4 if call["has_biases"] else 2) + (1 if proj_size else 0)
    sizes = (mode, hidden_size, proj_size, call["num_layers"], call.get("batch_first", False), call["dropout"])
    packed = call["batch_sizes"].tolist() if "batch_sizes" in call else []
    tensor = call["data"] if "data" in call else call["input"]
    # `check_attributes` (RNN.cpp).
    for name, others in (("parameter", params), ("hidden", [hidden] if cell is None else [hidden, cell])):
        for other in others:
            if other.device != tensor.device:
                words = f"Input and {name} tensors are not at the same device, found input tensor at {tensor.device} and {name} tensor at {other.device}"
                raise for_torch(RuntimeError(words))
    given = [tensor, hidden, cell]
    if _is_in_autocast():
        given, params = [_in_half(each) for each in given], _flat_in_half(params)
    tensor, hidden, cell = given
    # A card looks whether the weights lie in one flat buffer, as torch.nn.RNNBase lays them out
    # (`try_get_weight_buf`, RNN.cpp); then nothing is copied. `weight_buf=None` stands for that here.
    return aten._cudnn_rnn.default(
        tensor, params, per_layer, None, hidden, cell, *sizes, call["train"], call["bidirectional"], packed, None
    )


def _is_in_autocast() -> bool:
    if not torch.is_inference_mode_enabled():
        return torch.is_autocast_enabled("cuda")
    # There a dispatch mode calls, below autocast, which says no by then: that a context is open has to do.
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def _is_cast(tensor: torch.Tensor) -> bool:
    """Whether autocast casts a tensor for cuDNN: to float16, whatever its own dtype is (aten/src/ATen/cudnn/AutocastRNN.cpp)."""
    return tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float64)


def _in_half(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or not _is_cast(tensor) else tensor.to(torch.float16)


def _flat_in_half(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weights in float16, as parts of one new buffer, each with a history of its own: it is no view of the buffer (`get_parameters`, RNN.cpp)."""
    if not _is_cast(params[0]):
        return params
    flat = params[0].new_zeros(sum(each.numel() for each in params), dtype=torch.float16)
    parts = flat.split([each.numel() for each in params])
    return [part.view(each.shape).detach().copy_(each) for part, each in zip(parts, params, strict=True)]


def recurrent_on_cudnn(operator: OpOverload, mode: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`aten::lstm`, `aten::gru` and `aten::rnn_*` (padded or packed input) as a card with cuDNN runs them."""
    num_outputs = 3 if mode == LSTM else 2

    def recurrent(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return _run(operator, mode, args, kwargs)[:num_outputs]

    return recurrent


ROUTES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    f"{name}.{overload}": recurrent_on_cudnn(getattr(getattr(aten, name), overload), mode)
    for name, mode in (("lstm", LSTM), ("gru", GRU), ("rnn_tanh", TANH), ("rnn_relu", RELU))
    for overload in ("input", "data")
}

_OPERATORS: Sequence[OpOverload] = (aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default)

RULES: dict[OpOverload, Rule] = dict.fromkeys(_OPERATORS, _rnn)
