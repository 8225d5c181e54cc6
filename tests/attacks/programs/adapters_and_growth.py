"""Adapters and parts of models that come, go, and are exchanged: low-rank weights of several kinds, prompts, quantisation, pruning, growth."""

import copy
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize


class Low(nn.Module):
    """A frozen linear layer with low-rank weights by the name of an adapter (peft)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.ModuleDict(), nn.ModuleDict()
        self.active, self.merged, self.rank = "default", False, rank
        self.add("default")

    def add(self, name: str) -> None:
        self.a[name] = nn.Linear(self.base.in_features, self.rank, bias=False)
        self.b[name] = nn.Linear(self.rank, self.base.out_features, bias=False)

    def merge(self) -> None:
        sign = -1.0 if self.merged else 1.0
        self.base.weight.data += sign * self.b[self.active].weight @ self.a[self.active].weight
        self.merged = not self.merged

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out if self.merged else out + self.b[self.active](self.a[self.active](x))


class Adapted(Block):
    """Both of its layers have adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = Low(self.wide), Low(self.narrow)
        self.norm.requires_grad_(False)


def layers(model: nn.Module) -> list[Low]:
    """All with adapters."""
    return [m for m in model.modules() if isinstance(m, Low)]


@attack(
    "changes",
    "an adapter is added in the middle, its weights given to the optimizer, and used beside the first by turns (peft)",
)
def adapter_added(t: Trial) -> None:
    model = Net([Adapted(), Adapted()])
    optimizer = adamw(model)

    def add(step: int) -> None:
        if step == 2:
            for each in layers(model):
                each.add("second")
            new = [p for n, p in model.named_parameters() if ".second." in n]
            optimizer.add_param_group({"params": new})
        for each in layers(model):
            each.active = "second" if step >= 2 and step % 2 else "default"

    train(t, model, optimizer, num_steps=6, before=add)


@attack(
    "changes",
    "an adapter is merged for good in the middle, its layers exchanged for the plain ones, which train on (merge_and_unload)",
)
def merged_and_unloaded(t: Trial) -> None:
    model = Net([Adapted(), Adapted()])
    optimizer = sgd(model)

    def unload(step: int) -> None:
        if step == 1:
            for block in model.blocks:
                for name in ("wide", "narrow"):
                    low = getattr(block, name)
                    low.merge()
                    setattr(block, name, low.base.requires_grad_(True))
            optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]

    train(t, model, optimizer, after=unload)


@attack(
    "changes",
    "the vocabulary grows in the middle: stem and head are replaced by larger ones, moments of the old rows are kept",
)
def vocabulary_grows(t: Trial) -> None:
    class Words(Net):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Embedding(5, WIDTH)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(self.features(x))
            return logits if y is None else functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    model = Words()
    optimizer = adamw(model)

    def grown(module: nn.Module, more: int) -> None:
        for name, p in list(module.named_parameters()):
            new = nn.Parameter(torch.cat([p.detach(), p.detach()[:more] * 0.1]))
            state = optimizer.state.pop(p)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][:more])])
            optimizer.state[new] = state
            params = optimizer.param_groups[0]["params"]
            params[next(i for i, q in enumerate(params) if q is p)] = new
            setattr(module, name, new)

    def grow(step: int) -> None:
        if step == 2:
            grown(model.stem, 2)
            grown(model.head, 2)

    def words(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = tokens(step)[1]
        return y % (5 if step <= 2 else 7), y

    train(t, model, optimizer, num_steps=5, batch=words, after=grow)


@attack(
    "recomputation",
    "a parametrisation with a state: noise in its buffer is drawn whenever the weight is read (stochastic weights)",
)
def stochastic_parametrisation(t: Trial) -> None:
    class Noisy(nn.Module):
        def __init__(self, like: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("noise", torch.zeros_like(like))
            self.reads = 0

        def forward(self, w: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.reads += 1
                self.noise.normal_()
            return w + 0.05 * self.noise

    model = Net()
    for block in model.blocks:
        parametrize.register_parametrization(block.wide, "weight", Noisy(block.wide.weight))
    train(t, model)


@attack(
    "changes",
    "quantisation with learned steps comes in the middle: layers' classes are exchanged in place, steps added to the optimizer",
)
def class_exchanged_for_quantisation(t: Trial) -> None:
    class Stepped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.weight / self.step
            return functional.linear(x, (w + (w.round() - w).detach()) * self.step, self.bias)

    model = Net()
    optimizer = adamw(model)

    def exchange(step: int) -> None:
        if step == 2:
            for block in model.blocks:
                block.wide.__class__ = Stepped
                block.wide.step = nn.Parameter(block.wide.weight.detach().abs().mean() / 4)
            optimizer.add_param_group({"params": [b.wide.step for b in model.blocks]})

    train(t, model, optimizer, num_steps=5, before=exchange)


@attack(
    "changes",
    "a checkpoint is loaded with strict=False and other keys, with hooks on saving and loading that rename them",
)
def renamed_by_hooks(t: Trial) -> None:
    model = Net()

    def renamed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in list(state):
            if key.startswith(prefix + "wide."):
                state[prefix + "up." + key.removeprefix(prefix + "wide.")] = state.pop(key)

    def back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in list(state):
            if key.startswith(prefix + "up."):
                state[prefix + "wide." + key.removeprefix(prefix + "up.")] = state.pop(key)

    for block in model.blocks:
        block.register_state_dict_post_hook(renamed)
        block.register_load_state_dict_pre_hook(back)
        block.register_load_state_dict_post_hook(lambda module, keys: t.note("missing", list(keys.missing_keys)))

    def load(step: int) -> None:
        saved = copy.deepcopy(model.state_dict())
        t.note("keys", list(saved))
        saved["blocks.0.up.weight"] *= 0.9
        saved.pop("head.bias")
        model.load_state_dict(saved, strict=False)

    train(t, model, after=load)


@attack(
    "parts",
    "several clients train copies of the model with an optimizer each, and the average is loaded (federated averaging)",
)
def federated(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        states = []
        for client in range(2):
            copied = copy.deepcopy(model)
            own = sgd(copied, momentum=0.0)
            for i in range(2):
                own.zero_grad()
                copied(*tokens(10 * step + 2 * client + i)).backward()
                own.step()
            states.append(copied.state_dict())
        model.load_state_dict({k: sum(s[k] for s in states) / 2 for k in states[0]})
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the head grows, and the plan is taken off after it: the new head trains on with the rest")
def head_grows_and_plan_goes(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    session = t.apply(model, optimizer)
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            old, params = model.head.weight, optimizer.param_groups[0]["params"]
            model.head.weight = nn.Parameter(torch.cat([old.detach()[:-1], old.detach()[:1]]))
            params[next(i for i, p in enumerate(params) if p is old)] = model.head.weight
            optimizer.state[model.head.weight] = optimizer.state.pop(old)
        if step == 3 and session is not None:
            session.undo()
        t.note("loss", loss)
        t.end_step()
