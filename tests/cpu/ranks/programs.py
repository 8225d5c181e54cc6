"""Training programs of one card, as people write them, and what real code does that could make a division over ranks wrong. Each returns what is compared."""

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

PROGRAMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {}


def program(**options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enters a program, with how it is run."""

    def enter(function: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS[function.__name__] = (function, options)
        return function

    return enter


def mlp(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), *inner, nn.Tanh(), nn.Linear(16, 4))


def result_of(*models: nn.Module, losses: Any = ()) -> dict[str, Any]:
    found = {"losses": torch.tensor([float(x) for x in losses], dtype=torch.float64)}
    for number, model in enumerate(models):
        found |= {f"{number}.{n}": p.detach().clone() for n, p in model.state_dict().items()}
    return found


def data(num_steps: int = 10, size: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(size, 8), torch.randint(0, 4, (size,))) for _ in range(num_steps)]


def trained(model: nn.Module, batches: Any, optimizer: Any = None, loss_of: Any = None) -> dict[str, Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of = loss_of or (lambda x, y: functional.cross_entropy(model(x), y))
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result_of(model, losses=losses)


# What is trained right.


@program()
def perceptron() -> Any:
    """Loss outside of the model, clipping, a scheduler, accumulation over two, an uneven batch, and a last one of a single example."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for step, (x, y) in enumerate([*data(8, 7), *data(2, 1)]):
        loss = functional.cross_entropy(model(x), y) / 2
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 4 == 1)
            scheduler.step()
    return result_of(model, losses=losses)


@program(ranks=4)
def convolutions() -> Any:
    """Images, group norm, four ranks, an evaluation after every step."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    held, losses = torch.randn(3, 3, 8, 8), []
    for _ in range(10):
        x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 5, (8,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.append(model(held).sum())
        model.train()
    return result_of(model, losses=losses)


class TinyLM(nn.Module):
    """A decoder with tied weights that returns its loss, a mean over the tokens that are no padding."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.embed, self.checkpoints = nn.Embedding(30, 16), checkpoints
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        h = self.embed(tokens)
        for block in self.blocks:
            h = checkpoint(block, h, mask, use_reentrant=False) if self.checkpoints else block(h, mask)
        logits = self.head(h)
        if labels is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def tokens(num_steps: int, size: int = 4, *, is_padded: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for _ in range(num_steps):
        x = torch.randint(0, 30, (size, 9))
        y = x[:, 1:].clone()
        if is_padded:
            for row in range(size):
                y[row, 2 + row :] = -100
        found.append((x[:, :-1], y))
    return found


@program()
def language_model() -> Any:
    """Its loss inside, over other numbers of tokens on each rank; all of one rank's are padding in one step."""
    model = TinyLM().double()
    batches = tokens(10)
    batches[5][1][2:] = -100
    return trained(model, batches, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda x, y: model(x, y)[0])


@program()
def language_model_with_loss_outside() -> Any:
    model = TinyLM(checkpoints=True).double()
    return trained(
        model,
        tokens(10),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        lambda x, y: functional.cross_entropy(model(x).view(-1, 30), y.reshape(-1), ignore_index=-100),
    )


class Recurrent(nn.Module):
    """Its states have the examples in their second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 12, 2, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> Any:
        out, states = self.rnn(x)
        return self.head(out[:, -1]), states


@program()
def recurrent() -> Any:
    model = Recurrent()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out, h = model(x)
        return functional.cross_entropy(out, y) + 0.1 * h.pow(2).mean()

    return trained(model, [(torch.randn(5, 7, 8), torch.randint(0, 4, (5,))) for _ in range(10)], None, loss_of)


@program()
def gpt2() -> Any:
    """Hugging Face's, with labels, in a dict, with a cache among its outputs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config).double()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, _ in tokens(6):
        batch = {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x}
        out = model(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [out["loss"].item(), out.logits.sum().item()]
    return result_of(model, losses=losses)


@program()
def two_models() -> Any:
    """A generator and a discriminator: the gradient of one goes through the other, to all of its batch."""
    generator, judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8)), mlp()
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-2)
    losses = []
    for x, _ in data(8):
        fake = generator(torch.randn(6, 3))
        of_judge.zero_grad()
        loss = functional.softplus(-judge(x)).mean() + functional.softplus(judge(fake.detach())).mean()
        loss.backward()
        of_judge.step()
        of_generator.zero_grad()
        other = functional.softplus(-judge(fake)).mean()
        other.backward()
        of_generator.step()
        losses += [loss.item(), other.item()]
    return result_of(generator, judge, losses=losses)


class Branches(nn.Module):
    """A frozen stem, and of two branches one in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.even, self.odd = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4), nn.Linear(8, 4)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return (self.odd if self.num_calls % 2 else self.even)(self.stem(x).relu())


@program()
def unused_parameters() -> Any:
    model = Branches()
    found = trained(model, data(6), torch.optim.AdamW(model.parameters(), lr=1e-2))
    return found | {"calls": model.num_calls}


class Augmented(Dataset[Any]):
    """Draws by torch, numpy and Python, in workers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, at: int) -> Any:
        import random

        x = torch.full((8,), float(at)) / 20 + torch.randn(8) * 0.1 + random.random() + float(np.random.rand())
        return {"x": x, "y": at % 4}


@program()
def workers_that_augment() -> Any:
    model = mlp()
    batches = [
        (batch["x"], batch["y"])
        for _ in range(2)
        for batch in DataLoader(Augmented(), batch_size=6, shuffle=True, num_workers=2)
    ]
    return trained(model, batches) | {"drawn": torch.cat([x for x, _ in batches]).sum()}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data(6))


@program()
def iterable_data_set() -> Any:
    return trained(mlp(), DataLoader(Stream(), batch_size=None))


@program()
def ends_by_its_loss() -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, (x, y) = [], data(1)[0]
    while not losses or (losses[-1] > 1.0 and len(losses) < 40):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return result_of(model, losses=losses)


@program()
def contrastive_outside() -> Any:
    """Each example is compared with all others of the batch, outside of the model."""
    model = mlp()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, other = (functional.normalize(model(each), dim=1) for each in (x, x + 0.1))
        return functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(x)))

    return trained(model, data(6), None, loss_of)


@program(bound=2e-2)
def autocast() -> Any:
    model = mlp()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.cross_entropy(model(x), y)

    return trained(model, data(6), None, loss_of)


@program()
def scaled_loss() -> Any:
    """A GradScaler, which reads and writes gradients, and an average of the weights."""
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), []
    for x, y in data(8):
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        losses += [loss.item(), average(x).sum().item(), scaler.get_scale()]
    return result_of(model, average, losses=losses)


@program()
def two_losses() -> Any:
    """Two backward passes through one graph, and the gradient of a result that is kept."""
    model = mlp()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in data(6):
        out = model(x)
        out.retain_grad()
        functional.cross_entropy(out, y).backward(retain_graph=True)
        out.pow(2).mean().backward()
        losses.append(out.grad.abs().sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return result_of(model, losses=losses)


class Penalised(nn.Module):
    """Its loss is a sum over the examples' mean squares, divided, and a penalty of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.inner(x)
        penalty = sum(p.pow(2).sum() for p in self.inner.parameters())
        each = functional.cross_entropy(out, y, reduction="none")
        return {"loss": each.sum() / len(x) + 0.01 * penalty, "penalty": penalty, "n": len(x), "right": out.argmax(1)}


@program()
def outputs_of_all_kinds() -> Any:
    model = Penalised()
    found: list[int] = []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x, y)
        found.append(int(out["n"]) + int((out["right"] == y).sum()))
        return out["loss"] + 0.02 * out["penalty"]

    return trained(model, data(6, 7), None, loss_of) | {"found": torch.tensor(found)}


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.inner(x), functional.one_hot(y, 4).float(), reduction="sum")


@program()
def sum_of_losses() -> Any:
    model = Summed()
    return trained(model, data(6), torch.optim.SGD(model.parameters(), lr=0.01), model)


@program()
def batch_norm_in_evaluation() -> Any:
    model = mlp(nn.BatchNorm1d(16))
    model.eval()
    return trained(model, data(6))


class Weighs(nn.Module):
    """A loss with weights of its own, beside one that is in no module."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 4))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - self.centres[y]).pow(2).sum(1).mean()


@program()
def trained_loss() -> Any:
    model, criterion, scale = mlp(), Weighs(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters(), scale], lr=1e-2)
    found = trained(model, data(6, 5), optimizer, lambda x, y: criterion(model(x), y) * scale.exp() - scale)
    return found | {"centres": criterion.centres.detach(), "scale": scale.detach()}


@program()
def compiled() -> Any:
    """Compiled as a whole, by a compiler that runs it as it is."""
    model = torch.compile(mlp(), backend="eager")
    return trained(model._orig_mod, data(4), None, lambda x, y: functional.cross_entropy(model(x), y))


@program()
def gradients_by_hand() -> Any:
    """No `backward`, and weights that are updated without an optimizer."""
    model, losses = mlp(), []
    for x, y in data(6):
        loss = functional.cross_entropy(model(x), y)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= 0.1 * g
        losses.append(loss.item())
    return result_of(model, losses=losses)


@program()
def called_in_parts() -> Any:
    """Parts of a model are called by themselves, before the whole is."""
    model = mlp()
    found = trained(model, data(4), None, lambda x, y: functional.cross_entropy(model[2](model[1](model[0](x))), y))
    return found | trained(model, data(4))


@program(shards_states=True, ranks=4)
def sharded_states() -> Any:
    """The states of an optimizer on four ranks; saved in the middle, and loaded into another optimizer."""
    model = mlp()
    optimizer = torch.optim.AdamW(
        [{"params": [model[0].weight, model[2].bias], "lr": 1e-2}, {"params": [model[0].bias, model[2].weight]}],
        lr=3e-3,
    )
    found = trained(model, data(4, 8), optimizer)
    saved = optimizer.state_dict()
    sums = [s["exp_avg_sq"].double().sum().item() for s in saved["state"].values()]
    other = torch.optim.AdamW(
        [{"params": [model[0].weight, model[2].bias]}, {"params": [model[0].bias, model[2].weight]}]
    )
    other.load_state_dict(saved)
    found |= trained(model, data(4, 8), other)
    again = other.state_dict()["state"]
    return found | {"sums": torch.tensor(sums), "steps": torch.stack([s["step"] for s in again.values()])}


@program(shards_states=True)
def hooks_around_a_sharded_step() -> Any:
    """What the program hangs on a step sees all parameters and gradients: the norm that it clips to is that of all."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []

    def every(stepped: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [p for group in stepped.param_groups for p in group["params"] if p.grad is not None]

    def clip(stepped: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(nn.utils.clip_grad_norm_(every(stepped), 1e-2).double())

    def count(stepped: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(torch.tensor(len(every(stepped))).double())

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(count)
    found = trained(model, data(4, 8), optimizer)
    return found | {"seen": torch.stack(seen)}


@program(shards_states=True)
def parameters_that_join_an_optimizer() -> Any:
    """Layers that unfreeze and are larger than those before: whose states a rank has stays with it."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 64), nn.Linear(64, 4))
    model[4:].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[:4].parameters(), lr=1e-2)
    found = trained(model, data(4, 8), optimizer)
    model[4:].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 1e-3})
    found |= trained(model, data(4, 8), optimizer)
    states = optimizer.state_dict()["state"]
    return found | {"steps": torch.stack([state["step"] for state in states.values()])}


def checkpoint_file() -> str:
    """A run on ranks saves what its first rank has; the plain run has a file of its own."""
    return f"{os.environ['TEST_FOLDER']}/{'plain' if 'TEST_RANK' not in os.environ else 'ranks'}.pt"


@program(shards_states=True, ranks=4)
def saved_on_four() -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = trained(model, data(4, 8), optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if os.environ.get("TEST_RANK", "0") == "0":
        torch.save(saved, checkpoint_file())
    return found


@program(shards_states=True)
def loaded_on_two() -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    saved = torch.load(checkpoint_file(), weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return trained(model, data(4, 8), optimizer)


@program(allows_randomness=True, compares=False)
def dropout_that_is_allowed() -> Any:
    return trained(mlp(nn.Dropout(0.3)), data(8))


class Masks(nn.Module):
    """Leaves the mask out where nothing is padded, as transformers' attention does, and reads what it decides by."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.num_masked = nn.Embedding(30, 16), nn.Linear(16, 30), 0

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        scores = h @ h.transpose(1, 2)
        if not bool(mask.all()):
            self.num_masked += 1
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        return self.head(scores.softmax(-1) @ h)


@program()
def padding_on_one_rank() -> Any:
    """One rank's part has padding and the other's has none: both go by the whole batch."""
    model = Masks()
    batches = []
    for step, (x, y) in enumerate(tokens(6, is_padded=False)):
        mask = torch.ones_like(x)
        mask[3 if step % 3 else 0, 5:] = step % 2
        batches.append(((x, mask), y))
    found = trained(model, batches, None, lambda x, y: functional.cross_entropy(model(*x).flatten(0, 1), y.flatten()))
    return found | {"masked": model.num_masked}


@program()
def forward_that_is_stopped() -> Any:
    """A hook takes what it needs and ends the forward: it is to have all of the batch."""

    class Stop(Exception):
        pass

    model, kept = mlp(), []
    found = trained(model, data(3))

    def stop(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        kept.append(out.detach())
        raise Stop

    for x, _ in data(3):
        handle = model[0].register_forward_hook(stop)
        with contextlib.suppress(Stop):
            model(x)
        handle.remove()
    assert [len(each) for each in kept] == [6] * 3
    return found
