"""Code that is run in parts and does not treat its rows alone: each attack is trained as the plain run trains it, or refused before an update."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from tests.attacks.places import choice
from tests.sampled import every_second
from torch import nn
from torch.nn import functional

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices

pytestmark = pytest.mark.usefixtures("in_double_precision")
WIDTH, LENGTH, BATCH, CLASSES, STEPS = 4, 6, 4, 5, 4
RIGHT, REFUSED = "right", "refused"


class Inner(nn.Module):
    """A feed-forward layer that does `function(self, hidden)` in its middle."""

    def __init__(
        self, function: Callable[["Inner", torch.Tensor], torch.Tensor], layer: Callable[[], nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        self.layer = layer()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function
        self.zero = nn.Parameter(torch.zeros(WIDTH))
        self.small = nn.Parameter(torch.full((WIDTH,), 1e-7))
        self.register_buffer("table", torch.linspace(0, 1, 64))
        self.calls = 0
        self.rate = 0.0
        self.cache: torch.Tensor | None = None
        self.kept: object = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self, torch.tanh(self.up(hidden))))


class Net(nn.Module):
    """Returns its loss, and so may be run on parts of its batch; `inner` may be run in tiles."""

    def __init__(
        self, function: Callable[[Inner, torch.Tensor], torch.Tensor], layer: Callable[[], nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = Inner(function, layer)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.inner(self.first(values)))
        return functional.cross_entropy(scores.flatten(0, 1), classes.flatten())


class _CentredBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean((0, 1), keepdim=True)


def _hooked(module: Inner, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda g: g / (1e-9 + g.norm()))
    return x


def _node_hooked(x: torch.Tensor, how: str, hook: Callable[..., object]) -> torch.Tensor:
    x = x * 1
    if x.grad_fn is not None:
        getattr(x.grad_fn, how)(hook)
    return x


def _accumulated(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(WIDTH)
    total += value
    return total


def _written(value: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(WIDTH)
    torch.Tensor.copy_(total, value)
    return total


def _written_to_view(value: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(2, WIDTH)
    total[0] = value
    return total[0]


def _later(module: Inner, x: torch.Tensor) -> torch.Tensor:
    return x - module.rate * x.mean((0, 1), keepdim=True)


def _counted(module: Inner, x: torch.Tensor) -> torch.Tensor:
    module.calls += 1
    return x * (1 + 0.1 * module.calls)


def _cached_rows(module: Inner, x: torch.Tensor) -> torch.Tensor:
    if module.cache is None or module.cache.shape != x.shape[:2]:
        module.cache = torch.linspace(0, 1, x.shape[0] * x.shape[1]).reshape(x.shape[:2])
    return x + module.cache[..., None]


def _cached_scale(module: Inner, x: torch.Tensor) -> torch.Tensor:
    if module.cache is None:
        module.cache = torch.linspace(1, 2, WIDTH)
    return x * module.cache


def _in_first_call(made: Callable[[torch.Tensor], object]) -> Callable[[Inner, torch.Tensor], torch.Tensor]:
    """A layer that multiplies by the first tensor in `made(x)`, which it makes in its first call and keeps."""

    def function(module: Inner, x: torch.Tensor) -> torch.Tensor:
        if module.kept is None:
            module.kept = made(x)
        value = module.kept
        while not isinstance(value, torch.Tensor | int | float):
            value = next(iter(vars(value).values() if isinstance(value, Kept) else value))
        return x * value

    return function


class Kept:
    """An object of the program's own that holds something."""

    def __init__(self, value: object) -> None:
        self.value = value


def _set_by_first_rows(module: Inner, x: torch.Tensor) -> torch.Tensor:
    if not module.calls:
        module.calls = 1
        with torch.no_grad():
            module.small.copy_(x.mean((0, 1)))
    return x + module.small


def _first_loss(module: Inner, x: torch.Tensor) -> torch.Tensor:
    total = functional.mse_loss(x, x + 1)
    if module.kept is None:
        module.kept = total.detach()
    return x * module.kept


def _swallows(module: Inner, x: torch.Tensor) -> torch.Tensor:
    try:
        return x - x.mean((0, 1), keepdim=True) * torch.randn(())
    except Exception:  # noqa: BLE001 - what such programs do
        return x


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the layer does, and how it ends in tiles of its tokens (which are cut along the batch here) and in parts of the batch."""

    function: Callable[[Inner, torch.Tensor], torch.Tensor]
    tiled: str
    parts: str
    layer: Callable[[], nn.Module] = nn.Identity


def both(function: Callable[[Inner, torch.Tensor], torch.Tensor], expected: str) -> Case:
    return Case(function=function, tiled=expected, parts=expected)


CASES: dict[str, Case] = {
    # Right: nothing goes from row to row.
    "plain": both(lambda m, x: x, RIGHT),
    "positions": both(lambda m, x: x + torch.arange(x.shape[1])[:, None] / 10, RIGHT),
    "softmax over channels": both(lambda m, x: x.softmax(-1), RIGHT),
    "attention over tokens": both(lambda m, x: functional.scaled_dot_product_attention(*[x[:, None]] * 3)[:, 0], RIGHT),
    "attention by hand": both(lambda m, x: (x @ x.mT / 2).softmax(-1) @ x, RIGHT),
    "mean over tokens": both(lambda m, x: x - x.mean(1, keepdim=True), RIGHT),
    "shift of tokens": both(lambda m, x: functional.pad(x, (0, 0, 1, 0))[:, :-1], RIGHT),
    "zeros of its size": both(lambda m, x: x + torch.zeros(x.shape[0], 1, WIDTH), RIGHT),
    "written into zeros": both(lambda m, x: torch.zeros_like(x).copy_(x), RIGHT),
    "lookup in a table": both(lambda m, x: x + m.table[(x.detach() > 0).long()], RIGHT),
    "recurrent over tokens": Case(function=lambda m, x: m.layer(x)[0], tiled=REFUSED, parts=RIGHT, layer=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "einsum": both(lambda m, x: torch.einsum("btc,bsc->bts", x, x) @ x, RIGHT),
    "detached mean, dropped": both(lambda m, x: (x.mean().detach(), x)[1], RIGHT),
    "cached scale": both(_cached_scale, RIGHT),
    "made in the first call, in a list": both(_in_first_call(lambda x: [torch.linspace(1, 2, x.shape[-1])]), RIGHT),
    "made in the first call, in an object": both(_in_first_call(lambda x: Kept(Kept(torch.ones(WIDTH)))), RIGHT),
    "the width kept as a number": both(_in_first_call(lambda x: x.shape[-1]), RIGHT),
    "cumulative over tokens": both(lambda m, x: x.cumsum(1), RIGHT),
    "merged with heads": both(lambda m, x: x.unflatten(-1, (2, 2)).transpose(1, 2).flatten(0, 1).softmax(-1).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2), RIGHT),
    "norm switched off": both(lambda m, x: functional.batch_norm(x.flatten(0, 1), m.table[:WIDTH], m.table[-WIDTH:]).view_as(x), RIGHT),
    # Mixing, open or hidden.
    "mean over examples": both(lambda m, x: x - x.mean(0, keepdim=True), REFUSED),
    "hidden behind zeros": both(lambda m, x: x + m.zero * x.mean((0, 1), keepdim=True), REFUSED),
    "hidden behind a small weight": both(lambda m, x: x + m.small * x.mean(0, keepdim=True), REFUSED),
    "attention over examples": both(lambda m, x: functional.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1), REFUSED),
    "recurrent over examples": Case(function=lambda m, x: m.layer(x)[0], tiled=REFUSED, parts=REFUSED, layer=lambda: nn.GRU(WIDTH, WIDTH)),
    "batch norm": Case(function=lambda m, x: m.layer(x.mT).mT, tiled=REFUSED, parts=REFUSED, layer=lambda: nn.BatchNorm1d(WIDTH)),
    "batch norm by hand": both(lambda m, x: (x - x.mean((0, 1))) / x.flatten(0, 1).std(0), REFUSED),
    "scaled by the number": both(lambda m, x: x * x.shape[0], REFUSED),
    "scaled by the number, as a tensor": both(lambda m, x: x / torch.ones(x.shape[0]).sum(), REFUSED),
    "scaled by its elements": both(lambda m, x: x / x.numel(), REFUSED),
    "branch by the number": both(lambda m, x: x * 2 if x.size(0) > 2 else x, REFUSED),
    "branch by the length of the whole": both(lambda m, x: x * 2 if len(x) == BATCH else x, REFUSED),
    "loop over examples": both(lambda m, x: torch.stack([row * (1 + i) for i, row in enumerate(x)]), REFUSED),
    "numbered examples": both(lambda m, x: x + torch.arange(x.shape[0])[:, None, None] / 10, REFUSED),
    "numbered by a table": both(lambda m, x: x + m.table[: x.shape[0], None, None], REFUSED),
    "first example": both(lambda m, x: x + x[:1], REFUSED),
    "flipped": both(lambda m, x: x + x.flip(0), REFUSED),
    "rolled": both(lambda m, x: x.roll(1, 0), REFUSED),
    "cumulative over examples": both(lambda m, x: x.cumsum(0), REFUSED),
    "sorted": both(lambda m, x: x.sort(0).values, REFUSED),
    "norm of all": both(lambda m, x: x / x.norm(), REFUSED),
    "maximum of all": both(lambda m, x: x / x.detach().abs().max(), REFUSED),
    "wrong reshape": both(lambda m, x: x.transpose(0, 1).reshape(x.shape), REFUSED),
    "covariance": both(lambda m, x: x @ (x.flatten(0, 1).T @ x.flatten(0, 1)), REFUSED),
    "pairwise distances": both(lambda m, x: x + torch.cdist(x.flatten(1), x.flatten(1)).mean(), REFUSED),
    "values decide": both(lambda m, x: x * 2 if x.detach().sum() > 0 else x, REFUSED),
    "a value is read": both(lambda m, x: x * x.detach().mean().item(), REFUSED),
    "own backward": both(lambda m, x: _CentredBackward.apply(x), REFUSED),
    "hook on an activation": both(_hooked, REFUSED),
    "as many rows as there are in all": both(lambda m, x: x + torch.zeros(BATCH, 1, 1), REFUSED),
    "cut off from its input": Case(function=lambda m, x: x.detach() * m.small, tiled=REFUSED, parts=RIGHT),
    "mean added to zeros in place": both(lambda m, x: x - _accumulated(x, x.mean((0, 1))), REFUSED),
    "mean written to zeros": both(lambda m, x: x - torch.zeros(WIDTH).copy_(x.mean((0, 1))), REFUSED),
    "mean written to zeros, which are used": both(lambda m, x: x - _written(x.mean((0, 1))), REFUSED),
    "mean written to a view of zeros": both(lambda m, x: x - _written_to_view(x.mean((0, 1))), REFUSED),
    "hook on a node": both(lambda m, x: _node_hooked(x, "register_hook", lambda inputs, _: tuple(g / (1e-9 + g.norm()) for g in inputs if g is not None)), REFUSED),
    "hook before a node": both(lambda m, x: _node_hooked(x, "register_prehook", lambda outputs: tuple(g / (1e-9 + g.norm()) for g in outputs)), REFUSED),
    "counter": both(_counted, REFUSED),
    "cached rows": both(_cached_rows, REFUSED),
    "mean of the first rows": both(_in_first_call(lambda x: x.detach().mean((0, 1))), REFUSED),
    "mean of the first rows, in an object": both(_in_first_call(lambda x: [Kept((x.detach().std((0, 1)),))]), REFUSED),
    "first example kept": both(_in_first_call(lambda x: x[0].detach()), REFUSED),
    "first number of rows kept": both(_in_first_call(lambda x: x.shape[0]), REFUSED),
    "first number of rows kept as a tensor": both(_in_first_call(lambda x: torch.tensor(1.0 / len(x))), REFUSED),
    "weights set by the first rows": both(_set_by_first_rows, REFUSED),
    "first loss kept": both(_first_loss, REFUSED),
    "dropout": both(lambda m, x: functional.dropout(x, 0.1), REFUSED),
    "noise": both(lambda m, x: x + 0.1 * torch.randn(x.shape), REFUSED),
    "python's random": both(lambda m, x: x * __import__("random").random(), REFUSED),
    "swallows errors": both(_swallows, REFUSED),
    "statistics kept": both(lambda m, x: (m.table.add_(x.detach().mean()), x)[1], REFUSED),
    "numpy": both(lambda m, x: x * float(x.detach().numpy().mean()), REFUSED),
}  # fmt: skip


def _train(case: Case, choices: list[Choice], change: Callable[[Net, int], None] | None = None) -> list[torch.Tensor]:
    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes the stack for each kind of card: 4 ms
    model = Net(case.function, case.layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with apply_choices(choices, model, [optimizer]):
        for step in range(STEPS):
            chance = torch.Generator().manual_seed(step)
            values = torch.randn(BATCH, LENGTH, WIDTH, generator=chance)
            classes = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=chance)
            if change is not None:
                change(model, step)
            optimizer.zero_grad()
            loss = model(values, classes)
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return [*seen, *(p.detach().clone() for p in model.parameters())]


TILES = choice("tiled_tokens", "Net.inner", num_tiles=2)
PARTS = choice("micro_batches", "batch", num_parts=2, draws_anew=False)


def _check(case: Case, chosen: Choice, expected: str, change: Callable[[Net, int], None] | None = None) -> None:
    if expected == REFUSED:
        with pytest.raises(ApplyError) as told:
            _train(case, [chosen], change)
        assert "\n" not in str(told.value)
        return
    for plain, other in zip(_train(case, [], change), _train(case, [chosen], change), strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", CASES)
def test_in_tiles(name: str) -> None:
    _check(CASES[name], TILES, CASES[name].tiled)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", every_second(CASES))
def test_in_parts_of_the_batch(name: str) -> None:
    _check(CASES[name], PARTS, CASES[name].parts)


def _set(name: str, value: object) -> Callable[[Net, int], None]:
    return lambda model, step: setattr(model.inner, name, value) if step == 2 else None


def _hook(model: Net, step: int) -> None:
    if step == 2:
        model.inner.up.register_forward_hook(lambda module, args, out: out - out.mean((0, 1)))


def _replace(model: Net, step: int) -> None:
    if step == 2:
        model.inner.up = nn.Sequential(model.inner.up, Inner(lambda m, x: x - x.mean(0, keepdim=True)))


def _data(model: Net, step: int) -> None:
    model.inner.up.weight.data = model.inner.up.weight.data * 1.01


LATER: dict[str, tuple[Case, Callable[[Net, int], None], str]] = {
    "a rate that starts at 0": (both(_later, REFUSED), _set("rate", 0.3), REFUSED),
    "a function replaced": (both(lambda m, x: x, RIGHT), _set("function", lambda m, x: x - x.mean(0)), RIGHT),
    "a function replaced by one as good": (both(lambda m, x: x, RIGHT), _set("function", lambda m, x: x * 2), RIGHT),
    "a hook added": (both(lambda m, x: x, RIGHT), _hook, RIGHT),
    "a module replaced": (both(lambda m, x: x, RIGHT), _replace, RIGHT),
    "data swapped between steps": (both(lambda m, x: x, RIGHT), _data, RIGHT),
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("chosen", [TILES, PARTS], ids=["tiles", "parts"])
def test_what_changes_later_is_proved_again_or_runs_whole(name: str, chosen: Choice) -> None:
    case, change, expected = LATER[name]
    _check(case, chosen, expected, change)


SECOND_ORDER = {
    "parts": choice("micro_batches", "batch", num_parts=2, draws_anew=False),
    "loss in chunks, forward": choice("chunked_loss", "Net.head", num_chunks=2, gradients_in="forward"),
    "loss in chunks, backward": choice("chunked_loss", "Net.head", num_chunks=2, gradients_in="backward"),
}


@pytest.mark.parametrize("name", SECOND_ORDER)
def test_a_backward_pass_that_is_differentiated_is_refused(name: str) -> None:
    model = Net(lambda m, x: x)
    values, classes = torch.randn(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply_choices([SECOND_ORDER[name]], model, [optimizer]):
        loss = model(values, classes)
        with pytest.raises(ApplyError, match="create_graph"):
            torch.autograd.grad(loss, list(model.first.parameters()), create_graph=True)
        # A program that swallows it does not train on.
        with pytest.raises(ApplyError, match="create_graph"):
            optimizer.step()


def test_an_empty_batch_is_run_whole_between_others_in_parts() -> None:
    model = Net(lambda m, x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values, classes = torch.randn(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with apply_choices([PARTS], model, [optimizer]):
        model(values, classes).backward()
        optimizer.zero_grad()
        loss = model(values[:0], classes[:0])
        loss.backward()
    assert loss.isnan()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(values[:0], classes[:0]).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)


def _nested() -> torch.Tensor:
    rows = [torch.ones(2, WIDTH), torch.ones(3, WIDTH)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize(
    ("made", "kind"), [(_nested, "nested"), (lambda: torch.eye(BATCH).to_sparse(), "sparse")], ids=["nested", "sparse"]
)
def test_a_batch_that_is_no_plain_tensor_is_refused(made: Callable[[], torch.Tensor], kind: str) -> None:
    model = Net(lambda m, x: x)
    with (
        apply_choices([PARTS], model, [torch.optim.SGD(model.parameters(), lr=0.1)]),
        pytest.raises(ApplyError, match=f"a {kind} tensor"),
    ):
        model(made(), torch.zeros(BATCH, LENGTH, dtype=torch.long))


def test_a_backward_pass_for_many_gradients_at_once_is_refused_in_tiles() -> None:
    model = Net(lambda m, x: x)
    value = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    many = torch.randn(3, BATCH, LENGTH, WIDTH)
    with apply_choices([TILES], model, [torch.optim.SGD(model.parameters(), lr=0.1)]):
        output = model.inner(value)
        with pytest.raises(ApplyError, match="batched backward pass"):
            torch.autograd.grad(output, value, many, is_grads_batched=True)


def test_an_error_of_the_programs_own_is_raised_as_it_is_by_tiles() -> None:
    def wrong(module: Inner, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the program's own")

    with pytest.raises(ValueError, match="the program's own"):
        _train(both(wrong, REFUSED), [TILES])


def test_a_copy_of_a_model_in_parts_trains_itself() -> None:
    model = Net(lambda m, x: x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values, classes = torch.randn(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with apply_choices([PARTS], model, [optimizer]):
        model(values, classes).backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        twin = copy.deepcopy(model)
        twin(values, classes).backward()
    torch.testing.assert_close([p.grad for p in twin.parameters() if p.grad is not None], expected)
    assert all(p.grad is None for p in model.parameters())


def test_tiles_within_parts_are_compared_without_the_parts_taking_it_for_a_decision() -> None:
    case = CASES["plain"]
    for plain, other in zip(_train(case, []), _train(case, [PARTS, TILES]), strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-9, atol=1e-11)


def test_there_are_enough_attacks() -> None:
    assert 2 * (len(CASES) + len(LATER)) + len(SECOND_ORDER) >= 60
