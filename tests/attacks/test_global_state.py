"""Whatever happens to a model with a plan, torch is object for object as it was afterwards, and a model without a plan beside it trains as ever.

Every technique is put on small models by hand; what it refuses to train is no matter here, what it leaves behind in the process is.
"""

import contextlib
import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from tests.attacks.check import one_in_three
from tests.attacks.models import Block, Images, Net, images, tokens
from tests.attacks.places import VARIANTS, Variant, choice, freeze
from tests.process_state import changed_since, process_state
from torch import nn
from torch.nn import functional

from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.runtime.attach import Attachment
from tightfit.runtime.run_recorder import new_recorder
from tightfit.techniques.registry import techniques
from tightfit.techniques.session import Session


class Attending(Block):
    """Attention written by hand, of one head."""

    is_attention = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that have looked at each other."""
        return self.inner(functional.softmax(x @ x.transpose(-2, -1), dim=-1) @ x)


def _more(name: str, where: str, **settings: object) -> Variant:
    return Variant(
        name=name,
        technique=name,
        find=lambda _, __: [choice(name, where, **settings)],
        is_bitwise=False,
        is_lossy=True,
    )


TABLE = {
    **VARIANTS,
    "autocast": _more("autocast", "precision"),
    "factored states": _more("factored_states", "optimizer"),
    "asynchronous copies": _more("asynchronous_copies", "batches", host_bytes=1 << 16, card_bytes=1 << 14),
    "freezing": _more("freezing", "Net.blocks", num_blocks=1, before=""),
}
# What can be put on nothing: options of these are advice, or settings of the process that are made before it begins.
ON_NOTHING = {"kept_alive", "adapters", "allocator_settings"}


class Live:
    """A model with its optimizer, and a session once it was planned."""

    def __init__(self, variant: Variant, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.variant = variant
        self.model = Images() if variant.technique == "tiled_convolutions" else Net([Attending(), Block()])
        if variant.freezes:
            freeze(self.model)
        self.batch = images if isinstance(self.model, Images) else tokens
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Another one for the same parameters."""
        return torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-3, foreach=True)

    def plan(self) -> Session:
        """Puts the technique on, or skips the test where it has no place or refuses this model."""
        choices = self.variant.find(self.model, [self.optimizer])
        assert choices
        return apply_choices(choices, self.model, [self.optimizer])

    def step(self, number: int = 0) -> None:
        """A step with everything that techniques look at, as far as they let it come."""
        with contextlib.suppress(ApplyError):
            self.model(*self.batch(number)).backward()
            if self.variant.name.endswith("clips"):
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        with contextlib.suppress(ApplyError):
            self.optimizer.zero_grad()


class Beside:
    """A model without a plan, whose steps are noted."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.seen: list[torch.Tensor] = []

    def step(self) -> None:
        """One step with clipping; the graph is freed, as plain torch frees it."""
        loss = self.model(*tokens(len(self.seen)))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        gradients = [p.grad.detach().clone().flatten() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights = [p.detach().flatten() for p in self.model.parameters()]
        self.seen.append(torch.cat([loss.detach()[None], norm[None], *gradients, *weights]))


NUM_STEPS_BESIDE = 6
_EXPECTED: list[torch.Tensor] = []


def expected() -> Sequence[torch.Tensor]:
    """What the model beside sees where there is no plan in the process."""
    if not _EXPECTED:
        beside = Beside()
        for _ in range(NUM_STEPS_BESIDE):
            beside.step()
        _EXPECTED.extend(beside.seen)
    return _EXPECTED


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_look_through() -> Iterator[None]:
    """Recordings and collections look at all objects of the process: those that are there already are put aside."""
    expected()
    for variant in TABLE.values():
        live = Live(variant)
        with live.plan():
            live.step()
    del live
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def everything_is_as_it_was() -> Iterator[None]:
    """As for all tests, but said here, as this is what is tested."""
    before = process_state()
    yield
    assert changed_since(before) == []


@pytest.fixture
def beside() -> Iterator[Beside]:
    """The model without a plan; the test ends with some more steps of it."""
    made = Beside()
    yield made
    while len(made.seen) < NUM_STEPS_BESIDE:
        made.step()
    for step, (found, wanted) in enumerate(zip(made.seen, expected(), strict=True)):
        assert torch.equal(found, wanted), f"step {step} of the model without a plan is another one"


Scenario = Callable[[Variant, Beside], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(found: Scenario) -> Scenario:
    """Adds a row for every technique."""
    SCENARIOS[found.__name__.replace("_", " ")] = found
    return found


@scenario
def two_models_undone_in_all_orders(variant: Variant, beside: Beside) -> None:
    """Their steps interleave."""
    for order in itertools.permutations(range(2)):
        lives = [Live(variant, seed) for seed in range(2)]
        sessions = [live.plan() for live in lives]
        for live in lives:
            live.step()
        for number in order:
            sessions[number].undo()
            sessions[number].undo()
        lives[0].step()
    beside.step()


@scenario
def backward_passes_that_interleave(variant: Variant, beside: Beside) -> None:
    """A generator and a discriminator, and one that has nothing to do with them."""
    first, second = Live(variant), Live(variant, 1)
    sessions = first.plan(), second.plan()
    for number in range(2):
        with contextlib.suppress(ApplyError):
            losses = [live.model(*live.batch(number)) for live in (first, second)]
            losses[0].backward()
            beside.step()
            losses[1].backward()
            first.optimizer.step()
            beside.step()
            second.optimizer.step()
    for session in sessions:
        with contextlib.suppress(ApplyError):
            session.undo()


@scenario
def a_new_optimizer(variant: Variant, beside: Beside) -> None:
    """In place of the first, whose session is undone, and undone again when there is another one, which that must not touch."""
    live = Live(variant)
    first = live.plan()
    live.step()
    live.optimizer = live.new_optimizer()
    first.undo()
    second = live.plan()
    live.step(1)
    first.undo()
    beside.step()
    live.step(2)
    assert second.is_on
    second.undo()
    live.step(3)


@scenario
def a_model_that_is_dropped(variant: Variant, beside: Beside) -> None:
    """With what belongs to it, and without an undo; parameters are freed."""
    live = Live(variant)
    live.plan()
    live.step()
    left = [weakref.ref(each) for each in (live.model, live.optimizer, *live.model.parameters())]
    del live
    beside.step()
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


@scenario
def a_copy_outlives_the_original(variant: Variant, beside: Beside) -> None:
    """The copy trains, if it may be made; the original is freed."""
    live = Live(variant)
    live.plan()
    live.step()
    left = weakref.ref(live.model)
    with contextlib.suppress(ApplyError):
        twin = copy.deepcopy(live)
        twin.step(1)
    del live
    beside.step()
    gc.collect()
    assert left() is None


class UserError(Exception):
    """Raised by what stands for the user's code."""


def _raises(*_: object) -> None:
    raise UserError


def _failing(
    variant: Variant, beside: Beside, register: Callable[[Live], Sequence[torch.utils.hooks.RemovableHandle]]
) -> None:
    live = Live(variant)
    session = live.plan()
    live.step()
    handles = register(live)
    for _ in range(2):
        with contextlib.suppress(UserError):
            live.step(1)
        beside.step()
    for handle in handles:
        handle.remove()
    live.step(2)
    session.undo()
    assert live.optimizer.param_groups and live.optimizer.param_groups[0]["params"]
    live.step(3)


@scenario
def an_exception_in_the_forward(variant: Variant, beside: Beside) -> None:
    """Of the head, when all blocks have run."""
    _failing(variant, beside, lambda live: [live.model.head.register_forward_pre_hook(_raises)])


@scenario
def an_exception_in_the_backward_pass(variant: Variant, beside: Beside) -> None:
    """At the first layer, when all others have gradients."""
    _failing(variant, beside, lambda live: [live.model.stem.weight.register_hook(_raises)])


@scenario
def an_exception_in_the_step(variant: Variant, beside: Beside) -> None:
    """Before it and after it."""
    _failing(variant, beside, lambda live: [live.optimizer.register_step_pre_hook(_raises)])
    _failing(variant, beside, lambda live: [live.optimizer.register_step_post_hook(_raises)])


@scenario
def an_exception_while_it_is_put_on(variant: Variant, beside: Beside) -> None:
    """By a choice that cannot be, after one that was."""
    live = Live(variant)
    choices = [*variant.find(live.model, [live.optimizer]), choice("checkpointing", "Other.blocks")]
    with pytest.raises(ApplyError):
        apply_choices(choices, live.model, [live.optimizer])
    with contextlib.suppress(ApplyError), Session(model=live.model, optimizers=[live.optimizer]) as session:
        techniques()[variant.technique].apply(session, variant.find(live.model, [live.optimizer]))
        live.step()
    beside.step()


@scenario
def recorded_around_and_within_and_across(variant: Variant, beside: Beside) -> None:
    """A recording that begins before or after a session, and ends before or after it."""
    for begins_first, ends_first in itertools.product((True, False), repeat=2):
        live, recorder = Live(variant), new_recorder(stacks=False, max_events=1000)
        with contextlib.ExitStack() as stack:
            if begins_first:
                recorder.start()
            session = live.plan()
            live.step()
            if not begins_first:
                recorder.start()
            stack.callback(recorder.stop)
            live.step(1)
            if ends_first:
                stack.close()
            live.step(2)
            session.undo()
            live.step(3)
    beside.step()


@scenario
def attached_to_what_is_called(variant: Variant, beside: Beside) -> None:
    """Two attachments, which end in either order while their models live or after that."""
    for ends_first, drops in itertools.product((True, False), repeat=2):
        choices = Live(variant)
        found = variant.find(choices.model, [choices.optimizer])
        attachments = [Attachment(found, check_steps=0), Attachment((), check_steps=0)]
        ends = [attachment.install() for attachment in attachments]
        live = Live(variant)
        with contextlib.suppress(ApplyError):
            live.model(*live.batch(0))
        if drops:
            del live
        for end in ends if ends_first else reversed(ends):
            end()
    beside.step()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("variant", "row"), one_in_three(TABLE, SCENARIOS))
def test_torch_is_as_it_was(variant: str, row: str, beside: Beside) -> None:
    SCENARIOS[row](TABLE[variant], beside)


def test_every_technique_is_tried() -> None:
    assert {variant.technique for variant in TABLE.values()} | ON_NOTHING == set(techniques())
