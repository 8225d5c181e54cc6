"""Blocks that read or write more than their input and parameters: buffers, attributes, counters, caches, globals, closures."""

import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("recomputation", "a buffer of a block is reassigned in every forward (a running mean of activations)")
def buffer_reassigned(t: Trial) -> None:
    class Averaging(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
            return x - self.mean + self.inner(x)

    train(t, Net([Averaging(), Averaging()]))


@attack("recomputation", "a buffer that is written in place only from the third call on (a warm-up)")
def buffer_written_later(t: Trial) -> None:
    class Late(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.step >= 2:
                self.scale.mul_(1.5)
            return self.scale * x + self.inner(x)

    model = Net([Late(), Late()])

    def count(step: int) -> None:
        for block in model.blocks:
            block.step = step

    train(t, model, num_steps=5, before=count)


@attack("recomputation", "a plain tensor attribute, not a buffer, is updated in every forward")
def plain_tensor_attribute(t: Trial) -> None:
    class Centering(Block):
        def __init__(self) -> None:
            super().__init__()
            self.center = torch.zeros(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.center = 0.9 * self.center + 0.1 * x.mean((0, 1))
            return x + self.inner(x - self.center)

    train(t, Net([Centering(), Centering()]))


@attack("recomputation", "a plain tensor attribute is written in place through a slice")
def tensor_attribute_in_place(t: Trial) -> None:
    class Recording(Block):
        def __init__(self) -> None:
            super().__init__()
            self.history = torch.zeros(3, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.inner(x) + self.history.mean(0)
            self.history[1:] = self.history[:-1].clone()
            self.history[0] = y.detach().mean((0, 1))
            return y

    train(t, Net([Recording(), Recording()]))


@attack("recomputation", "a Python counter of the block scales its output")
def counter_in_block(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.inner(x) / self.calls

    train(t, Net([Counting(), Counting()]))


@attack("recomputation", "a counter that only counts, and is read after training")
def counter_that_counts(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.inner(x)

    train(t, Net([Counting(), Counting()]))


@attack("recomputation", "a counter changes the block from its fourth call on (a schedule inside the model)")
def counter_that_matters_later(t: Trial) -> None:
    class Scheduled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.inner(x) * (0.5 if self.calls > 3 else 1.0)

    train(t, Net([Scheduled(), Scheduled()]), num_steps=5)


@attack("recomputation", "a count in a buffer of integers (BatchNorm's num_batches_tracked, written by hand)")
def count_in_buffer(t: Trial) -> None:
    class Tracked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("num_calls", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls = self.num_calls + 1
            return x + self.inner(x) / (1.0 + self.num_calls)

    train(t, Net([Tracked(), Tracked()]))


@attack("recomputation", "a list of the block keeps activations for logging")
def activations_appended(t: Trial) -> None:
    class Logging(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norms.append(float(x.detach().norm()))
            return x + self.inner(x)

    train(t, Net([Logging(), Logging()]))


@attack("recomputation", "a dict of the block caches a position table by length")
def cached_in_dict(t: Trial) -> None:
    class Cached(Block):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            if length not in self.tables:
                self.tables[length] = torch.linspace(0, 1, length, dtype=x.dtype)[:, None]
            return x + self.inner(x) + self.tables[length]

    train(t, Net([Cached(), Cached()], sequential=False), batch=lambda step: tokens(step, length=6 + step % 2))


@attack("recomputation", "a module-level counter, read and written by the blocks")
def module_level_global(t: Trial) -> None:
    global CALLS  # noqa: PLW0603 - what the attack is about
    CALLS = 0
    train(t, Net([_GlobalBlock(), _GlobalBlock()]))
    t.note("calls", CALLS)


CALLS = 0


class _GlobalBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        return x + self.inner(x) / CALLS


SETTINGS = {"scale": 1.0}


class _ConfiguredBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + SETTINGS["scale"] * self.inner(x)


@attack("recomputation", "a global setting that blocks read is changed between forward and backward pass")
def global_changed_before_backward(t: Trial) -> None:
    SETTINGS["scale"] = 1.0
    model = Net([_ConfiguredBlock(), _ConfiguredBlock()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        SETTINGS["scale"] = 1.0 + step
        loss = model(*tokens(step))
        SETTINGS["scale"] = 0.0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a closure counts calls in a nonlocal variable and scales by it")
def closure_with_nonlocal(t: Trial) -> None:
    calls = 0

    def scale() -> float:
        nonlocal calls
        calls += 1
        return 1.0 / calls

    class Scaled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * scale()

    train(t, Net([Scaled(), Scaled()]))
    t.note("calls", calls)


@attack("recomputation", "an exponential moving average of codes (VQ-VAE codebook) updated in the forward")
def codebook_ema(t: Trial) -> None:
    class Quantizing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(5, WIDTH))
            self.register_buffer("sizes", torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.inner(x)
            flat = y.detach().reshape(-1, WIDTH)
            nearest = torch.cdist(flat, self.codes).argmin(1)
            quantized = self.codes[nearest].reshape(y.shape)
            if self.training:
                one_hot = functional.one_hot(nearest, 5).to(y.dtype)
                self.sizes.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_((one_hot.T @ flat) / self.sizes[:, None], alpha=0.1)
            return y + (quantized - y).detach()

    train(t, Net([Quantizing(), Quantizing()]))


@attack("recomputation", "spectral_norm on a layer of the block (its vectors change in every forward)")
def spectral_norm_in_block(t: Trial) -> None:
    def made() -> Block:
        block = Block()
        nn.utils.parametrizations.spectral_norm(block.wide)
        return block

    train(t, Net([made(), made()]))


@attack("recomputation", "the old spectral_norm, whose hook sets the weight before each forward")
def old_spectral_norm(t: Trial) -> None:
    def made() -> Block:
        block = Block()
        nn.utils.spectral_norm(block.wide)
        return block

    train(t, Net([made(), made()]))


@attack("recomputation", "batch norm in the block")
def batch_norm(t: Trial) -> None:
    train(t, Net([_Normed(0.1), _Normed(0.1)]))


class _Normed(Block):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


@attack("recomputation", "batch norm with momentum=None (a cumulative average, which counts calls)")
def batch_norm_cumulative(t: Trial) -> None:
    train(t, Net([_Normed(None), _Normed(None)]))


@attack("recomputation", "batch norm in eval for the first steps, then in train")
def batch_norm_switches(t: Trial) -> None:
    model = Net([_Normed(0.1), _Normed(0.1)])
    train(t, model, num_steps=5, before=lambda step: model.train(step >= 2))


@attack("recomputation", "batch norm switched to eval between forward and backward pass")
def eval_before_backward(t: Trial) -> None:
    model = Net([_Normed(0.1), _Normed(0.1)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        model.train()
        loss = model(*tokens(step))
        model.eval()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "batch norm whose running statistics are reset in the middle of training")
def statistics_reset(t: Trial) -> None:
    model = Net([_Normed(0.1), _Normed(0.1)])

    def reset(step: int) -> None:
        if step == 1:
            for block in model.blocks:
                block.batch_norm.reset_running_stats()

    train(t, model, after=reset)


@attack("recomputation", "instance norm that tracks running statistics")
def instance_norm_tracking(t: Trial) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.instance_norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True, affine=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(self.instance_norm(x.transpose(1, 2)).transpose(1, 2))

    train(t, Net([Normed(), Normed()]))


@attack("recomputation", "the block writes an auxiliary loss to an attribute, which the loop adds")
def auxiliary_loss_attribute(t: Trial) -> None:
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.aux: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.aux = y.square().mean()
            return x + y

    model = Net([Routed(), Routed()], sequential=False)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step)) + sum(block.aux for block in model.blocks)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a dict handed through the blocks collects what they computed")
def dict_handed_through(t: Trial) -> None:
    class Collecting(Block):
        def forward(self, x: torch.Tensor, collected: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            y = self.inner(x)
            collected["means"].append(y.mean())
            return x + y

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            collected: dict[str, list[torch.Tensor]] = {"means": []}
            for block in self.blocks:
                x = block(x, collected)
            self.num_collected = len(collected["means"])
            self.penalty = torch.stack(collected["means"]).square().sum()
            return x

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(self.features(x))
            return logits if y is None else self.loss(logits, y) + self.penalty

    train(t, Model([Collecting(), Collecting()], sequential=False))
