"""Blocks that are called in unusual ways, write to what they are given, or are changed between their forward and backward pass."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.func import functional_call
from torch.nn import functional


def _two_phases(t: Trial, model: Net, between: Any, num_steps: int = 4) -> None:
    """The plain loop with something between forward and backward pass, which may write to the weights of blocks."""
    optimizer = sgd(model)
    t.writes_within_step(*(f"blocks.{name}" for name, _ in model.blocks.named_parameters()))
    t.apply(model, optimizer)
    for step in range(num_steps):
        loss = model(*tokens(step))
        restore = between(step)
        optimizer.zero_grad()
        loss.backward()
        if restore is not None:
            restore()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "weights swapped through .data between forward and backward pass, and swapped back")
def data_swapped_before_backward(t: Trial) -> None:
    model = Net()

    def swap(_: int) -> Any:
        kept = [p.data for p in model.blocks.parameters()]
        for parameter in model.blocks.parameters():
            parameter.data = parameter.data * 3.0

        def restore() -> None:
            for parameter, value in zip(model.blocks.parameters(), kept, strict=True):
                parameter.data = value

        return restore

    _two_phases(t, model, swap)


@attack("recomputation", "a weight is clamped in place through .data between forward and backward pass (WGAN)")
def data_clamped_before_backward(t: Trial) -> None:
    model = Net(sequential=False)

    def clamp(_: int) -> None:
        for parameter in model.blocks.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    _two_phases(t, model, clamp)


@attack("recomputation", "functional_call with other weights, differentiated afterwards (MAML's inner step)")
def functional_call_other_weights(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        fast = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
        loss = functional_call(model, fast, (x, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "functional_call of one block with detached weights (a frozen copy)")
def functional_call_of_block(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            frozen = {name: parameter.detach() for name, parameter in self.blocks[0].named_parameters()}
            return self.blocks[1](functional_call(self.blocks[0], frozen, (x,))) + self.blocks[0](x)

    train(t, Model(sequential=False))


@attack("recomputation", "a forward hook on a layer of the block changes its output by a counter")
def forward_hook_with_counter(t: Trial) -> None:
    model = Net()
    calls: list[int] = []

    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        return output / len(calls)

    model.blocks[0].wide.register_forward_hook(hook)
    train(t, model)
    t.note("calls", calls)


@attack("recomputation", "a forward hook on a layer of the block records activations")
def forward_hook_records(t: Trial) -> None:
    model = Net()
    seen: list[torch.Tensor] = []
    model.blocks[0].wide.register_forward_hook(lambda _, __, output: seen.append(output.detach().mean()))
    train(t, model)
    t.note("seen", seen)


@attack("recomputation", "a forward pre-hook on a layer of the block perturbs its weight (weight noise)")
def forward_pre_hook_changes_weight(t: Trial) -> None:
    model = Net()
    number = [0]

    def hook(module: nn.Module, _: Any) -> None:
        number[0] += 1
        with torch.no_grad():
            module.weight.add_(0.01 * number[0])

    model.blocks[0].norm.register_forward_pre_hook(hook)
    t.writes_within_step("blocks.0.norm.weight")
    train(t, model)


@attack("recomputation", "full backward hooks on layers of the blocks log gradients")
def full_backward_hook(t: Trial) -> None:
    model = Net()
    seen: list[torch.Tensor] = []
    for block in model.blocks:
        block.wide.register_full_backward_hook(lambda _, __, outputs: seen.append(outputs[0].abs().sum()))
    train(t, model)
    t.note("seen", seen)


@attack("recomputation", "a tensor hook inside the block scales the gradient")
def tensor_hook_inside(t: Trial) -> None:
    class Scaled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: 0.5 * gradient)
            return x + y

    train(t, Net([Scaled(), Scaled()]))


@attack("recomputation", "a global forward hook of torch counts modules called")
def global_forward_hook(t: Trial) -> None:
    calls = [0]

    def count(_: nn.Module, __: Any, ___: Any) -> None:
        calls[0] += 1

    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        train(t, Net())
    finally:
        handle.remove()
    t.note("calls", calls)


@attack("recomputation", "the model adds positions in place to a block's output (x += pos)")
def in_place_between_blocks(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__(sequential=False)
            self.position = nn.Parameter(torch.randn(6, WIDTH))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                x += self.position
            return x

    train(t, Model())


@attack("recomputation", "the block writes over its input in place (x.mul_)")
def in_place_on_input(t: Trial) -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.9)
            return x + self.inner(x)

    train(t, Net([InPlace(), InPlace()]))


@attack("recomputation", "the first block writes over the batch in place, which the loop reads later")
def in_place_on_batch(t: Trial) -> None:
    class Masking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[:, 0] = 0.0
            return x + self.inner(x)

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x)) * x.mean()

    train(t, Model([Masking(), Masking()]))


@attack("recomputation", "the loop writes over the input batch after the forward (a preallocated buffer)")
def batch_overwritten(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)

    model = Model()
    buffer = torch.zeros(4, 6, WIDTH)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        buffer.data.copy_(x)
        loss = model(buffer, y)
        # As a prefetcher's copy in another thread of the loader does: not seen by autograd's version counters.
        buffer.data.copy_(tokens(step + 1)[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a parameter without gradients (a running scale) is written in the forward")
def parameter_without_gradient_written(t: Trial) -> None:
    class Scaling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.inner(x) / self.scale
            self.scale.data.mul_(0.9).add_(0.1 * y.detach().abs().mean())
            return y

    t.writes_within_step("scale")
    train(t, Net([Scaling(), Scaling()]))


@attack("recomputation", "a part of the block under no_grad (a target encoder)")
def no_grad_part(t: Trial) -> None:
    class Targeted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.inner(x)
            return x + self.inner(x.detach()) - 0.1 * target

    train(t, Net([Targeted(), Targeted()]))


@attack("recomputation", "autocast switched on inside the block, and off around it")
def autocast_inside(t: Trial) -> None:
    class Mixed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype == torch.float32):
                y = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                return x + y.to(x.dtype)

    train(t, Net([Mixed(), Mixed()]))


@attack("recomputation", "the block raises once in a while, and the model calls it again (retry)")
def exception_then_retry(t: Trial) -> None:
    class Flaky(Block):
        def __init__(self) -> None:
            super().__init__()
            self.has_failed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if not self.has_failed:
                self.has_failed = True
                raise ValueError("flaky")
            self.has_failed = False
            return x + y

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                try:
                    x = block(x)
                except ValueError:
                    x = block(x)
            return x

    train(t, Model([Flaky(), Flaky()], sequential=False))


@attack("recomputation", "a generator object hands the block its constants, one per call")
def generator_based(t: Trial) -> None:
    class Fed(Block):
        def __init__(self, constants: Iterator[float]) -> None:
            super().__init__()
            self._constants = constants

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(torch.sin(next(self._constants) * x))

    def constants() -> Iterator[float]:
        value = 1.0
        while True:
            yield value
            value *= 0.9

    shared = constants()
    train(t, Net([Fed(shared), Fed(shared)]))


@attack("recomputation", "forward and backward pass in a thread of the program's own")
def in_a_thread(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    failed: list[BaseException] = []

    def work(step: int) -> None:
        try:
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            t.note("loss", loss)
        except Exception as error:  # noqa: BLE001 - handed to the main thread
            failed.append(error)

    for step in range(4):
        thread = threading.Thread(target=work, args=(step,))
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        optimizer.step()
        t.end_step()


@attack("recomputation", "the training flag of the blocks is set between forward and backward pass")
def flag_before_backward(t: Trial) -> None:
    class Flagged(Block):
        def __init__(self) -> None:
            super().__init__()
            self.uses_tanh = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return x + (torch.tanh(y) if self.uses_tanh else torch.sin(y))

    model = Net([Flagged(), Flagged()])

    def flip(step: int) -> Any:
        model.blocks[0].uses_tanh = step < 2

        def restore() -> None:
            model.blocks[0].uses_tanh = True

        return restore

    _two_phases(t, model, flip)


@attack("recomputation", "the default dtype or the float32 precision is set between forward and backward pass")
def process_setting_before_backward(t: Trial) -> None:
    class Making(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * torch.ones(WIDTH).to(x.dtype) * torch.full((1,), 1 / 3).to(x.dtype))

    before = torch.get_default_dtype()

    def lower(_: int) -> Any:
        torch.set_default_dtype(torch.float16)
        return lambda: torch.set_default_dtype(before)

    _two_phases(t, Net([Making(), Making()]), lower)


@attack("recomputation", "two forward passes before one backward pass (a sum of two losses)")
def two_forwards_one_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step)) + 0.5 * model(*tokens(step + 20))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "backward through the same graph twice (retain_graph)")
def retained_graph(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "gradients taken for the blocks alone, by autograd.grad with inputs")
def gradient_of_some(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    parameters = list(model.blocks.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a straight-through estimator with a counter-based temperature set by the loop")
def temperature_set_by_loop(t: Trial) -> None:
    class Binary(Block):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            soft = torch.sigmoid(self.inner(x) / self.temperature)
            return x + (soft > 0.5).to(x.dtype) + soft - soft.detach()

    model = Net([Binary(), Binary()])

    def anneal(step: int) -> None:
        for block in model.blocks:
            block.temperature = 1.0 / (1 + step)

    train(t, model, before=anneal)


@attack("recomputation", "hidden states carried from step to step, detached (truncated backpropagation)")
def carried_state(t: Trial) -> None:
    class Recurrent(Block):
        def __init__(self) -> None:
            super().__init__()
            self.memory: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.inner(x)
            if self.memory is not None:
                y = y + 0.1 * self.memory.mean(0)
            self.memory = functional.normalize(y.detach(), dim=-1)
            return y

    train(t, Net([Recurrent(), Recurrent()]))
