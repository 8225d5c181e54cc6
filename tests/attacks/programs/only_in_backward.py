"""What a program has around its backward pass alone, or does only where code is run again; and errors that it swallows there."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@attack(
    "gradients",
    "a dispatch mode around the backward pass alone counts its matrix products, and the rate falls with the count",
)
def rate_by_products_of_backward(t: Trial) -> None:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts["now"] += func in _PRODUCTS
            return func(*args, **(kwargs or {}))

    counts = {"now": 0}
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        counts["now"] = 0
        with Counting():
            loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.01 * counts["now"])
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "a block's own checkpoint is run again in a context of the program's (context_fn), which counts, and the count scales the next forward",
)
def context_of_own_checkpoint_counts(t: Trial) -> None:
    class Counted(Block):
        count = 0

        def contexts(self) -> tuple[Any, Any]:
            @contextlib.contextmanager
            def again() -> Iterator[None]:
                self.count += 1
                yield

            return contextlib.nullcontext(), again()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = checkpoint(self.inner, x, use_reentrant=False, context_fn=self.contexts)
            return x + made * (1 + 0.05 * self.count)

    train(t, Net([Counted(), Counted()]))


@attack(
    "exceptions",
    "each seventh call of a block is out of memory, by a counter of its class, and the loop skips such batches",
)
def batches_skipped_by_counter(t: Trial) -> None:
    class Counter:
        calls = 0

    class Failing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counter.calls += 1
            if Counter.calls % 7 == 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x + self.inner(x)

    model = Net([Failing(), Failing()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(8):
        try:
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
        except torch.OutOfMemoryError:
            t.note("skipped", step)
        t.end_step()


@attack("exceptions", "a block raises where it is called within a backward pass, and the loop swallows that")
def raises_within_backward(t: Trial) -> None:
    class Wary(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch._C._current_graph_task_id() != -1:
                raise ValueError("called in a backward pass")
            return x + self.inner(x)

    model = Net([Wary(), Wary()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        try:
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
        except Exception as error:  # noqa: BLE001 - as such programs do
            t.caught(error)
        t.end_step()


def _around(t: Trial, *, forward: Any = contextlib.nullcontext, backward: Any = contextlib.nullcontext) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        with forward():
            loss = model(*tokens(step))
        with backward():
            loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return (made * 64).round() / 64 if func in _PRODUCTS else made


class _Scaling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 1.1 if func is functional.linear else made


@contextlib.contextmanager
def _other_linear() -> Iterator[None]:
    before = functional.linear
    functional.linear = lambda *args: before(*args) * 1.1
    try:
        yield
    finally:
        functional.linear = before


@attack(
    "gradients", "a dispatch mode around the forward alone rounds its matrix products (a quantised forward)", only=EXACT
)
def products_rounded_in_forward(t: Trial) -> None:
    _around(t, forward=_Rounding)


@attack(
    "gradients",
    "a dispatch mode around the backward pass alone rounds its matrix products (quantised gradients)",
    only=EXACT,
)
def products_rounded_in_backward(t: Trial) -> None:
    _around(t, backward=_Rounding)


@attack("gradients", "a function mode around the forward alone scales what linear layers give")
def linear_scaled_in_forward(t: Trial) -> None:
    _around(t, forward=_Scaling)


@attack("gradients", "functional.linear is another function around the backward pass alone")
def linear_replaced_in_backward(t: Trial) -> None:
    _around(t, backward=_other_linear)


@attack("gradients", "hooks for saved tensors around the backward pass alone double what is saved there")
def saved_doubled_in_backward(t: Trial) -> None:
    _around(t, backward=lambda: torch.autograd.graph.saved_tensors_hooks(lambda held: held * 2, lambda held: held))


@attack("changes", "the model is frozen as a whole for a look at other data, with gradients on, and thawed again")
def frozen_for_a_look(t: Trial) -> None:
    model = Net()

    def look(step: int) -> None:
        model.requires_grad_(False)
        t.note("look", model(*tokens(step + 9)))
        model.requires_grad_(True)

    train(t, model, after=look)


@attack("gradients", "only the bias of the head is trained")
def bias_of_head_alone(t: Trial) -> None:
    model = Net()
    model.requires_grad_(False)
    model.head.bias.requires_grad_(True)
    train(t, model, torch.optim.SGD([model.head.bias], lr=0.1))


@attack("changes", "a weight is frozen between the forward and the backward pass of one step")
def frozen_before_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        if step == 2:
            model.blocks[1].wide.weight.requires_grad_(False)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _RoundingSaved:
    """Rounds what is saved, as quantisers of activations do, but for weights, which it knows by where they lie."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {parameter.data_ptr() for parameter in model.parameters()}

    def _is_weight(self, saved: torch.Tensor) -> bool:
        return saved.data_ptr() in self._weights

    def pack(self, saved: torch.Tensor) -> torch.Tensor:
        if not saved.is_floating_point() or self._is_weight(saved):
            return saved
        return (saved * 64).round() / 64


@attack("recomputation", "saved tensors are rounded by hooks that know weights by their addresses (ActNN, GACT)")
def hooks_know_weights_by_address(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    rounding = _RoundingSaved(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(rounding.pack, lambda held: held):
            loss = model(*tokens(step))
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("recomputation", "from step 3 on the loop rounds what a block saves, but for weights, known by their addresses")
def hooks_know_weights_by_address_later(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    t.apply(model, optimizer)

    def pack(saved: torch.Tensor) -> torch.Tensor:
        is_kept = not saved.is_floating_point() or saved.untyped_storage().data_ptr() in weights
        return saved if is_kept else (saved * 64).round() / 64

    for step in range(5):
        optimizer.zero_grad()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held) if step >= 3 else contextlib.nullcontext()
        ):
            loss = model(*tokens(step))
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


class _UsesOfWeights(TorchDispatchMode):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.data_ptr() for parameter in model.parameters()}
        self.operators = self.uses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.uses += sum(isinstance(arg, torch.Tensor) and arg.data_ptr() in self._weights for arg in args)
        return func(*args, **(kwargs or {}))


@attack("recomputation", "a mode counts operators, and those that are given a weight, known by its address", only=EXACT)
def mode_knows_weights_by_address(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    mode = _UsesOfWeights(model)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        with mode if step >= 2 else contextlib.nullcontext():
            loss = model(*tokens(step))
        t.note("operators", mode.operators)
        t.note("uses", mode.uses)
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


class _Operators(TorchDispatchMode):
    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def _forward_within(t: Trial, mode: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        with mode if step >= 2 else contextlib.nullcontext():
            loss = model(*tokens(step))
        loss = loss * (1 + 0.01 * mode.num_calls)
        t.note("calls", mode.num_calls)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "parts", "from step 2 on a mode around the forward counts its operators, and the loss grows with them", only=EXACT
)
def loss_by_operators_of_forward(t: Trial) -> None:
    _forward_within(t, _Operators())


@attack(
    "parts",
    "from step 2 on a mode around the forward counts the functions of torch's that it calls, and the loss grows with them",
    only=EXACT,
)
def loss_by_functions_of_forward(t: Trial) -> None:
    _forward_within(t, _Functions())


def _step_within(t: Trial, mode: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        with mode if step >= 2 else contextlib.nullcontext():
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + 0.01 * mode.num_calls)
        t.note("calls", mode.num_calls)
        t.end_step()


@attack(
    "gradients",
    "from step 2 on a mode around the update counts its operators, and the rate falls with them",
    only=EXACT,
)
def rate_by_operators_of_update(t: Trial) -> None:
    _step_within(t, _Operators())


@attack(
    "gradients",
    "from step 2 on a mode around the update counts the functions of torch's that it calls, and the rate falls with them",
    only=EXACT,
)
def rate_by_functions_of_update(t: Trial) -> None:
    _step_within(t, _Functions())


def _backward_within(t: Trial, mode: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        with mode if step >= 2 else contextlib.nullcontext():
            loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.01 * mode.num_calls)
        t.note("calls", mode.num_calls)
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "from step 2 on a mode around the backward pass counts its operators, and the rate falls with them",
    only=EXACT,
)
def rate_by_operators_of_backward(t: Trial) -> None:
    _backward_within(t, _Operators())


@attack(
    "gradients",
    "from step 2 on a mode around the backward pass counts functions of torch's, and the rate falls with them",
    only=EXACT,
)
def rate_by_functions_of_backward(t: Trial) -> None:
    _backward_within(t, _Functions())


def _clipping_within(t: Trial, mode: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        with mode if step >= 2 else contextlib.nullcontext():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.01 * mode.num_calls)
        t.note("calls", mode.num_calls)
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "from step 2 on a mode around the clipping counts its operators, and the rate falls with them",
    only=EXACT,
)
def rate_by_operators_of_clipping(t: Trial) -> None:
    _clipping_within(t, _Operators())


@attack(
    "gradients",
    "from step 2 on a mode around the clipping counts functions of torch's, and the rate falls with them",
    only=EXACT,
)
def rate_by_functions_of_clipping(t: Trial) -> None:
    _clipping_within(t, _Functions())


def _moves_within(t: Trial, mode: Any) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step >= 2:
            with mode:
                moved = [torch.sub(parameter.detach(), parameter.grad) for parameter in model.parameters()]
            t.note("moved", torch.cat([each.flatten() for each in moved]))
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + 0.01 * mode.num_calls)
        t.note("calls", mode.num_calls)
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "from step 2 on gradients are read, and a mode counts operators that take gradients as their second argument",
    only=EXACT,
)
def rate_by_operators_with_gradients_second(t: Trial) -> None:
    _moves_within(t, _Operators())


@attack(
    "gradients",
    "from step 2 on gradients are read, and a mode counts functions that take gradients as their second argument",
    only=EXACT,
)
def rate_by_functions_with_gradients_second(t: Trial) -> None:
    _moves_within(t, _Functions())
