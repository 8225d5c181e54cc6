"""Training loops of many kinds: teachers, alternating optimizers, partial backward passes, shared encoders, groups and states that change."""

import contextlib
import copy
import random
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_


@attack("gradients", "the model holds its optimizer, and steps it inside of a method (a Lightning-like module)")
def holds_optimizer(t: Trial) -> None:
    class Module(Net):
        def fit(self, step: int) -> torch.Tensor:
            loss = self(*tokens(step))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss

    model = Module()
    model.optimizer = adamw(model)
    t.apply(model, model.optimizer)
    for step in range(4):
        t.note("loss", model.fit(step))
        t.end_step()


@attack("gradients", "the optimizer is stepped inside the forward of the next batch (a model that trains itself)")
def steps_inside_forward(t: Trial) -> None:
    class Module(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            if self.pending:
                self.optimizer[0].step()
                self.optimizer[0].zero_grad()
            self.pending = True
            return super().forward(x, y)

    model = Module()
    model.pending = False
    model.optimizer = [sgd(model)]
    t.apply(model, model.optimizer[0])
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "the optimizer is stepped per parameter in a hook of the user's own (a fused backward of their own)"
)
def own_fused_backward(t: Trial) -> None:
    model = Net()
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    t.apply(model, *each.values())
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a teacher is held inside the model (frozen, in eval, a child module)")
def teacher_inside(t: Trial) -> None:
    class Student(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Net().requires_grad_(False).eval()

        def train(self, mode: bool = True) -> "Student":
            super().train(mode)
            self.teacher.eval()
            return self

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            goal = self.teacher(x).softmax(-1)
            return super().forward(x, y) + functional.kl_div(super().forward(x).log_softmax(-1), goal)

    train(t, Student())


@attack("gradients", "two models share an encoder; each has an optimizer with the encoder in it, stepped in turns")
def shared_encoder(t: Trial) -> None:
    encoder = Block()
    first, second = Net([encoder, Block()]), Net([encoder, Block()])
    of_first, of_second = sgd(first), sgd(second)
    t.apply(first, of_first)
    t.apply(second, of_second)
    for step in range(4):
        model, optimizer = (first, of_first) if step % 2 == 0 else (second, of_second)
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "two models share an encoder, and one backward pass of the sum of both losses")
def shared_encoder_summed(t: Trial) -> None:
    encoder = Block()
    first, second = Net([encoder, Block()]), Net([encoder, Block()])
    optimizer = sgd(first)
    heads = torch.optim.SGD(second.head.parameters(), lr=0.1)
    t.apply(first, optimizer)
    t.apply(second, heads)
    for step in range(4):
        loss = first(*tokens(step)) + second(*tokens(step + 50))
        optimizer.zero_grad()
        heads.zero_grad()
        loss.backward()
        optimizer.step()
        heads.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "alternating optimizers (EM): body for two steps, head for one, on the same loss")
def alternating_optimizers(t: Trial) -> None:
    model = Net()
    body = torch.optim.SGD([*model.stem.parameters(), *model.blocks.parameters()], lr=0.1)
    head = torch.optim.Adam(model.head.parameters(), lr=0.01)
    t.apply(model, body, head)
    for step in range(6):
        optimizer = head if step % 3 == 2 else body
        loss = model(*tokens(step))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "autograd.grad with respect to the head alone, its gradients set by hand")
def partial_gradient(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        grads = torch.autograd.grad(loss, list(model.head.parameters()))
        for p, g in zip(model.head.parameters(), grads, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "losses weighted by the norms of their gradients at a shared layer (GradNorm)")
def gradient_norm_weights(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        logits = model(x)
        losses = [model.loss(logits, y), logits.pow(2).mean()]
        norms = [torch.autograd.grad(l, model.stem.weight, retain_graph=True)[0].norm() for l in losses]
        total = sum(l / n.detach() for l, n in zip(losses, norms, strict=True))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        t.note("loss", total)
        t.end_step()


@attack("gradients", "two losses, the first run backwards with retain_graph, its gradients kept aside, and both mixed")
def retained_and_mixed(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        logits = model(x)
        optimizer.zero_grad()
        model.loss(logits, y).backward(retain_graph=True)
        kept = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        logits.pow(2).mean().backward()
        for p, g in zip(model.parameters(), kept, strict=True):
            p.grad.add_(g)
        optimizer.step()
        t.note("logits", logits)
        t.end_step()


@attack("gradients", "accumulation under a context manager like no_sync")
def no_sync_like(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)

    @contextlib.contextmanager
    def no_sync() -> Any:
        yield

    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            with no_sync() if part < 2 else contextlib.nullcontext():
                loss = model(*tokens(3 * step + part)) / 3
                loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "weights with torch.nn.utils.prune: mask and weight_orig, pruned again while training", only=EXACT)
def pruned_blocks(t: Trial) -> None:
    from torch.nn.utils import prune

    model = Net()
    prune.random_unstructured(model.blocks[0].wide, "weight", amount=0.3)

    def again(step: int) -> None:
        if step == 1:
            prune.l1_unstructured(model.blocks[0].wide, "weight", amount=0.3)

    train(t, model, after=again)


@attack("changes", "pruning is made permanent (prune.remove) while training: weight_orig goes away")
def pruning_removed(t: Trial) -> None:
    from torch.nn.utils import prune

    model = Net()
    prune.random_unstructured(model.blocks[0].wide, "weight", amount=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def remove(step: int) -> None:
        if step == 1:
            prune.remove(model.blocks[0].wide, "weight")
            optimizer.param_groups[0]["params"] = list(model.parameters())

    train(t, model, optimizer, after=remove)


@attack("changes", "weight_norm of a block's layer (the old one, by a pre-hook), removed while training")
def old_weight_norm(t: Trial) -> None:
    model = Net()
    nn.utils.weight_norm(model.blocks[0].wide)
    optimizer = sgd(model)

    def remove(step: int) -> None:
        if step == 2:
            nn.utils.remove_weight_norm(model.blocks[0].wide)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    train(t, model, optimizer, num_steps=5, after=remove)


@attack("changes", "LoRA whose layers merge into the frozen weight for evaluation and unmerge for training")
def lora_merged(t: Trial) -> None:
    class Lora(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(2 * WIDTH, 2))
            self.merged = False

        def merge(self, on: bool) -> None:
            with torch.no_grad():
                self.wide.weight.add_(self.b @ self.a, alpha=1.0 if on else -1.0)
            self.merged = on

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            wide = self.wide(h) if self.merged else self.wide(h) + h @ self.a.T @ self.b.T
            return x + self.narrow(functional.gelu(wide))

    model = Net([Lora(), Lora()])

    def evaluate(step: int) -> None:
        for block in model.blocks:
            block.merge(True)
        with torch.no_grad():
            t.note("eval", model(*tokens(90)))
        for block in model.blocks:
            block.merge(False)

    train(t, model, after=evaluate)


@attack("changes", "LoRA merged between forward and backward pass of the same step")
def lora_merged_before_backward(t: Trial) -> None:
    class Lora(Block):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(2 * WIDTH, 2))
            self.merged = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            wide = self.wide(h) if self.merged else self.wide(h) + h @ self.a.T @ self.b.T
            return x + self.narrow(functional.gelu(wide))

    model = Net([Lora(), Lora()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        for block in model.blocks:
            block.merged = True
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for block in model.blocks:
            block.merged = False
        t.note("loss", loss)
        t.end_step()


@attack("changes", "two adapters, of which the loop chooses one by step (the other keeps no gradient)")
def adapters_in_turns(t: Trial) -> None:
    class Adapted(Block):
        active = 0

        def __init__(self) -> None:
            super().__init__()
            self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) + self.adapters[self.active](x)

    model = Net([Adapted(), Adapted()])

    def choose(step: int) -> None:
        for block in model.blocks:
            block.active = step % 2

    train(t, model, adamw(model), num_steps=6, before=choose)


@attack("gradients", "the groups' weight decay, momentum and betas change while training")
def group_settings_change(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def change(step: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * step, 0.99)

    train(t, model, optimizer, before=change)


@attack("gradients", "the groups' settings change between backward pass and step (a rate by the loss)")
def group_settings_by_loss(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def change(step: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.5 * step
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)

    train(t, model, optimizer, between=change)


@attack("gradients", "maximize is set, and amsgrad, from the beginning; foreach, fused and capturable asked for")
def optimizer_flags(t: Trial) -> None:
    model = Net()
    train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, maximize=True, foreach=True))


@attack("gradients", "AdamW with fused=True")
def fused_adamw(t: Trial) -> None:
    model = Net()
    train(t, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


@attack("gradients", "NAdam, RAdam, Adadelta and Rprop on a part each")
def rare_optimizers(t: Trial) -> None:
    model = Net()
    optimizers = [
        torch.optim.NAdam(model.stem.parameters(), lr=1e-2),
        torch.optim.RAdam(model.blocks[0].parameters(), lr=1e-2),
        torch.optim.Adadelta(model.blocks[1].parameters()),
        torch.optim.Rprop(model.head.parameters()),
    ]
    t.apply(model, *optimizers)
    for step in range(4):
        loss = model(*tokens(step))
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a subclass of AdamW that decays the rate by its own count of steps")
def counting_optimizer(t: Trial) -> None:
    class Counting(torch.optim.AdamW):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            for group in self.param_groups:
                group["lr"] = 1e-2 / self.count
            return super().step(closure)

    model = Net()
    train(t, model, Counting(model.parameters(), lr=1e-2))


@attack("gradients", "an optimizer of the user's own, with noise by torch.randn in its step (Langevin)")
def langevin(t: Trial) -> None:
    class Langevin(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=0.01)

    model = Net()
    train(t, model, Langevin(model.parameters()))


@attack("gradients", "a global norm over all parameters inside the optimizer's step (LARS, LAMB)")
def global_norm_in_step(t: Trial) -> None:
    class Normed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                total = torch.stack([p.grad.norm() for p in group["params"] if p.grad is not None]).norm()
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad / total, alpha=-group["lr"])

    model = Net()
    train(t, model, Normed(model.parameters()))


@attack("gradients", "stale gradients: the step is done before the backward pass of the batch (delayed)")
def delayed_step(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        if step:
            optimizer.zero_grad()
        loss.backward()
        if step % 2:
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the forward of the next batch runs before the backward pass of this one (a pipeline)")
def pipelined(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    ahead = model.features(tokens(0)[0])
    for step in range(4):
        loss = model(*tokens(step)) + 0.1 * ahead.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ahead = model.features(tokens(step + 1)[0])
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "gradients are read through parameter .grad in a thread-free logger object after zero_grad")
def logger_reads(t: Trial) -> None:
    class Logger:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def log(self) -> float:
            return float(sum(p.grad.abs().sum() for p in self.model.parameters() if p.grad is not None))

    model = Net()
    logger = Logger(model)
    train(t, model, between=lambda _: t.note("sum", logger.log()))


@attack("gradients", "has_nan = any(torch.isnan(g).any() for g in grads): a guard over a generator")
def nan_guard(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    skipped = 0
    for step in range(4):
        loss = model(*tokens(step)) * (float("inf") if step == 2 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        if any(not bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None):
            skipped += 1
        else:
            optimizer.step()
        t.end_step()
    t.note("skipped", skipped)


@attack(
    "gradients", "evolution: every third step perturbs the weights by random numbers and keeps the better", only=EXACT
)
def hill_climbing(t: Trial) -> None:
    model = Net()

    def perturb(step: int) -> None:
        if step % 3 == 2:
            with torch.no_grad():
                before = float(model(*tokens(77)))
                kept = copy.deepcopy(model.state_dict())
                for p in model.parameters():
                    p.add_(torch.randn_like(p), alpha=0.05)
                if float(model(*tokens(77))) > before:
                    model.load_state_dict(kept)

    train(t, model, num_steps=6, after=perturb)


@attack("gradients", "an EMA of the weights updated by a forward pre-hook on the model", only=EXACT)
def average_by_forward_hook(t: Trial) -> None:
    model = Net()
    average = copy.deepcopy(model)

    def update(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for a, b in zip(average.parameters(), module.parameters(), strict=True):
                a.lerp_(b, 0.2)

    model.register_forward_pre_hook(update)
    train(t, model)
    t.note("average", list(average.parameters()))


@attack("gradients", "an optimizer made over tensors that are views of a flat parameter (FSDP-like)")
def flat_parameter(t: Trial) -> None:
    class Flat(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.randn(WIDTH * WIDTH + WIDTH * NUM_CLASSES) * 0.3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a, b = self.flat.split([WIDTH * WIDTH, WIDTH * NUM_CLASSES])
            logits = torch.tanh(x @ a.view(WIDTH, WIDTH)) @ b.view(WIDTH, NUM_CLASSES)
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    train(t, Flat())


@attack("gradients", "layers trained in a random subset by requires_grad, drawn in each step")
def random_subset_trained(t: Trial) -> None:
    model = Net()
    chance = random.Random(5)

    def draw(_: int) -> None:
        for block in model.blocks:
            block.requires_grad_(chance.random() < 0.5)

    train(t, model, num_steps=6, before=draw)


@attack("gradients", "clipping with error_if_nonfinite, and an exception that the loop takes as 'skip this batch'")
def clip_raises(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step)) * (float("nan") if step == 1 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        try:
            clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
            optimizer.step()
        except RuntimeError as error:
            t.caught(error)
        t.end_step()
