"""Weights and activations that have a second name: storage shared by parameters, `.data`, views, and what the block hands on besides its output."""

import os
import types
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("gradients", "two parameters of two blocks over the same storage, both in the optimizer")
def parameters_share_storage(t: Trial) -> None:
    model = Net()
    first, second = model.blocks[0].wide, model.blocks[1].wide
    second.weight = nn.Parameter(first.weight.data)
    train(t, model)


@attack("gradients", "a parameter that is the transposed view of another's data, used by an earlier layer")
def parameter_is_view_of_another(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Parameter(self.head.weight.data.T)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(torch.tanh(x @ self.back) @ self.head.weight.detach().clone())

    train(t, Model())


class _Borrowing(Net):
    """Its first layer multiplies with the head's weight under another name, without a gradient for it."""

    def borrowed(self) -> torch.Tensor:
        """The head's weight."""
        return self.head.weight.data

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the head is given."""
        x = self.stem(x)
        x = x + torch.tanh(x @ self.borrowed().T) @ self.borrowed()
        return self.blocks(x)


@attack("gradients", "the first layer multiplies with head.weight.data, whose version is its own")
def early_layer_uses_data_of_head(t: Trial) -> None:
    train(t, _Borrowing())


@attack("gradients", "the first layer multiplies with head.weight.detach() (semi-tied weights)")
def early_layer_uses_detached_head(t: Trial) -> None:
    class Model(_Borrowing):
        def borrowed(self) -> torch.Tensor:
            return self.head.weight.detach()

    train(t, Model())


@attack("gradients", "the first layer multiplies with a numpy view of the head's weight", only=EXACT)
def early_layer_uses_numpy_of_head(t: Trial) -> None:
    class Model(_Borrowing):
        def borrowed(self) -> torch.Tensor:
            return torch.from_numpy(self.head.weight.detach().numpy())

    train(t, Model())


@attack("gradients", "the first layer multiplies with the head's weight that came by DLPack, made once")
def early_layer_uses_dlpack_of_head(t: Trial) -> None:
    class Model(_Borrowing):
        def __init__(self) -> None:
            super().__init__()
            self.alias = torch.utils.dlpack.from_dlpack(self.head.weight.detach())

        def borrowed(self) -> torch.Tensor:
            return self.alias

    train(t, Model())


@attack("gradients", "a buffer that is the data of the head's weight (registered once), used by the first layer")
def buffer_aliases_weight(t: Trial) -> None:
    class Model(_Borrowing):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("alias", self.head.weight.data)

        def borrowed(self) -> torch.Tensor:
            return self.alias

    train(t, Model())


class _KeptOnContext(torch.autograd.Function):
    """A linear layer whose weight is an attribute of ctx, past the checks of autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holder: Any) -> torch.Tensor:
        """Multiplies."""
        ctx.holder = holder
        return x @ holder.weight.detach().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Reads the weight that the holder has by then."""
        return gradient @ ctx.holder.weight.detach(), None


@attack("gradients", "a custom function whose backward reads the weight of a later layer off a module")
def backward_reads_later_weight(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.blocks(x + _KeptOnContext.apply(x, self.blocks[1].wide).mean(-1, keepdim=True))

    train(t, Model())


@attack("gradients", "the loop's penalty in the same backward pass multiplies with .data of all weights")
def penalty_with_data(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        loss = loss + 0.1 * sum((p.data * p).sum() for p in model.parameters())
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("gradients", "a penalty on the distance between each weight and that of the next block, of which one is .data")
def blocks_pulled_together(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(self.features(x))
            pull = (self.blocks[0].wide.weight * self.blocks[1].wide.weight.data).sum()
            return logits if y is None else self.loss(logits, y) + 0.1 * pull

    train(t, Model())


@attack("recomputation", "the first block keeps its values on a shared object, the others mix them in (value residual)")
def value_residual(t: Trial) -> None:
    shared = types.SimpleNamespace(value=None)

    class Mixing(Block):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            value = self.narrow(functional.gelu(self.wide(self.norm(x))))
            if self.first:
                shared.value = value
            else:
                value = 0.5 * value + 0.5 * shared.value
            return x + value

    train(t, Net([Mixing(True), Mixing(False), Mixing(False)]))


@attack("recomputation", "each block reads what the block before it left on a shared object, and leaves its own")
def handed_on_by_attribute(t: Trial) -> None:
    shared = types.SimpleNamespace(value=torch.zeros(()))

    class Handing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x + shared.value)
            shared.value = torch.tanh(x)
            return x

    def before(_: int) -> None:
        shared.value = torch.zeros(())

    train(t, Net([Handing(), Handing(), Handing()]), before=before)


@attack("recomputation", "U-Net: the way down appends to a list that the way up pops from")
def skips_on_a_stack(t: Trial) -> None:
    class Level(nn.Module):
        def __init__(self, down: bool) -> None:
            super().__init__()
            self.down, self.layer = down, nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
            if not self.down:
                return torch.tanh(self.layer(x + skips.pop()))
            x = torch.tanh(self.layer(x))
            skips.append(x)
            return x

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x, skips = self.stem(x), []
            for block in self.blocks:
                x = block(x, skips)
            return x

    train(t, Model([Level(True), Level(True), Level(False), Level(False)], sequential=False))


@attack("recomputation", "a block is given an iterator, and draws its inputs from it")
def iterator_as_argument(t: Trial) -> None:
    class Drawing(Block):
        def forward(self, parts: Any) -> torch.Tensor:
            x = next(parts)
            return x + self.inner(x) * next(parts).mean(-1, keepdim=True)

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(iter([x, x * 0.5, x]))
            return x

    train(t, Model([Drawing(), Drawing()], sequential=False))


@attack("recomputation", "a block is given a function that counts its calls")
def function_as_argument(t: Trial) -> None:
    calls = [0]

    def scale(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x / calls[0]

    class Scaled(Block):
        def forward(self, x: torch.Tensor, function: Any) -> torch.Tensor:
            return x + function(self.inner(x))

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, function=scale)
            return x

    train(t, Model([Scaled(), Scaled()], sequential=False))
    t.note("calls", calls[0])


@attack(
    "recomputation", "a block is given an object whose attributes are tensors, which it writes and the next one reads"
)
def state_object_as_argument(t: Trial) -> None:
    class State:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.gate, self.depth = x, x.new_ones(()), 0

    class Stateful(Block):
        def forward(self, state: State) -> State:
            state.depth += 1
            state.x = state.x + self.inner(state.x) * state.gate / state.depth
            state.gate = torch.sigmoid(state.x.mean(-1, keepdim=True))
            return state

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            state = State(self.stem(x))
            for block in self.blocks:
                state = block(state)
            return state.x

    train(t, Model([Stateful(), Stateful()], sequential=False))


@attack("recomputation", "a hypernetwork: the model writes generated weights onto its blocks before it calls them")
def generated_weights(t: Trial) -> None:
    class Generated(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ self.made)

    class Model(Net):
        def __init__(self) -> None:
            super().__init__([Generated(), Generated()])
            self.hyper = nn.Linear(2, WIDTH * WIDTH)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                block.made = self.hyper(torch.tensor([1.0, float(number)])).view(WIDTH, WIDTH)
            return super().features(x)

    train(t, Model())


@attack("recomputation", "the same block object, with another weight put on it before each call (shared scratch layer)")
def scratch_layer(t: Trial) -> None:
    class Scratch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(functional.linear(x, self.weight))

    class Model(Net):
        def __init__(self) -> None:
            super().__init__([Scratch()])
            self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for weight in self.weights:
                self.blocks[0].__dict__["weight"] = weight
                x = self.blocks[0](x)
            return x

    train(t, Model())


@attack(
    "recomputation", "the block asks whether its input is a leaf, has a grad_fn, is a view, and which version it has"
)
def asks_about_its_input(t: Trial) -> None:
    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 1.0 + 0.5 * x.is_leaf + 0.25 * (x.grad_fn is None) + 0.125 * x._is_view() + 0.06 * x._version
            return x + self.inner(x) * scale

    train(t, Net([Asking(), Asking()]))


@attack("recomputation", "the block scales by whether gradients are on and whether anything was saved by name")
def asks_about_modes(t: Trial) -> None:
    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grad = torch.is_grad_enabled() + 2 * torch.is_inference_mode_enabled() + 4 * torch.is_anomaly_enabled()
            return x + self.inner(x) * (1 + 0.3 * grad + 0.1 * x.requires_grad)

    train(t, Net([Asking(), Asking()]))


@attack("parts", "the block scales by the stride of its input and by the size of its storage")
def asks_about_layout(t: Trial) -> None:
    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = x.stride(0) / 48 + x.untyped_storage().nbytes() / 4096 + x.is_contiguous() + x.storage_offset()
            return x + self.inner(x) * scale

    train(t, Net([Asking(), Asking()]))


@attack("recomputation", "noise from the operating system (os.urandom) in the block")
def noise_of_the_system(t: Trial) -> None:
    class Noisy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            byte = os.urandom(1)[0]
            # The plain run must be repeatable, and so the noise has no say in what it computes, only in what is saved.
            return x + self.inner(x) + 0.0 * byte * torch.tanh(x)

    train(t, Net([Noisy(), Noisy()]))


@attack("recomputation", "a block whose output is kept by the loop and written after the backward pass")
def output_written_after_backward(t: Trial) -> None:
    kept: list[torch.Tensor] = []

    class Keeping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            kept.append(x)
            return x

    def after(_: int) -> None:
        with torch.no_grad():
            for x in kept:
                x.zero_()
        kept.clear()

    train(t, Net([Keeping(), Keeping()]), after=after)


@attack("recomputation", "a kept activation is zeroed through .data between forward and backward pass")
def activation_freed_before_backward(t: Trial) -> None:
    kept: list[torch.Tensor] = []

    class Keeping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(x)
            return super().forward(x)

    model = Net([Keeping(), Keeping()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        for x in kept:
            x.data.mul_(0.5)
        kept.clear()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a weight's storage is exchanged by set_() between the steps, and by resize_ back", only=EXACT)
def storage_exchanged(t: Trial) -> None:
    model = Net()

    def after(_: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.set_(p.clone())

    train(t, model, adamw(model), after=after)


@attack("gradients", "head and stem are slices of one big parameter, each a property", only=EXACT)
def slices_of_one_parameter(t: Trial) -> None:
    class Sliced(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ self.owner[0].flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))

    class Model(Net):
        def __init__(self) -> None:
            super().__init__([Sliced(), Sliced()])
            self.flat = nn.Parameter(torch.randn(WIDTH * (WIDTH + NUM_CLASSES)) * 0.3)
            for block in self.blocks:
                block.owner = [self]

    train(t, Model())
