"""Plans that are taken off, or put on, where a step is under way: between its parts, inside of hooks, while gradients are summed."""

import copy
import threading
from typing import Any

import torch
from tests.attacks.models import Net, adamw, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


def undo(session: Any) -> None:
    """Nothing in a plain run."""
    if session is not None:
        session.undo()


@attack("changes", "the plan is taken off between forward and backward pass of the third step")
def undone_before_backward(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    session = t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        if step == 2:
            undo(session)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off between backward pass and step")
def undone_before_step(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    session = t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step == 2:
            undo(session)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off by a hook on the loss, when its backward pass begins")
def undone_within_backward(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    session = t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        if step == 2:
            loss.register_hook(lambda _: undo(session))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off by a hook on a block's output, in the middle of the backward pass")
def undone_in_the_middle_of_backward(t: Trial) -> None:
    class Hooked(Net):
        hook: Any = None

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.stem(x))
            if self.hook is not None:
                x.register_hook(self.hook)
            return self.blocks[1](x)

    model = Hooked()
    optimizer = sgd(model)
    session = t.apply(model, optimizer)
    for step in range(5):
        model.hook = (lambda _: undo(session)) if step == 2 else None
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off by a pre-hook of the second block, in the middle of the forward")
def undone_within_forward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    calls: list[int] = []

    def take_off(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            undo(session)

    model.stem.register_forward_hook(take_off)
    session = t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off by a step hook of the optimizer, before its update, and one after it")
def undone_in_step_hook(t: Trial) -> None:
    for which in ("pre", "post"):
        torch.manual_seed(1)
        model = Net()
        optimizer = adamw(model)
        counts: list[int] = []
        held: list[Any] = []

        def take_off(*_: Any, counts: Any = counts, held: Any = held) -> None:
            counts.append(1)
            if len(counts) == 3:
                undo(held[0])

        getattr(optimizer, f"register_step_{which}_hook")(take_off)
        held.append(t.apply(model, optimizer))
        for step in range(5):
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()


@attack("changes", "the plan is taken off while gradients are being summed, after the first of two backward passes")
def undone_within_accumulation(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    session = t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            loss = model(*tokens(2 * step + i)) / 2
            loss.backward()
            if step == 1 and i == 0:
                undo(session)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off and put on again for each step")
def put_on_for_each_step(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    for step in range(4):
        session = t.apply(model, optimizer)
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        undo(session)
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off after the backward pass and put on again before the step")
def put_on_again_before_step(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    session = t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            undo(session)
            session = t.apply(model, optimizer)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is put on between a plain forward and its backward pass")
def put_on_before_backward(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    for step in range(4):
        loss = model(*tokens(step))
        if step == 1:
            t.apply(model, optimizer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is put on with gradients that are not stepped yet, the first of two backward passes")
def put_on_within_accumulation(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    for step in range(4):
        optimizer.zero_grad()
        for i in range(2):
            loss = model(*tokens(2 * step + i)) / 2
            loss.backward()
            if step == 1 and i == 0:
                t.apply(model, optimizer)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is put on between a plain backward pass and its step")
def put_on_before_step(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            t.apply(model, optimizer)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "the plan is put on in a thread, under no_grad and with another default dtype, and taken off in another thread",
)
def put_on_in_thread(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    held: list[Any] = []

    def put_on() -> None:
        with torch.no_grad():
            held.append(t.apply(model, optimizer))

    for work, steps in ((put_on, range(3)), (lambda: undo(held[0]), range(3, 5))):
        errors: list[BaseException] = []

        def caught(work: Any = work, errors: Any = errors) -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread of the loop
                errors.append(error)

        thread = threading.Thread(target=caught)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        for step in steps:
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()


@attack(
    "changes",
    "a copy is made between backward pass and step, the plan then taken off the first one, and both are trained",
)
def copied_before_step(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    session = t.apply(model, optimizer)
    for step in range(2):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step == 1:
            copied, other = copy.deepcopy((model, optimizer))
            undo(session)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    other.step()
    t.note("copy", [p.detach().clone() for p in copied.parameters()])
    for step in range(2, 4):
        for each, own in ((model, optimizer), (copied, other)):
            own.zero_grad()
            loss = each(*tokens(step))
            loss.backward()
            own.step()
            t.note("loss", loss)
        t.end_step()


@attack(
    "changes", "two models in one optimizer: the plan of the first is taken off between the backward passes of both"
)
def one_of_two_undone(t: Trial) -> None:
    first, second = Net(), Net()
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    session = t.apply(first, optimizer)
    t.track(second)
    for step in range(4):
        optimizer.zero_grad()
        loss = first(*tokens(step))
        loss.backward()
        if step == 1:
            undo(session)
        second(*tokens(step + 50)).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is put on by a step hook of the optimizer, after its second step (a callback)")
def put_on_in_step_hook(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    steps: list[int] = []

    def put_on(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 2:
            t.apply(model, optimizer)

    optimizer.register_step_post_hook(put_on)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the plan is taken off, and put on again, by the closure that the optimizer calls within its step")
def taken_off_in_closure(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    held = [t.apply(model, optimizer)]
    for step in range(5):

        def closure(step: int = step) -> torch.Tensor:
            if step == 1:
                undo(held[0])
            if step == 3:
                held[0] = t.apply(model, optimizer)
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            return loss

        t.note("loss", optimizer.step(closure))
        t.end_step()
