"""What surrounds a training loop: modes, profilers, warnings as errors, devices, compiled and scripted parts, and forwards in unusual places."""

import contextlib
import functools
import gc
import sys
import warnings
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import BITWISE, EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from tests.process_state import forget_default_device
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


@attack("clean", "warnings are errors")
def warnings_are_errors(t: Trial) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(t, Net())


@attack("recomputation", "the autograd profiler runs")
def profiled(t: Trial) -> None:
    with torch.autograd.profiler.profile(record_shapes=True):
        train(t, Net())


@attack("recomputation", "the flop counter of torch around every step (a dispatch mode)")
def flops_counted(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        with FlopCounterMode(display=False):
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation", "a dispatch mode of the program's own rounds what matrices multiply to, less so from call to call"
)
def dispatch_mode_rounds(t: Trial) -> None:
    calls = [0]

    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addmm.default:
                calls[0] += 1
                out = out * (1 + 0.01 * (calls[0] % 5))
            return out

    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        with Rounding():
            loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a function mode of the program's own doubles gelu in the forward alone")
def function_mode_doubles(t: Trial) -> None:
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is functional.gelu else out

    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        with Doubling():
            loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("clean", "a default device is set")
def default_device(t: Trial) -> None:
    torch.set_default_device("cpu")
    try:
        train(t, Net())
    finally:
        forget_default_device()


@attack("clean", "deterministic algorithms are asked for")
def deterministic(t: Trial) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        train(t, Net())
    finally:
        torch.use_deterministic_algorithms(False)


@attack("recomputation", "the default dtype is another while the forward runs", only=EXACT)
def default_dtype_in_forward(t: Trial) -> None:
    class Mixed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * torch.ones(WIDTH).to(x) / torch.tensor(3.0)

    model = Net([Mixed(), Mixed()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    before = torch.get_default_dtype()
    for step in range(3):
        batch = tokens(step)
        torch.set_default_dtype(torch.float32)
        loss = model(*batch)
        torch.set_default_dtype(before)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "garbage collection is off and frozen, and a trace function counts calls")
def traced_and_frozen(t: Trial) -> None:
    calls = [0]

    def tracer(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call"

    gc.disable()
    gc.freeze()
    before = sys.getprofile()
    sys.setprofile(tracer)
    try:
        train(t, Net())
    finally:
        sys.setprofile(before)
        gc.unfreeze()
        gc.enable()


@attack("recomputation", "a scripted block, and one that is traced")
def scripted_blocks(t: Trial) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.wide(x))

    traced = torch.jit.trace(Plain(), tokens(0)[0])
    train(t, Net([torch.jit.script(Plain()), traced], sequential=False))


@attack("recomputation", "blocks that are graph modules of torch.fx")
def graph_modules(t: Trial) -> None:
    train(t, Net([torch.fx.symbolic_trace(Block()), torch.fx.symbolic_trace(Block())]))


@attack("recomputation", "the forward of a block is a partial, a lambda or a static method")
def forwards_of_other_kinds(t: Trial) -> None:
    class Static(nn.Module):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * 1.5 + torch.tanh(x)

    first, second = Block(), Block()
    first.forward = functools.partial(Block.forward, first)
    second.forward = lambda x: x + second.inner(x) * 0.5
    train(t, Net([first, second, Static()]))


@attack("recomputation", "__call__ of the block's class does more than the forward")
def call_overridden(t: Trial) -> None:
    class Called(Block):
        calls = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().__call__(x * 0.9) + x / self.calls

    train(t, Net([Called(), Called()]))


@attack("recomputation", "blocks without parameters, an identity, and one that returns a constant")
def empty_blocks(t: Trial) -> None:
    class Constant(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(x)

    class Cut(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach() * 2

    train(t, Net([nn.Identity(), Constant(), Block(), Cut(), nn.Tanh(), Block()]))


@attack("recomputation", "a model wrapped in DataParallel on the CPU")
def data_parallel(t: Trial) -> None:
    class Wrapped(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.DataParallel(Net())

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.inner(x, y).mean()

    train(t, Wrapped())


@attack("recomputation", "gradients are switched off globally, and on around the forward")
def gradients_off_globally(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    torch.set_grad_enabled(False)
    try:
        for step in range(3):
            with torch.enable_grad():
                loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
    finally:
        torch.set_grad_enabled(True)


@attack("recomputation", "a warm-up in inference mode fills a cache that training reads", only=EXACT)
def inference_warm_up(t: Trial) -> None:
    class Cached(Block):
        table: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, WIDTH).to(x)
            return x + self.inner(x + self.table)

    model = Net([Cached(), Cached()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    with torch.inference_mode():
        model(tokens(9)[0])
    for step in range(3):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a forward under no_grad and one with gradients take turns within a step, of the same block")
def turns_of_modes(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            with torch.no_grad():
                guess = self.blocks(x)
            return self.blocks(x + 0.1 * guess) + self.blocks(guess)

    train(t, Model())


@attack("recomputation", "a context manager of the block's own is entered in its pre-hook and left in its hook")
def context_by_hooks(t: Trial) -> None:
    class Scoped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.stack = contextlib.ExitStack()
            self.register_forward_pre_hook(
                lambda module, _: module.stack.enter_context(torch.autocast("cpu", enabled=False)) and None
            )
            self.register_forward_hook(lambda module, _, __: module.stack.close())

    train(t, Net([Scoped(), Scoped()]))


@attack(
    "recomputation",
    "autocast to bfloat16 in blocks, with its cache of cast weights, around two calls of each",
    only=BITWISE,
)
def autocast_twice(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.features(x.float())
                x = self.blocks(x)
            return self.loss(self.head(x.float()), y)

    model = Model().float()
    train(t, model, adamw(model))


@attack("recomputation", "recursion: the block calls its own model on half of the tokens")
def calls_its_model(t: Trial) -> None:
    class Recursive(Block):
        owner: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > 3:
                half = self.owner[0].blocks[1](x[:, :3])
                x = x + half.mean(1, keepdim=True)
            return super().forward(x)

    model = Net([Recursive(), Recursive()])
    for block in model.blocks:
        block.owner = [model]
    train(t, model)


@attack("recomputation", "a StopIteration and a GeneratorExit pass through the block's forward")
def generator_closed_inside(t: Trial) -> None:
    class Closing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def parts() -> Any:
                try:
                    yield self.wide(x)
                    yield self.wide(x * 2)
                finally:
                    self.closed = getattr(self, "closed", 0) + 1

            made = parts()
            hidden = next(made)
            made.close()
            return x + self.narrow(torch.tanh(hidden)) / self.closed

    train(t, Net([Closing(), Closing()]))


@attack("parts", "embedding bags with offsets, and ragged indices, before the blocks", only=EXACT)
def embedding_bags(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, WIDTH, mode="mean")

        def forward(self, words: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(self.head(self.features(self.bag(words, offsets).unsqueeze(1))), y)

    train(t, Model(), batch=lambda s: (torch.arange(12) + s, torch.tensor([0, 2, 3, 8]), tokens(s)[1][:, :1]))


@attack("parts", "a nested tensor as the input, which the model pads", only=EXACT)
def nested_input(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(torch.nested.to_padded_tensor(x, 0.0, output_size=(4, 6, WIDTH)), y)

    def batch(step: int) -> Any:
        x, y = tokens(step)
        return torch.nested.nested_tensor([x[i, : 3 + i % 2] for i in range(4)]), y

    train(t, Model(), batch=batch)


@attack("parts", "sparse and boolean inputs: a sparse matrix over tokens, and a boolean mask", only=EXACT)
def sparse_input(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, graph: torch.Tensor, keep: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = torch.stack([torch.sparse.mm(graph, each) for each in self.stem(x)])
            return self.loss(self.head(self.blocks(x * keep.unsqueeze(-1))), y)

    graph = torch.eye(6).roll(1, 0).to_sparse()
    train(t, Model(), batch=lambda s: (tokens(s)[0], graph, tokens(s)[1] > 1, tokens(s)[1]))


@attack("parts", "images whose batch norm is frozen in evaluation mode while the rest trains")
def frozen_batch_norm(t: Trial) -> None:
    model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)])
    model.chain[1].eval()
    train(t, model, batch=images)
