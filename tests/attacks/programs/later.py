"""Models, modules and optimizers that are changed, copied, saved or cast after the plan was put on."""

from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, images, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

# Each takes seconds.
COMPILED = (
    "checkpointing",
    "tiled tokens",
    "chunked loss, gradients in backward",
    "micro-batches",
    "update in backward",
)


def changed(t: Trial, model: nn.Module, change: Callable[[], Any], *, at: int = 1, **kwargs: Any) -> None:
    """The plain loop, with `change` after one of its steps."""

    def after(step: int) -> None:
        if step == at:
            change()

    train(t, model, after=after, num_steps=5, **kwargs)


class Acting(Block):
    """A block whose activation is a module, or a function held as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Callable[[torch.Tensor], torch.Tensor] = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens."""
        return x + self.narrow(self.activation(self.wide(x)))


@attack("changes", "the activation of a block is replaced by another module")
def activation_replaced(t: Trial) -> None:
    model = Net([Acting(), Acting()])

    def change() -> None:
        model.blocks[0].activation = nn.Softmax(dim=0)

    changed(t, model, change)


@attack("changes", "a function held by a block is replaced by one that mixes examples")
def function_replaced(t: Trial) -> None:
    class Holding(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.tanh

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.narrow(self.act(self.wide(x)))

    model = Net([Holding(), Holding()])

    def change() -> None:
        model.blocks[0].act = lambda y: y - y.mean((0, 1))

    changed(t, model, change)


@attack("changes", "a whole block is replaced by a new one, whose weights the optimizer gets")
def block_replaced(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)

    def change() -> None:
        model.blocks[0] = Block()
        optimizer.add_param_group({"params": list(model.blocks[0].parameters())})

    changed(t, model, change, optimizer=optimizer)


@attack("changes", "a block is appended to the Sequential (a growing network)")
def block_appended(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)

    def change() -> None:
        model.blocks.append(Block())
        optimizer.add_param_group({"params": list(model.blocks[-1].parameters())})

    changed(t, model, change, optimizer=optimizer)


@attack("changes", "two blocks of the Sequential change places")
def blocks_swapped(t: Trial) -> None:
    model = Net()

    def change() -> None:
        model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]

    changed(t, model, change)


@attack("changes", "a block is deleted from the Sequential")
def block_deleted(t: Trial) -> None:
    model = Net([Block(), Block(), Block()])

    def change() -> None:
        del model.blocks[1]

    changed(t, model, change)


@attack("changes", "the forward of a block is replaced on the object (a monkey patch after the plan)")
def forward_patched(t: Trial) -> None:
    model = Net()

    def change() -> None:
        block = model.blocks[0]
        own = block.forward
        block.forward = lambda x: own(x) * 0.5

    changed(t, model, change)


@attack("changes", "the same, and the session undone afterwards: the program's own wrapper stays")
def forward_patched_then_undone(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    session = t.apply(model, optimizer)

    def change(step: int) -> None:
        if step == 0:
            block = model.blocks[0]
            own = block.forward
            block.forward = lambda x: own(x) * 0.5
        if step == 1 and session is not None:
            session.undo()

    train(t, model, optimizer, after=change, applied=True)


@attack("changes", "the class of a block is changed (block.__class__ = ...)")
def classchanged(t: Trial) -> None:
    class Other(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - self.inner(x).mean(1, keepdim=True)

    model = Net()

    def change() -> None:
        model.blocks[0].__class__ = Other

    changed(t, model, change)


@attack("changes", "the forward of a block's class is replaced (a patch of the library)")
def class_patched(t: Trial) -> None:
    class Patched(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x)

    model = Net([Patched(), Patched()])

    def change() -> None:
        Patched.forward = lambda self, x: x + self.inner(x - x.mean((0, 1)))

    changed(t, model, change)


@attack("changes", "a parametrisation is added to a layer of the block")
def parametrisation_added(t: Trial) -> None:
    class Symmetric(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight - weight.mean()

    model = Net()

    def change() -> None:
        # The optimizer goes on with the tensor that is the parametrisation's original.
        parametrize.register_parametrization(model.blocks[0].wide, "weight", Symmetric())

    changed(t, model, change)


@attack("changes", "spectral_norm is on the head from the beginning (its weight is computed at each read)")
def spectral_head(t: Trial) -> None:
    model = Net()
    parametrizations.spectral_norm(model.head)
    train(t, model)


@attack("changes", "weight_norm is put on the head while training")
def weight_norm_added_to_head(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)

    def change() -> None:
        parametrizations.weight_norm(model.head)
        optimizer.add_param_group({"params": list(model.head.parametrizations.parameters())})

    changed(t, model, change, optimizer=optimizer)


@attack("changes", "the orthogonal parametrisation on the head")
def orthogonal_head(t: Trial) -> None:
    model = Net()
    parametrizations.orthogonal(model.head)
    train(t, model)


@attack("changes", "pruning masks on the head and in a block, updated while training")
def pruned(t: Trial) -> None:
    model = Net()
    prune.l1_unstructured(model.head, "weight", 0.3)
    prune.l1_unstructured(model.blocks[0].wide, "weight", 0.3)
    changed(t, model, lambda: model.head.weight_mask.mul_(0.5))


@attack("changes", "the head's weight is tied to another layer while training")
def tied_later(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            features = self.features(x)
            assert y is not None
            return self.loss(self.head(features) + self.other(features), y)

    model = Model()

    def change() -> None:
        model.other.weight = model.head.weight

    changed(t, model, change)


@attack("changes", "a tied head is untied, its copy added to the optimizer")
def untied_later(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Linear(WIDTH, NUM_CLASSES)
            self.back.weight = self.head.weight

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = super().features(x)
            return x + functional.linear(self.back(x), self.back.weight.T)

    model = Model()
    optimizer = sgd(model)

    def change() -> None:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        optimizer.add_param_group({"params": [model.head.weight]})

    changed(t, model, change, optimizer=optimizer)


@attack("changes", "a parameter is replaced by a new one that the optimizer does not hold (a reset head)")
def head_reset(t: Trial) -> None:
    model = Net()

    def change() -> None:
        model.head.weight = nn.Parameter(0.5 * model.head.weight.detach())

    changed(t, model, change)


class Masked(Block):
    """Attention by hand with a cached mask."""

    is_attention = True

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that have looked at each other."""
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / WIDTH**0.5
        scores = scores.masked_fill(self.mask, float("-inf"))
        return x + self.inner(functional.softmax(scores, dim=-1) @ x)


@attack("changes", "a cached attention mask is written in place while training")
def mask_mutated(t: Trial) -> None:
    mask = torch.ones(6, 6).triu(1).bool()
    model = Net([Masked(mask), Masked(mask)])

    def change() -> None:
        mask[:, 3:] = False

    changed(t, model, change)


@attack("changes", "a cached bias is written in place between forward and backward pass")
def bias_mutated_before_backward(t: Trial) -> None:
    class Biased(Block):
        def __init__(self, bias: torch.Tensor) -> None:
            super().__init__()
            self.bias = bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x + self.bias)

    bias = torch.zeros(6, WIDTH)
    model = Net([Biased(bias), Biased(bias)])

    def mutate(step: int) -> None:
        bias[step] = 1.0

    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        mutate(step)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "blocks are frozen and thawed in turns")
def frozen_in_turns(t: Trial) -> None:
    model = Net()

    def turn(step: int) -> None:
        for number, block in enumerate(model.blocks):
            block.requires_grad_(number == step % 2)

    train(t, model, before=turn, num_steps=5)


@attack("changes", "a module is added inside a block with add_module, and used")
def module_added(t: Trial) -> None:
    class Growing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return x + (self.extra(y) if hasattr(self, "extra") else y)

    model = Net([Growing(), Growing()])
    changed(t, model, lambda: model.blocks[0].add_module("extra", nn.Softmax(dim=0)))


@attack("changes", "a hook is registered in a block after two steps")
def hook_added_later(t: Trial) -> None:
    model = Net()

    def change() -> None:
        model.blocks[0].wide.register_forward_hook(lambda _, __, output: output - output.mean((0, 1)))

    changed(t, model, change)


@attack("changes", "a hook that counts is registered in a block after two steps")
def counting_hook_added_later(t: Trial) -> None:
    model = Net()
    calls: list[int] = []

    def change() -> None:
        model.blocks[0].wide.register_forward_hook(lambda *_: calls.append(1))

    changed(t, model, change)
    t.note("calls", len(calls))


@attack("changes", "the model is cast to bfloat16 and back between two steps")
def cast_and_back(t: Trial) -> None:
    model = Net()
    # All of them are cast in the middle of a step.
    t.writes_within_step("")
    dtype = torch.get_default_dtype()
    changed(t, model, lambda: model.to(torch.bfloat16).to(dtype))


@attack("changes", "the model is cast to float32 (model.float()) and goes on so")
def cast_to_float(t: Trial) -> None:
    model = Net()
    # All of them are cast in the middle of a step.
    t.writes_within_step("")
    changed(t, model, model.float, batch=lambda step: _as_weights(model, tokens(step)))


def _as_weights(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    weight = next(model.parameters())
    return batch[0].to(weight.dtype if weight.dtype != torch.bfloat16 else torch.float32), batch[1]


@attack("changes", "the model is wrapped by torch.compile(backend='eager') after the plan was put on", only=COMPILED)
def compiled_eagerly(t: Trial) -> None:
    model = Net(sequential=False)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        optimizer.zero_grad()
        loss = compiled(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    torch._dynamo.reset()


@attack("changes", "one block is compiled on its own (block.compile(backend='eager'))", only=COMPILED)
def block_compiled(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    model.blocks[0].compile(backend="eager")
    train(t, model, optimizer, num_steps=2, applied=True)
    torch._dynamo.reset()


@attack("changes", "model.train() and model.eval() change the blocks' behaviour in turns, with gradients in both")
def trained_in_eval(t: Trial) -> None:
    class Switching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (self.inner(x) if self.training else self.inner(x - x.mean((0, 1))))

    model = Net([Switching(), Switching()])
    train(t, model, num_steps=5, before=lambda step: model.train(step % 3 != 2))


@attack("changes", "weights are re-initialised in place through .data (a lottery ticket, a restart)")
def reinitialised(t: Trial) -> None:
    model = Net()

    def change() -> None:
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter.data, 0.05) + 0.5 * parameter.data

    changed(t, model, change)


@attack("changes", "the number of classes grows: a wider head replaces the first (continual learning)")
def head_widened(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)

    def change() -> None:
        wider = nn.Linear(WIDTH, NUM_CLASSES)
        with torch.no_grad():
            wider.weight.copy_(model.head.weight * 0.5)
        model.head = wider
        optimizer.add_param_group({"params": list(wider.parameters())})

    changed(t, model, change, optimizer=optimizer)


@attack("changes", "a convolution of a chain gets other padding and dilation while training")
def convolution_reconfigured(t: Trial) -> None:
    model = Images()

    def change() -> None:
        model.chain[0].padding, model.chain[0].dilation = (2, 2), (2, 2)

    changed(t, model, change, batch=images)


@attack("changes", "images grow while training (progressive resizing)")
def images_grow(t: Trial) -> None:
    train(t, Images(), batch=lambda step: images(step, size=8 + 4 * step))


@attack("changes", "the loop reads vars of a block: its __dict__, its forward's signature, its repr")
def introspection(t: Trial) -> None:
    model = Net()

    def look(_: int) -> None:
        t.note("repr", repr(model))
        t.note("parameters", [name for name, _ in model.named_parameters()])
        t.note("keys", sorted(model.state_dict()))

    train(t, model, after=look)


@attack("changes", "a second session is undone before the first (plans on and off in any order)")
def sessions_in_any_order(t: Trial) -> None:
    first, second = Net(), Net()
    optimizers = [sgd(first), sgd(second)]
    sessions = [t.apply(first, optimizers[0]), t.apply(second, optimizers[1])]
    for step in range(4):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
        if step < 2 and (session := sessions[step]) is not None:
            session.undo()
