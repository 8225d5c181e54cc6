"""On a card backward passes run in a thread of torch's: techniques are right where that is so, and what only the host has is not relied on."""

import threading
from collections.abc import Iterator

import pytest
import torch
from tests.attacks.backward_thread import BackwardThread
from tests.attacks.check import one_in_three
from tests.attacks.harness import Outcome, run
from tests.attacks.places import VARIANTS
from tests.attacks.registry import attacks

# State that code which is run again has to find as it was, and what belongs to a thread.
_PROGRAMS = [name for name, attack in attacks().items() if attack.kind == "clean"]
_ENGINE = BackwardThread()


@pytest.fixture
def engine() -> Iterator[BackwardThread]:
    with _ENGINE.in_use():
        yield _ENGINE


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("name", "variant"), one_in_three(_PROGRAMS, VARIANTS))
def test_clean_models_are_trained_right(engine: BackwardThread, name: str, variant: str) -> None:
    begin = engine.num_passes
    verdict = run(attacks()[name], variant)
    assert verdict.outcome in (Outcome.RIGHT, Outcome.NO_PLACE), verdict.reason
    assert engine.num_passes > begin or verdict.outcome is Outcome.NO_PLACE


def test_the_thread_has_what_torch_hands_over_and_nothing_of_pythons_own(engine: BackwardThread) -> None:
    seen, own = [], threading.local()
    own.name = "caller"
    weight = torch.ones(2, requires_grad=True)

    def note(_: torch.Tensor) -> None:
        is_cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        seen.append((threading.current_thread().name, getattr(own, "name", None), *is_cast, torch.is_grad_enabled()))

    weight.register_hook(note)
    with torch.autocast("cpu", dtype=torch.float16):
        (weight * 2).sum().backward()
    (weight * 2).sum().backward()
    torch.autograd.grad((weight**2).sum(), weight, create_graph=True)
    assert seen == [
        ("backward", None, True, torch.float16, False),
        ("backward", None, False, torch.bfloat16, False),
        ("backward", None, False, torch.bfloat16, True),
    ]


def test_an_error_of_a_hook_is_the_callers(engine: BackwardThread) -> None:
    weight = torch.ones(2, requires_grad=True)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("of the program's own")

    weight.register_hook(fail)
    with pytest.raises(KeyError, match="of the program's own"):
        weight.sum().backward()
