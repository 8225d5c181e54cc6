"""Copies of batches that nobody waits for, planned and traced: where they are offered, what they hold and take, and when they end."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tightfit
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner.plan import Choice
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import seconds_of_step
from tightfit.tape import CopyDirection, Tape
from tightfit.techniques.offload.asynchronous_copies import NUM_BATCHES, AsynchronousCopies

CARD = "RTX 4060"
BATCH_BYTES = 64 * 3 * 64 * 64 * 4
LABEL_BYTES = 64 * 8


class CopiesInside(nn.Module):
    """Has its batch at the host, and copies it itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.inner(images.cuda())


def training(how: str = "plain", since: int = 0) -> Iterator[torch.Tensor]:
    """`how` the loop copies, or what else it does from step `since` on."""
    layers = [nn.Conv2d(3, 48, 3, padding=1), *(nn.Conv2d(48, 48, 3, padding=1) for _ in range(4))]
    model: nn.Module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)).cuda()
    if how == "inside":
        model = CopiesInside(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if how == "momentum" else 0.0)
    side = torch.cuda.Stream() if how == "side stream" else None
    buffer = torch.empty((), pin_memory=True)
    step = 0
    while True:
        images, labels = torch.zeros(64, 3, 64, 64), torch.zeros(64, dtype=torch.int64)
        if how == "pinned":
            images, labels = images.pin_memory().to("cuda", non_blocking=True), labels.pin_memory().cuda(None, True)
        elif how == "inside":
            labels = labels.pin_memory().to("cuda", non_blocking=True)
        else:
            images, labels = images.to("cuda"), labels.cuda()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= since and how == "to":
            loss.detach().to("cpu", non_blocking=True)
        if step >= since and how == "copy_":
            buffer.copy_(loss.detach(), non_blocking=True)
        if step >= since and side is not None:
            with torch.cuda.stream(side):
                torch.zeros(1, device="cuda").add_(1)
                torch.zeros(5).to("cuda")
        step += 1
        yield loss


def traced(how: str, since: int = 0, choice: Choice | None = None, *others: Choice) -> Tape:
    return trace(
        GeneratorFunction(location=__file__, function="training", parameters={"how": how, "since": since}),
        label=how,
        device=CARD,
        num_steps=4,
        preparation=Preparation(
            function="tightfit.runtime.attach:prepare",
            argument={"choices": [dataclasses.asdict(each) for each in (choice, *others) if each is not None]},
            imports=("tightfit.runtime.attach", "tightfit.techniques.registry:import_ours"),
        ),
    ).tape


def chosen(**settings: Any) -> Choice:
    return Choice(
        technique="asynchronous_copies",
        where="batches",
        settings={"host_bytes": 1 << 23, "card_bytes": 0, **settings},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )


def blocking(tape: Tape) -> list[int]:
    """The bytes of the copies to the card that the host waits for, weights aside, in order."""
    copies = tape.copies
    to_card = copies.direction == CopyDirection.TO_CARD
    waited = copies.num_bytes[to_card & copies.is_blocking.astype(bool)].tolist()
    return [each for each in waited if each in (BATCH_BYTES, LABEL_BYTES)]


def test_what_is_promised_is_what_a_trace_shows() -> None:
    plain = traced("plain")
    in_order, beside = AsynchronousCopies().options(Profile(plain, find(CARD)))
    batch = BATCH_BYTES + LABEL_BYTES
    assert in_order.host_bytes == beside.host_bytes == NUM_BATCHES * batch
    assert (in_order.settings["card_bytes"], beside.settings["card_bytes"]) == (0, batch)
    assert beside.seconds < in_order.seconds < 0
    before = seconds_of_step(priced(plain, find(CARD)))
    for option in (in_order, beside):
        tape = traced("plain", choice=chosen(**option.settings))
        # The first batch is copied before there is a plan.
        assert blocking(tape) == [BATCH_BYTES, LABEL_BYTES]
        took = seconds_of_step(priced(tape, find(CARD))) - before
        assert took == pytest.approx(option.seconds, rel=0.1)
        assert tape.host_peak_bytes - plain.host_peak_bytes == pytest.approx(option.host_bytes, rel=0.01)


@pytest.mark.parametrize("how", ["pinned", "inside", "to", "copy_", "side stream"])
def test_it_is_not_offered(how: str) -> None:
    """Where nothing is waited for, or a model copies itself, or the program may count on the waiting."""
    assert list(AsynchronousCopies().options(Profile(traced(how), find(CARD)))) == []


@pytest.mark.parametrize("how", ["to", "copy_", "side stream"])
def test_it_ends_once_a_program_counts_on_the_waiting(how: str) -> None:
    """After the steps that a plan was made from."""
    waited = blocking(traced(how, since=2, choice=chosen()))
    # The first batch was copied before the plan was there, and the last one after its end.
    assert waited == [BATCH_BYTES, LABEL_BYTES] * 2


def test_a_plan_takes_it_for_host_memory_alone() -> None:
    target = f"{__file__}:training"
    for host, how, is_taken in (
        ("1GiB", "plain", True),
        (None, "plain", False),
        ("1MiB", "plain", False),
        ("1GiB", "pinned", False),
    ):
        plan = tightfit.plan(target, device=CARD, host=host, parameters=[f"how={how}"], prove=False)
        assert plan.fits and [choice.technique for choice in plan.choices] == ["asynchronous_copies"] * is_taken
        assert (plan.run.seconds_per_step < plan.baseline.seconds_per_step) is is_taken
        assert plan.host_bytes == (NUM_BATCHES * (BATCH_BYTES + LABEL_BYTES) if is_taken else 0)


def test_what_other_techniques_copy_is_no_copy_of_the_programs() -> None:
    states = Choice(
        technique="optimizer_offload",
        where="optimizer",
        settings={"least_elements": 1, "host_bytes": 1 << 20},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )
    tape = traced("momentum", 0, chosen(), states)
    assert blocking(tape) == [BATCH_BYTES, LABEL_BYTES]
    beside = (tape.copies.direction == CopyDirection.TO_HOST) & ~tape.copies.is_blocking.astype(bool)
    assert beside.any()
