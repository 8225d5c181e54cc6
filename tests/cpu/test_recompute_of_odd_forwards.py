"""Forwards of rarer kinds under checkpointing: what they are given, what they run inside of, what they hand on and what they leave open."""

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cpu.applied import choice
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.effects.values import contents
from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices

WIDTH = 8
Make = Callable[[], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, **named: Any) -> torch.Tensor:
        """A layer and what it is given by name."""
        return x + torch.tanh(self.layer(x)) * sum(named.values(), 1.0)


class Net(nn.Module):
    def __init__(self, make: Make, named: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make(), make(), make()])
        self.named = named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block after the other."""
        for block in self.blocks:
            x = block(x, **self.named)
        return x.square().mean()


BY_BLOCK = [choice("checkpointing", f"Net.blocks.{n}") for n in range(3)]
NESTED = [choice("nested_checkpointing", "Net.blocks", begin=0, end=3)]


def trained(
    make: Make, *, is_planned: bool, before: Callable[[], None] = lambda: None, choices: Any = BY_BLOCK, **named: Any
) -> list[Any]:
    """The losses and gradients of four steps."""
    torch.manual_seed(0)
    model = Net(make, named).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = apply_choices(choices, model, [optimizer]) if is_planned else None
    seen: list[Any] = []
    for _ in range(4):
        before()
        loss = model(torch.randn(4, WIDTH, dtype=torch.double))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    if session is not None:
        session.undo()
    return seen


def check(make: Make, **given: Any) -> None:
    """The same bits with and without."""
    plain, found = (trained(make, is_planned=planned, **given) for planned in (False, True))
    assert len(plain) == len(found)
    assert all(map(torch.equal, plain, found))


@pytest.mark.parametrize(
    "name",
    ["function", "use_reentrant", "context_fn", "debug", "early_stop", "preserve_rng_state", "forward", "kwargs"],
)
def test_an_argument_may_have_any_name(name: str) -> None:
    check(Block, **{name: 0.5})


class Static(Block):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Not of the module."""
        return x * 1.5 + torch.tanh(x)


def with_lambda() -> nn.Module:
    block = Block()
    block.forward = lambda x: x + block.layer(x)  # type: ignore[method-assign]
    return block


@pytest.mark.parametrize("make", [Static, with_lambda])
def test_a_forward_may_be_any_function(make: Make) -> None:
    check(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), make()))
    check(make) if make is not Static else None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_block_is_refused_before_anything_runs() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ApplyError, match=r"Sequential\.0 is scripted"):
        apply_choices([choice("checkpointing", "Sequential.0")], model, [])
    assert model(torch.ones(1, WIDTH)).shape == (1, WIDTH)


class Doing(Block):
    def __init__(self, act: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """What it was made for."""
        return self.act(self.layer, x)


def by_jvp(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out, tangent = torch.func.jvp(lambda v: nn.functional.layer_norm(torch.tanh(layer(v)), (WIDTH,)), (x,), (x,))
    return x + out + 0.1 * tangent


def by_vmap(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.func.vmap(lambda v: torch.tanh(layer(v)))(x)


def by_dual_numbers(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        out = torch.autograd.forward_ad.unpack_dual(torch.tanh(layer(dual)))
    return x + out.primal + 0.1 * out.tangent


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("choices", [BY_BLOCK, NESTED], ids=["by block", "nested"])
@pytest.mark.parametrize("act", [by_jvp, by_vmap, by_dual_numbers])
def test_a_block_may_transform_code_inside(act: Callable[[Any, torch.Tensor], torch.Tensor], choices: Any) -> None:
    check(lambda: Doing(act), choices=choices)


@pytest.mark.parametrize("choices", [BY_BLOCK, NESTED], ids=["by block", "nested"])
def test_every_run_finds_gradients_on_and_its_input_in_a_graph(choices: Any) -> None:
    edges: list[Any] = []

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(layer(x))
        edges.append(torch.autograd.graph.get_gradient_edge(out))
        return x + out * (0.5 if torch.is_grad_enabled() else 2.0)

    check(lambda: Doing(act), choices=choices)
    assert len(edges) == 24


def test_a_transform_that_takes_no_hooks_is_refused_in_the_forward() -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x - torch.func.grad(lambda v: torch.tanh(layer(v)).sum())(x)

    with pytest.raises(ApplyError, match=r"Net\.blocks\.0 runs a torch\.func transform"):
        trained(lambda: Doing(act), is_planned=True)


def test_where_torch_allows_saved_tensors_to_be_written_to_nothing_is_run_again() -> None:
    # Gradients are not compared: what torch itself gives there is not always the same, as it tells tensors apart by their addresses.
    num_calls = 0

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        hidden = torch.sin(layer(x))
        out = torch.cos(hidden)
        hidden.mul_(2.0)
        return x + out + hidden

    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        trained(lambda: Doing(act), is_planned=True)
    assert num_calls == 12


def test_a_block_reads_what_the_one_before_it_left_on_an_object_of_both() -> None:
    shared = types.SimpleNamespace(value=torch.zeros(()))

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(layer(x + shared.value))
        shared.value = torch.tanh(x)
        return x

    def before() -> None:
        shared.value = torch.zeros(())

    check(lambda: Doing(act), before=before)
    check(lambda: Doing(act), before=before, choices=NESTED)


def test_a_state_that_a_block_goes_on_with_in_each_of_its_calls() -> None:
    class Recurrent(Block):
        state: Any = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.state = 0.0
            for _ in range(3):
                x = self.cell(x)
            return x

    class Cell(Block):
        state: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.state = torch.tanh(self.layer(x)) if self.state is None else torch.tanh(self.layer(x) + self.state)
            return x + self.state

    def run(is_planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Cell(), nn.Linear(WIDTH, 1)).double()
        session = apply_choices([choice("checkpointing", "Sequential.0")], model, []) if is_planned else None
        seen = []
        for _ in range(3):
            model[0].state = None
            x = torch.randn(4, WIDTH, dtype=torch.double)
            loss = sum(model(x * n).square().mean() for n in (1, 2, 3))
            seen += torch.autograd.grad(loss, list(model.parameters()))
        if session is not None:
            session.undo()
        return seen

    assert all(map(torch.equal, run(False), run(True)))


def test_outputs_that_the_program_holds_are_its_own_after_the_backward_pass() -> None:
    kept: list[torch.Tensor] = []

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept.append(x + torch.tanh(layer(x)))
        return kept[-1]

    trained(lambda: Doing(act), is_planned=True)
    assert len(kept) == 12
    assert all(isinstance(each, torch.Tensor) for each in kept)


def test_an_error_that_only_a_second_run_meets_names_the_block() -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise KeyError("a program that looks at where it is run")
        return x + torch.tanh(layer(x))

    with pytest.raises(ApplyError, match=r"Net\.blocks\.2 raised KeyError when it was recomputed"):
        trained(lambda: Doing(act), is_planned=True)


class Collecting(Block):
    """Appends what it computes to a list that it is given, as hidden states and auxiliary losses are collected, and to one in a dict."""

    def forward(self, x: torch.Tensor, **named: Any) -> torch.Tensor:
        hidden = self.layer(x)
        x = x + torch.tanh(hidden)
        named["states"].append(x)
        named["bag"].setdefault("losses", []).append(hidden.square().mean())
        return x


@pytest.mark.parametrize("technique", ["checkpointing", "selective_checkpointing", "offloaded_checkpointing"])
def test_lists_among_the_arguments_may_be_appended_to(technique: str) -> None:
    settings: dict[str, Any] = {"keep": [0]} if technique == "selective_checkpointing" else {}
    if technique == "offloaded_checkpointing":
        settings = {"smallest_bytes": 1, "host_bytes": 1 << 16, "following": "Net.blocks.2"}
    found = []
    for choices in ([], [choice(technique, f"Net.blocks.{n}", **settings) for n in range(2)]):
        torch.manual_seed(0)
        model = Net(Collecting, {}).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = apply_choices(choices, model, [optimizer])
        for _ in range(4):
            model.named = {"states": [], "bag": {}}
            loss = model(torch.randn(4, WIDTH, dtype=torch.double))
            states, losses = model.named["states"], model.named["bag"]["losses"]
            loss = loss + sum(each.square().mean() for each in states) + 0.1 * sum(losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert (len(states), len(losses)) == (3, 3)
            found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        session.undo()
    for (loss, gradients), (other, others) in zip(found[:4], found[4:], strict=True):
        assert torch.equal(loss, other)
        assert all(map(torch.equal, gradients, others))


def in_parts(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What each part is written to has memory that nobody has filled before, and that holds anything, as torch.nn.AdaptiveLogSoftmaxWithLoss and experts have it."""
    y = layer(x)
    with _disable_current_modes():
        # What lies in the memory that the next line most probably gets.
        torch.full_like(y, float(torch._C._current_graph_task_id()))
    found = torch.empty_like(y)
    for rows in torch.arange(len(y)).split(2):
        found = found.index_copy(0, rows, torch.tanh(y[rows]))
    return x + found


@pytest.mark.parametrize("choices", [BY_BLOCK, NESTED], ids=["by block", "nested"])
def test_memory_that_is_not_filled_yet_is_not_compared(choices: Any) -> None:
    check(lambda: Doing(in_parts), choices=choices)


def shifted(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As a convolution with a bias of its own."""
    y = layer(x)
    y += 1.0
    return x + torch.tanh(y)


def partly(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One of two, and of that a part."""
    y, z = layer(x), layer(x * 2)
    z[:, 2:4].sigmoid_()
    return x + 0.1 * (y * z).tanh_()


def dropped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + nn.functional.dropout(layer(nn.functional.dropout(layer(x)).tanh()), inplace=True)


def without_a_graph(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    with torch.no_grad():
        y.clamp_(max=0.5)
    return x + y * y


def of_several_dimensions(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The product is of two dimensions, and what is written to is another tensor in its memory."""
    y = x.view(2, 2, WIDTH) @ layer.weight
    y.sub_(0.5)
    return x + torch.tanh(y).view(4, WIDTH)


def in_the_last_steps(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """When nothing is compared any more."""
    layer.num_calls = getattr(layer, "num_calls", 0) + 1
    y = x.view(2, 2, WIDTH) @ layer.weight
    if layer.num_calls > 3:
        y.mul_(0.5)
    return x + torch.tanh(y).view(4, WIDTH)


WHERE = ("Net.blocks.0", "Net.blocks.1", "Net.blocks.2.layer")
KEPT = [choice("selective_checkpointing", where, keep=[0, 1]) for where in WHERE]
HELD = [
    choice(
        "offloaded_checkpointing",
        f"Net.blocks.{n}",
        following=f"Net.blocks.{n + 1}",
        smallest_bytes=1,
        host_bytes=1 << 16,
        keep=[0, 1],
    )
    for n in range(2)
]


@pytest.fixture
def seen_as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """There only versions tell what was written to."""
    monkeypatch.setattr(contents, "_place_of", lambda _: None)


@pytest.mark.parametrize("choices", [KEPT, HELD], ids=["kept", "held"])
@pytest.mark.parametrize("act", [shifted, partly, dropped, without_a_graph, of_several_dimensions, in_the_last_steps])
@pytest.mark.usefixtures("seen_as_on_a_card")
def test_a_kept_result_that_is_written_to_in_place_is_made_again(act: Any, choices: Any) -> None:
    check(lambda: Doing(act), choices=choices)


def test_a_kept_result_that_is_written_to_past_torch_is_refused() -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y.data.add_(1.0)
        return x + torch.tanh(y)

    with pytest.raises(
        ApplyError,
        match=r"Net\.blocks\.[\w.]+ got another result from aten.addmm.default when it was recomputed",
    ):
        trained(lambda: Doing(act), is_planned=True, choices=KEPT)


@pytest.mark.usefixtures("seen_as_on_a_card")
def test_a_kept_result_that_is_written_to_is_made_again_in_each_backward_pass() -> None:
    def run(choices: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net(lambda: Doing(partly), {}).double()
        session = apply_choices(choices, model, [])
        loss = model(torch.randn(4, WIDTH, dtype=torch.double))
        loss.backward(retain_graph=True)
        loss.backward()
        session.undo()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, found = run([]), run(KEPT[:2])
    assert all(map(torch.equal, plain, found))


@pytest.mark.usefixtures("seen_as_on_a_card")
def test_a_kept_result_that_is_written_to_is_not_held_beside_its_activation() -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        made.append(weakref.ref(y.untyped_storage()))
        y += 1.0
        return x + torch.tanh(y)

    model = Net(lambda: Doing(act), {})
    session = apply_choices(KEPT[:2], model, [])
    loss = model(torch.randn(4, WIDTH))
    assert [each() is None for each in made] == [True, True, True]
    loss.backward()
    session.undo()


def test_a_context_that_a_hook_enters_and_another_one_leaves_is_left_in_second_runs() -> None:
    def make() -> nn.Module:
        block = Block()
        context = torch.autocast("cpu", dtype=torch.bfloat16)
        block.layer.register_forward_pre_hook(lambda *_: context.__enter__() and None)
        block.layer.register_forward_hook(lambda *_: context.__exit__(None, None, None) or None)
        return block

    check(make)
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_two_threads_that_train_models_of_their_own_leave_torch_as_it_was() -> None:
    gate = threading.Barrier(2, timeout=60)

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # In the first runs both are inside.
        if torch._C._current_graph_task_id() == -1:
            gate.wait()
        return x + torch.tanh(layer(x))

    threads = [threading.Thread(target=lambda: trained(lambda: Doing(act), is_planned=True)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not gate.broken
    assert torch.utils.checkpoint._enable_checkpoint_early_stop is None


@pytest.mark.parametrize(
    ("name", "config", "cross"),
    [
        ("MT5", {"d_kv": 8, "d_ff": 32, "num_heads": 2, "dropout_rate": 0.0}, "layer.1"),
        ("MT5", {"d_kv": 8, "d_ff": 32, "num_heads": 2, "dropout_rate": 0.0}, "layer.1.EncDecAttention"),
        ("Bart", {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0}, "encoder_attn"),
    ],
)
def test_attention_to_an_encoder_that_fills_a_cache_is_run_again(name: str, config: dict[str, Any], cross: str) -> None:
    """The cache that it is given has what attention of the block to itself has filled; its own part is empty, and would be filled twice."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(vocab_size=32, d_model=16, num_layers=2, decoder_layers=2, **config)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made)
    root, decoder = type(model).__name__, "model.decoder.layers" if name == "Bart" else "decoder.block"
    tokens = torch.randint(3, 32, (2, 6)), torch.randint(3, 32, (2, 4))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=tokens[0], decoder_input_ids=tokens[1], use_cache=True).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    chosen = [choice("checkpointing", f"{root}.{decoder}.{number}.{cross}") for number in range(2)]
    session = apply_choices(chosen, model, [])
    again = gradients()
    session.undo()
    assert len(plain) == len(again) and all(map(torch.equal, plain, again))
