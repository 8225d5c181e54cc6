"""`guard` on the code that people write: what a step has changed besides weights is taken back with it, or the step is not run again."""

import copy
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.guard import Failing
from tests.cpu import applied
from tests.cpu.test_guard import Recurrent, same
from torch.utils.data import DataLoader, TensorDataset

import tightfit
from tightfit.guarding.memory.out_of_memory import is_out_of_memory
from tightfit.guarding.memory.post_mortem import write_post_mortem

ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)
ROWS = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(1))
Step = Callable[[torch.Tensor], Any]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    random.seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


class Fails:
    """A function of the step that raises an out-of-memory error in those of its calls that have these numbers."""

    def __init__(self, *numbers: int) -> None:
        self._failing = Failing(*numbers)

    def __call__(self) -> None:
        with self._failing, self._failing.counting():
            torch.zeros(1)


def train(
    make: Callable[[Fails, torch.nn.Module, torch.optim.Optimizer], Step], *fails: int, guarded: bool
) -> list[Any]:
    model, optimizer = network()
    step = make(Fails(*fails if guarded else ()), model, optimizer)
    found: list[Any] = []
    if guarded:
        with tightfit.guard(model, optimizer) as each:
            found += [each.step(step, rows) for rows in ROWS.clone()]
        assert each.statistics["replays"] == len(fails)
    else:
        found += [step(rows) for rows in ROWS.clone()]
    return [*found, *model.state_dict().values(), torch.get_rng_state(), random.random()]


def accumulates(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Gradients of three calls are added up, and the counter is a variable of the enclosing function."""
    number = 0

    def step(rows: torch.Tensor) -> float:
        nonlocal number
        number += 1
        loss = model(rows).square().mean()
        loss.backward()
        fail()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return step


def zeroes_in_place(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(rows: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=False)
        loss = model(rows).square().mean()
        loss.backward()
        fail()
        optimizer.step()
        return float(loss.detach())

    return step


LOG: list[float] = []
SETTINGS = {"noise": 1.0}


def keeps_books(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A list, a dict and Python's own random numbers, all of the module."""
    LOG.clear()
    SETTINGS["noise"] = 1.0

    def step(rows: torch.Tensor) -> list[float]:
        SETTINGS["noise"] *= 0.9
        optimizer.zero_grad()
        loss = model(rows * random.random() * SETTINGS["noise"]).square().mean()
        LOG.append(float(loss.detach()))
        loss.backward()
        fail()
        optimizer.step()
        return list(LOG)

    return step


def scales(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def step(rows: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        fail()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    return step


def averages(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A moving average of the weights, a metric that is a module beside the model, and a schedule."""
    average = copy.deepcopy(model)
    metric = torch.nn.Module()
    metric.register_buffer("total", torch.zeros(2, 2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def step(rows: torch.Tensor) -> list[float]:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        metric.total += loss.detach()
        loss.backward()
        fail()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return [float(metric.total.sum()), float(next(average.parameters()).detach().sum())]

    return step


def takes_gradients_of_batches(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Adversarial training: the batch is moved along its own gradient, which is added to the batch that the loop holds."""

    def step(rows: torch.Tensor) -> float:
        rows.requires_grad_()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        fail()
        moved = rows.detach() + 0.1 * rows.grad.sign()  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss = model(moved).square().mean()
        loss.backward()
        optimizer.step()
        return float(rows.grad.sum()) + float(loss.detach())  # type: ignore[union-attr]

    return step


def is_lazy_at_first(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A layer beside the model whose parameters are made in the first call that gets so far."""
    lazy = torch.nn.LazyLinear(3)

    def step(rows: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        fail()
        optimizer.step()
        torch.manual_seed(0)
        return float(lazy(rows).sum().detach())

    return step


def searches(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """LBFGS, which runs the forward and the backward pass several times in its step."""
    searching = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(rows: torch.Tensor) -> float:
        fail()

        def closure() -> torch.Tensor:
            searching.zero_grad()
            loss = model[2](model[0](rows)).square().mean()
            loss.backward()
            return loss

        return float(searching.step(closure).detach())

    return step


@pytest.mark.parametrize(
    "make",
    [
        accumulates,
        zeroes_in_place,
        keeps_books,
        scales,
        averages,
        takes_gradients_of_batches,
        is_lazy_at_first,
        searches,
    ],
)
@pytest.mark.parametrize("fails", [(1,), (2,), (5,), (2, 4, 6)])
def test_what_a_step_has_changed_is_taken_back(make: Any, fails: tuple[int, ...]) -> None:
    expected = train(make, guarded=False)
    assert all(map(same, expected, train(make, *fails, guarded=True)))


def test_batches_that_a_step_asks_for_itself_come_again() -> None:
    def run(fails: tuple[int, ...]) -> list[Any]:
        model, optimizer = network()
        fail = Fails(*fails)
        loader = DataLoader(
            TensorDataset(ROWS.flatten(0, 1)), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)
        )
        with tightfit.guard(model, optimizer) as guarded:
            batches = guarded.batches(loader)

            def step() -> float:
                optimizer.zero_grad()
                (rows,) = next(batches)
                loss = model(rows).square().mean()
                loss.backward()
                fail()
                optimizer.step()
                return float(loss.detach())

            return [guarded.step(step) for _ in range(5)] + list(model.state_dict().values())

    assert all(map(same, run(()), run((1, 3))))


def by_data(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]


def by_hand(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    with torch.no_grad():
        next(model.parameters()).sub_(0.1)


def a_loader(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    next(batches)  # type: ignore[call-overload]


def a_setting(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (by_data, r"weights had been updated in it already \("),
        (by_hand, r"weights had been updated in it already"),
        (a_loader, r"a batch that it got from a data loader, which cannot be asked for it again"),
        (a_setting, r"it changed the settings of an optimizer"),
    ],
)
def test_what_cannot_be_taken_back_ends_the_run_with_the_reason(change: Any, reason: str) -> None:
    model, optimizer = network()
    fail = Fails(4)
    batches = iter(DataLoader(TensorDataset(ROWS.flatten(0, 1)), batch_size=2))

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        change(model, optimizer, batches)
        fail()

    with tightfit.guard(model, optimizer) as guarded:
        for rows in ROWS[:3]:
            guarded.step(step, rows)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            guarded.step(step, ROWS[3])
    assert any(note.startswith("tightfit: step 4: the step could not be run again") for note in raised.value.__notes__)
    assert any(re.search(reason, note) for note in raised.value.__notes__)
    found = json.loads(Path("tightfit-out-of-memory-4.json").read_text())
    assert found["step"] == 4 and found["error"].startswith("OutOfMemoryError")
    assert found["devices"]["cpu"]["tensor_bytes"]["parameters"] == sum(p.nbytes for p in model.parameters())


def test_a_step_that_never_fits_ends_with_its_error_and_what_was_tried() -> None:
    model, optimizer = network()
    fail = Fails(*range(3, 100))
    with tightfit.guard(model, optimizer) as guarded:
        step = accumulates(fail, model, optimizer)
        guarded.step(step, ROWS[0])
        guarded.step(step, ROWS[1])
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(torch.OutOfMemoryError) as raised:
            guarded.step(step, ROWS[2])
    assert "tightfit: tried: released memory" in raised.value.__notes__
    assert any("what would have fitted: tightfit plan" in note for note in raised.value.__notes__)
    (file,) = Path().glob("tightfit-out-of-memory-*.json")
    found = json.loads(file.read_text())
    assert found["plans"] == [] and "--largest-batch --ladder 3" in found["what_would_have_fitted"]
    assert found["requested_bytes"] == 2 << 30
    assert all(map(same, before.values(), model.state_dict().values()))
    assert "step" not in vars(optimizer)


def test_the_plans_of_the_ladder_are_taken_in_turn_and_given_back_after_calm() -> None:
    def run(fails: tuple[int, ...]) -> tuple[list[Any], list[list[bool]], dict[str, int]]:
        model, optimizer = applied.made()
        fail = Fails(*fails)
        seen: list[list[bool]] = []

        def step(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
            seen.append(["forward" in vars(model.layers[0]), "forward" in vars(model.layers[2])])
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            fail()
            optimizer.step()
            return float(loss.detach())

        plans = [applied.plan_of([applied.CHOICES[0]]), applied.plan_of([applied.CHOICES[1]])]
        with tightfit.guard(model, optimizer, plans=plans, calm_steps=2) as guarded:
            losses = [guarded.step(step, applied.batch_of(number)) for number in range(7)]
        assert not any("forward" in vars(part) for part in model.modules())
        return [*losses, *model.state_dict().values()], seen, dict(guarded.statistics)

    expected, _, _ = run(())
    found, seen, statistics = run((2, 3, 4))
    assert all(map(same, expected, found))
    # The second step fails as it is, again after memory was released, and with the first plan. What failed is taken back in this list, too.
    no_plan, first, second = [False, False], [True, False], [False, True]
    assert seen == [no_plan, second, second, first, first, no_plan, no_plan]
    assert (statistics["replays"], statistics["climbs"]) == (3, 2)


def test_two_models_are_guarded_side_by_side() -> None:
    def run(fails: tuple[int, ...]) -> list[Any]:
        (one, first), (other, second) = network(), network()
        fail = Fails(*fails)

        def judge(rows: torch.Tensor) -> None:
            first.zero_grad()
            (one(rows) - one(rows * other(rows).detach())).square().mean().backward()
            fail()
            first.step()

        def make(rows: torch.Tensor) -> None:
            second.zero_grad()
            one(rows * other(rows)).mean().backward()
            fail()
            second.step()

        with tightfit.guard(one, first) as judging, tightfit.guard(other, second) as making:
            for rows in ROWS:
                judging.step(judge, rows)
                making.step(make, rows)
        return [*one.state_dict().values(), *other.state_dict().values()]

    assert all(map(same, run(()), run((1, 4, 8))))


def test_other_errors_and_interrupts_pass() -> None:
    model, optimizer = network()

    def step(error: BaseException) -> None:
        raise error

    with tightfit.guard(model, optimizer) as guarded:
        for error in (RuntimeError("shapes differ"), KeyboardInterrupt(), ValueError("no")):
            with pytest.raises(type(error)):
                guarded.step(step, error)
    assert guarded.statistics["out of memory"] == 0


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (ACCELERATOR_ERROR("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."), True),
        (ACCELERATOR_ERROR("HIP error: out of memory"), True),
        (ACCELERATOR_ERROR("CUDA error: an illegal memory access was encountered"), False),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error: out of memory"), False),
        (type("Ours", (RuntimeError,), {})("out of memory"), False),
    ],
)
def test_which_errors_are_out_of_memory(error: BaseException, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_each_rank_and_each_run_leaves_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        write_post_mortem(tmp_path, MemoryError(), step=4, tried=[], models=[], optimizers=[])
        return sorted(path.name for path in tmp_path.iterdir())

    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        expected.append(f"tightfit-out-of-memory-rank{rank}-4.json")
        assert names() == expected
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert names() == ["tightfit-out-of-memory-4.json", *expected]
    assert names() == [f"tightfit-out-of-memory-4-{os.getpid()}.json", "tightfit-out-of-memory-4.json", *expected]


def test_a_signal_to_end_is_told_once_at_the_border_of_a_step() -> None:
    model, optimizer = network()
    told: list[int] = []
    former = signal.getsignal(signal.SIGTERM)
    done: list[int] = []
    with tightfit.guard(model, optimizer, on_terminate=lambda: told.append(len(done))) as guarded:
        for number in range(3):

            def step(number: int = number) -> None:
                if number == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                done.append(number)

            guarded.step(step)
    assert told == [2] and done == [0, 1, 2]
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_recurrent_net_on_the_guard_survives_an_error_in_the_copies_of_the_guard_itself() -> None:
    def run(*numbers: int) -> list[Any]:
        torch.manual_seed(1)
        model = Recurrent()
        model.register_buffer("large", torch.zeros(64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        failing = Failing(*numbers)

        def step(rows: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(rows).backward()
            optimizer.step()

        with tightfit.guard(model, optimizer) as guarded:
            for rows in ROWS:
                with failing, failing.counting():
                    guarded.step(step, rows)
        return list(model.state_dict().values())

    expected = run()
    for number in (2, 4):
        assert all(map(same, expected, run(number)))


class ByData(torch.optim.Optimizer):
    """As optimizers were written for years: without states, and past the versions of the parameters."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], fails: int = -1) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._fails = fails
        self._num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._num_steps += 1
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if (self._num_steps, number) == (self._fails, 2):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            parameter.data.add_(parameter.grad, alpha=-0.1)


def test_an_update_by_data_that_stops_half_way_is_not_run_again() -> None:
    model, _ = network()
    optimizer = ByData(model.parameters(), fails=4)

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    with tightfit.guard(model, optimizer) as guarded:
        for rows in ROWS[:3]:
            guarded.step(step, rows)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(torch.OutOfMemoryError) as raised:
            guarded.step(step, ROWS[3])
    now = list(model.parameters())
    assert [torch.equal(then, after) for then, after in zip(before, now, strict=True)] == [False, False, True, True]
    assert guarded.statistics["replays"] == 0
    assert any("had updated some of its weights, and not all" in note for note in raised.value.__notes__)


def test_nothing_is_left_in_a_thread_that_steps_the_optimizer() -> None:
    model, optimizer = network()
    with ThreadPoolExecutor(1) as pool:

        def step(rows: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            pool.submit(optimizer.step).result()

        with tightfit.guard(model, optimizer) as guarded:
            for rows in ROWS[:2]:
                guarded.step(step, rows)
        assert pool.submit(torch._C._len_torch_dispatch_stack).result() == 0


class Wrapped(torch.nn.Module):
    """As what torch.compile returns: it asks the module inside for its length, which has none."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __len__(self) -> int:
        raise TypeError("Linear does not support len()")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)


def test_a_model_whose_length_cannot_be_asked_is_guarded() -> None:
    def wraps(fail: Fails, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        wrapped = Wrapped(model)

        def step(rows: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = wrapped(rows).square().sum()
            fail()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    assert all(map(same, train(wraps, guarded=False), train(wraps, 2, guarded=True)))
    model, optimizer = network()
    wrapped = Wrapped(model)
    with tightfit.guard(wrapped, optimizer) as guarded:
        guarded.step(lambda: wrapped(ROWS[0]).sum().backward())
    assert guarded.statistics["steps"] == 1
