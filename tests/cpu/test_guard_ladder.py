"""`guard` with plans: errors at operators move a run down its ladder and calm moves it up again, and what it trains is the plain run's."""

import random
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.guard import Failing
from tests.attacks.places import VARIANTS
from tests.cpu.guarded_ladders import NUM_STEPS, Training, by_hand, guarded, is_close, is_same, plain
from tests.forked_python import forked_python
from tests.unseen_queue import unseen_queue

import tightfit
from tightfit.errors import ApplyError
from tightfit.guarding import rungs
from tightfit.runtime.apply import apply

from tests.cpu import applied  # isort: skip

OTHER = "checkpointing"
SCRIPT = """
import torch
from tests.unseen_queue import unseen_queue
from tests.cpu.applied import batch_of, made
model, optimizer = made()
calls, seen = unseen_queue(), []
for number in range(4):
    rows, classes = batch_of(number)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(rows), classes)
    loss.backward()
    calls.put(None)
    # The second turn, and when it is run again.
    if calls.qsize() in (2, 3):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    optimizer.step()
    seen.append("forward" in vars(model.layers[2]))
print(seen)
"""
KINDS = ("scaled", "averaged", "accumulated", "two optimizers")
# Of each family one, and those that keep something outside of the model.
OF_KINDS = (
    "checkpointing",
    "activation offload",
    "micro-batches",
    "update in backward",
    "optimizer offload in backward",
    "8-bit states at the host",
    "trained weight streaming",
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")


def numbers_of(seed: str, num_operators: int, count: int) -> list[int]:
    """Operators that fail: one at random, and the next ones within the attempts that follow."""
    draw = random.Random(seed)
    of_step = num_operators // NUM_STEPS
    numbers = [draw.randint(1, num_operators - 3 * of_step)]
    while len(numbers) < count:
        numbers.append(numbers[-1] + draw.randint(2, of_step * 7 // 10))
    return numbers


def check(variant: str, seed: str, count: int, kind: str = "plain", *, everywhere: bool = False) -> None:
    others = () if VARIANTS[variant].technique in ("tiled_convolutions", OTHER) else (OTHER,)
    variants = [variant, *others]
    expected = plain(variants, kind)
    found = guarded(variants, numbers_of(seed, expected.num_operators, count), kind, everywhere=everywhere)
    assert found.num_failures == count and len(found.plans) == NUM_STEPS
    assert is_same(by_hand(variants, found.plans, kind), found)
    if VARIANTS[variant].is_bitwise:
        assert is_same(expected, found)
    elif not VARIANTS[variant].is_lossy:
        assert is_close(expected, found)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_technique_is_a_rung_from_which_a_run_climbs_back(variant: str) -> None:
    # The second error of a step is what goes down, and the third one is raised under the first plan. One that rounds weights has rounded them by then.
    has_other = VARIANTS[variant].technique not in ("tiled_convolutions", OTHER) and not VARIANTS[variant].is_lossy
    for count in (2, 3 if has_other else 2):
        check(variant, f"{variant} {count}", count)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", OF_KINDS)
def test_what_else_a_loop_keeps_is_taken_back_under_each_plan(variant: str, kind: str) -> None:
    check(variant, f"{variant} {kind}", 2, kind)


@pytest.mark.parametrize("variant", OF_KINDS)
def test_errors_while_a_plan_is_put_on_or_taken_off_and_in_the_guard_itself(variant: str) -> None:
    for number in range(3):
        check(variant, f"{variant} everywhere {number}", 3, everywhere=True)


def test_the_first_step_may_fail_before_the_optimizer_has_states() -> None:
    for variant in OF_KINDS:
        variants = [variant, OTHER]
        of_step = plain(variants).num_operators // NUM_STEPS
        found = guarded(variants, [of_step // 4, of_step // 2])
        assert found.plans[0] == 0
        assert is_same(by_hand(variants, found.plans), found)


def test_the_first_step_may_fail_more_often_than_it_takes_to_learn_what_it_writes() -> None:
    def run(num_failures: int) -> tuple[list[Any], int]:
        model, optimizer = applied.made()
        failing = Failing(*range(1, num_failures + 1))

        def step(number: int) -> float:
            rows, classes = applied.batch_of(number)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(rows), classes)
            loss.backward()
            with failing, failing.counting():
                torch.zeros(1)
            optimizer.step()
            return float(loss.detach())

        plans = [applied.plan_of([each]) for each in applied.CHOICES]
        with tightfit.guard(model, optimizer, plans=plans) as guard:
            losses = [guard.step(step, number) for number in range(3)]
        return [*losses, *model.state_dict().values()], guard.statistics["replays"]

    (expected, _), (found, num_replays) = run(0), run(4)
    assert num_replays == 4
    # The statistics of batch normalisation, which count their batches, among them.
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("variant", OF_KINDS)
def test_states_that_are_saved_on_a_lower_rung_go_on_without_a_plan(variant: str) -> None:
    def saved_and_loaded(loads: bool) -> list[Any]:
        training, session = Training([variant]), None
        losses = [training.step(batch) for batch in training.batches[:2]]
        session = apply(training.plans[0], training.model, training.optimizers)
        losses += [training.step(batch) for batch in training.batches[2:4]]
        weights, states = training.model.state_dict(), training.optimizers[0].state_dict()
        if loads:
            training = Training([variant])
            training.model.load_state_dict(weights)
            training.optimizers[0].load_state_dict(states)
        else:
            session.undo()
        return training.result([*losses, *(training.step(batch) for batch in training.batches[4:])])[:-2]

    own, loaded = saved_and_loaded(False), saved_and_loaded(True)
    num_averages = len(list(Training([variant]).average.state_dict()))
    assert len(own) == len(loaded) > num_averages
    assert all(map(torch.equal, own, loaded))


def fails_with(error: BaseException, plans: set[int]) -> Any:
    """An `apply` that ends so for the plans at these positions of `CHOICES`."""

    def put(plan: Any, model: Any, optimizers: Any) -> Any:
        if applied.CHOICES.index(plan.choices[0]) in plans:
            raise error
        return apply(plan, model, optimizers)

    return put


@pytest.mark.parametrize(
    "error",
    [ApplyError("it is for another model"), torch.OutOfMemoryError("CUDA out of memory.")],
    ids=["refused", "full"],
)
def test_a_plan_that_cannot_be_put_on_is_passed_over(error: BaseException) -> None:
    model, optimizer = applied.made()
    ladder = rungs.Rungs(
        [applied.plan_of([each]) for each in applied.CHOICES],
        lambda: model,
        lambda: [optimizer],
        put=fails_with(error, {0}),
        calm_steps=1,
    )
    tried: list[str] = []
    assert ladder.try_next(tried) and ladder.at == 1
    assert tried[0].startswith("plan 1: ") and tried[1] == "plan 2"
    # It is passed over upwards as well.
    assert ladder.step_succeeded() and ladder.at == -1
    ladder.end()
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_run_goes_on_as_it_was_where_it_cannot_climb() -> None:
    model, optimizer = applied.made()
    forbidden: set[int] = set()
    put = fails_with(torch.OutOfMemoryError("CUDA out of memory."), forbidden)
    plans = [applied.plan_of([each]) for each in applied.CHOICES[:2]]
    ladder = rungs.Rungs(plans, lambda: model, lambda: [optimizer], put=put, calm_steps=1, has_first=True)
    assert ladder.try_next([]) and ladder.at == 1
    forbidden.add(0)
    assert not ladder.step_succeeded() and ladder.at == 1 and "forward" in vars(model.layers[2])
    ladder.end()


def test_a_model_in_parts_is_not_trained_on() -> None:
    model, optimizer = applied.made()

    def put(plan: Any, model: Any, optimizers: Any) -> Any:
        session = apply(plan, model, optimizers)

        def fails() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        session.when_undone(fails)
        return session

    plans = [applied.plan_of([each]) for each in applied.CHOICES[:2]]
    ladder = rungs.Rungs(plans, lambda: model, lambda: [optimizer], put=put)
    ladder.try_next([])
    for call in (lambda: ladder.try_next([]), ladder.begin):
        with pytest.raises(ApplyError, match="no memory to take plan 1 off, and the model is in parts"):
            call()


def test_a_plan_that_is_refused_within_a_step_is_taken_off_and_the_step_run_again() -> None:
    def run(fails: bool) -> tuple[list[Any], Any]:
        model, optimizer = applied.made()
        seen: list[int] = []
        plans = [applied.plan_of([each]) for each in applied.CHOICES[:2]]
        with tightfit.guard(model, optimizer, plans=plans) as guard:

            def step(number: int) -> float:
                seen.append(guard.plan_in_use)
                rows, classes = applied.batch_of(number)
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(rows), classes)
                loss.backward()
                if fails and number == 1 and guard.plan_in_use < 0:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                if number == 3 and guard.plan_in_use >= 0:
                    raise guard._attempts.rungs.present.session.refuse("its inputs have changed")  # type: ignore[union-attr]
                optimizer.step()
                return float(loss.detach())

            losses = [guard.step(step, number) for number in range(5)]
        assert not any("forward" in vars(part) for part in model.modules())
        return [*losses, *model.state_dict().values()], (seen, dict(guard.statistics))

    (expected, _), (found, (seen, statistics)) = run(False), run(True)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(expected, found, strict=True))
    # The second plan refuses the step too; the run goes on without one.
    assert seen == [-1, 0, 0, -1, -1]
    assert statistics["refused plans"] == 2


def test_what_a_failed_backward_pass_has_left_is_freed_before_the_step_is_run_again() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) if n % 2 else torch.nn.GELU() for n in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = unseen_queue()
    alive = unseen_queue()

    def step(rows: torch.Tensor, failing: Failing) -> None:
        if saved.qsize():
            alive.put(int(saved.get()() is not None))
        optimizer.zero_grad()
        hidden = model[:2](rows)
        saved.put(weakref.ref(hidden))
        loss = model[2:](hidden).sum()
        with failing.counting():
            loss.backward()

    # Some of these leave nodes in the engine's queue, whose graph has saved `hidden`.
    for number in range(4, 16):
        with tightfit.guard(model, optimizer) as guard, Failing(number) as failing:
            guard.step(step, torch.randn(4, 8), failing)
        assert guard.statistics["replays"] == 1
        del failing
        saved.get()
    assert [alive.get() for _ in range(alive.qsize())] == [0] * 12


def test_a_graph_whose_updates_were_to_come_is_not_held_while_the_step_is_run_again() -> None:
    training = Training(["update in backward"])
    held = unseen_queue()
    saved = unseen_queue()
    with tightfit.guard(training.model, training.optimizers, plans=training.plans) as guard:
        assert guard._attempts.rungs.try_next([])

        def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
            training.optimizers[0].zero_grad()
            # What the activation function after it has saved.
            handles = [
                training.model.blocks[0].wide.register_forward_hook(lambda _, __, rows: saved.put(weakref.ref(rows))),
                training.model.blocks[1].register_forward_pre_hook(
                    lambda _, __: held.put(saved.get()() is not None) if saved.qsize() > 1 else None
                ),
            ]
            loss = training.model(*batch)
            for handle in handles:
                handle.remove()
            loss.backward()
            if held.empty():
                raise torch.OutOfMemoryError("CUDA out of memory.")

        guard.step(step, training.batches[0])
    assert held.get() is False


def test_a_script_goes_down_with_its_fallbacks_and_one_that_is_for_another_model_is_no_error_of_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    first = applied.plan_of([applied.CHOICES[0]])
    other = applied.plan_of([applied.CHOICES[0]], roots=[applied.root(applied.Net(num_blocks=2))])
    for name, plan in (("first", first), ("other", other), ("small", applied.plan_of([applied.CHOICES[1]]))):
        plan.save(tmp_path / f"{name}.json")
    told = forked_python(
        *(
            "-m",
            "tightfit",
            "run",
            "--guard",
            "--plan",
            "first.json",
            "--fallback",
            "other.json",
            "--fallback",
            "small.json",
            "train.py",
        ),
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == "[False, True, True, True]"
    assert "4 steps, 2 out of memory, 2 replayed" in told.stderr


NEW_OPTIMIZER = """
import torch
from tests.unseen_queue import unseen_queue
from tests.cpu.applied import batch_of, made
model, optimizer = made()
calls, seen = unseen_queue(), []
for phase in range(2):
    if phase:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for number in range(3):
        rows, classes = batch_of(number)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), classes).backward()
        calls.put(None)
        if calls.qsize() in FAILS:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        optimizer.step()
        seen.append(["forward" in vars(model.layers[number]) for number in (0, 2)])
print(seen, [float(parameter.double().sum()) for parameter in model.parameters()])
"""


def test_a_new_optimizer_brings_no_second_plan_onto_the_model(tmp_path: Path) -> None:
    backward = applied.choice("update_in_backward", "optimizer", kernel="same", clips=False)
    offload = applied.choice(
        "optimizer_offload", "optimizer", host_bytes=1 << 20, window_bytes=1 << 12, least_elements=1
    )
    for name, choices in (("first", (applied.CHOICES[0], backward)), ("small", (applied.CHOICES[1], offload))):
        applied.plan_of(choices).save(tmp_path / f"{name}.json")
    command = ("-m", "tightfit", "run", "--guard", "--plan", "first.json", "--fallback", "small.json", "train.py")
    printed = []
    for fails in ((), (2, 3)):
        (tmp_path / "train.py").write_text(NEW_OPTIMIZER.replace("FAILS", repr(fails)))
        told = forked_python(*command, cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[2])}, check=True)
        printed.append(told.stdout.replace("]] [", "]]\n[").split("\n"))
    (_, expected, *_), (plans, found, *_) = printed
    assert found == expected
    assert plans == str([[True, False], *[[False, True]] * 5])
