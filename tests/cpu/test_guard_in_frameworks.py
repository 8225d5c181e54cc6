"""`GuardCallback`s and `guard` beside Accelerate: wherever the passes for a batch find no memory, a framework's training ends as the plain one."""

import contextlib
import gc
import io
import os
import queue
import random
import signal
import sqlite3
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from benchmarks.guard import Failing
from lightning import pytorch as lightning
from tests.attacks.backward_thread import BackwardThread

import tightfit
from tightfit.capture.targets.target_kinds import Script, run_script
from tightfit.guarding.loops.guarded_script import GuardedScript
from tightfit.guarding.loops.outside_effects import OutsideEffects
from tightfit.integrations.lightning import GuardCallback as LightningGuard
from tightfit.integrations.transformers import GuardCallback as TrainerGuard
from tightfit.torch_hooks.calls import StepOwner, on_training_step
from tightfit.torch_hooks.manifest import LIGHTNING_CLOSURE, TRAINER_STEP, Name

WIDTH, NUM_ROWS = 8, 24
Result = dict[str, Any]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Counting(StepOwner):
    """Counts the operators of the passes, from within the guard: it is there first."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing

    def around_training_step(self, owner: Any, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        with self._failing.counting():
            return call()


@contextlib.contextmanager
def failing_at(name: Name, *numbers: int) -> Iterator[Failing]:
    failing = Failing(*numbers)
    counting = Counting(failing)
    leave = on_training_step(name, counting)
    try:
        with failing:
            yield failing
    finally:
        leave()


def seeded() -> None:
    torch.manual_seed(3)
    random.seed(3)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.3), torch.nn.Linear(WIDTH, 1)
        )
        self.num_calls = 0

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        found = self.body(rows).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


class CountingTrainer(transformers.Trainer):
    """Keeps sums and a history of its own in its loss, as trainers of other libraries do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.num_losses = 0
        self.seen: dict[str, list[int]] = {"rows": []}

    def compute_loss(self, model: Any, inputs: Any, **others: Any) -> Any:
        self.num_losses += 1
        self.seen["rows"].append(len(inputs["rows"]))
        self.state.log_history.append({"loss": self.num_losses})
        return super().compute_loss(model, inputs, **others) * (1 + 0.1 * self.num_losses)


def with_trainer(kind: type[transformers.Trainer], callbacks: list[Any], accumulation: int) -> Result:
    seeded()
    model = Net()
    rows = [{"rows": torch.randn(WIDTH), "labels": torch.randn(())} for _ in range(NUM_ROWS)]
    arguments = transformers.TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer = kind(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    logged = [(each.get("loss"), each.get("grad_norm")) for each in trainer.state.log_history]
    own = {name: getattr(trainer, name, None) for name in ("num_losses", "seen")}
    return {**model.state_dict(), "calls": model.num_calls, "logged": logged, "random": torch.get_rng_state(), **own}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.history: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.net(*batch)["loss"]
        self.log("mean_loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.history.append(float(number))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Watching(lightning.Callback):
    """A program's own callback, called in the middle of the passes."""

    def __init__(self) -> None:
        self.num_passes = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.num_passes += 1


def with_lightning(callbacks: list[Any], accumulation: int) -> Result:
    seeded()
    module, watching = Module(), Watching()
    data = torch.utils.data.TensorDataset(torch.randn(NUM_ROWS, WIDTH), torch.randn(NUM_ROWS))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=0.5,
        callbacks=[watching, *callbacks],
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    return {
        **module.state_dict(),
        "history": module.history,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "passes": watching.num_passes,
        "progress": progress.state_dict(),
        "random": torch.get_rng_state(),
    }


def same(one: Result, other: Result) -> list[str]:
    """The names of what differs."""
    assert one.keys() == other.keys()
    return [
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])
    ]


TRAININGS: dict[str, tuple[Name, Callable[[list[Any]], Result], Callable[..., Any]]] = {
    "Trainer": (TRAINER_STEP, lambda c: with_trainer(transformers.Trainer, c, 1), TrainerGuard),
    "Trainer that accumulates": (TRAINER_STEP, lambda c: with_trainer(transformers.Trainer, c, 2), TrainerGuard),
    "a trainer with a state": (TRAINER_STEP, lambda c: with_trainer(CountingTrainer, c, 1), TrainerGuard),
    "Lightning": (LIGHTNING_CLOSURE, lambda c: with_lightning(c, 1), LightningGuard),
    "Lightning that accumulates": (LIGHTNING_CLOSURE, lambda c: with_lightning(c, 2), LightningGuard),
}


@pytest.mark.parametrize("kind", TRAININGS)
def test_wherever_the_passes_find_no_memory_the_training_ends_as_the_plain_one(kind: str) -> None:
    name, train, guard = TRAININGS[kind]
    with failing_at(name) as counted:
        plain = train([])
    draw, num_taken_back = random.Random(kind), 0
    for number in sorted(draw.sample(range(1, counted.num_operators + 1), 4)):
        callback = guard()
        with failing_at(name, number) as failing:
            found = train([callback])
        assert failing.num_failures == 1
        assert same(plain, found) == [], number
        num_taken_back += callback.statistics["replays"] + callback.statistics["retried operators"]
    # Where a copy of gradients finds no memory it is made at the host; Lightning's passes run within the step of the optimizer, whose operators are run
    # again one by one.
    assert num_taken_back


def test_with_accelerate_the_guard_is_the_loops() -> None:
    def train(*numbers: int) -> tuple[Result, Failing]:
        seeded()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, losses = Net(), []
        data = torch.utils.data.TensorDataset(torch.randn(NUM_ROWS, WIDTH), torch.randn(NUM_ROWS))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        prepared = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4), schedule)
        prepared_model, prepared_optimizer, loader, schedule = prepared
        failing = Failing(*numbers)

        def step(batch: Any) -> torch.Tensor:
            with failing.counting(), accelerator.accumulate(prepared_model):
                loss = prepared_model(*batch)["loss"]
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared_model.parameters(), 0.5)
                prepared_optimizer.step()
                schedule.step()
                prepared_optimizer.zero_grad()
            return loss.detach()

        with tightfit.guard(prepared_model, prepared_optimizer) as guarded, failing:
            losses = [guarded.step(step, batch) for batch in loader]
        rate = optimizer.param_groups[0]["lr"]
        return {**model.state_dict(), "losses": torch.stack(losses), "rate": rate, "steps": accelerator.step}, failing

    plain, counted = train()
    for number in random.Random(1).sample(range(1, counted.num_operators + 1), 6):
        found, failing = train(number)
        assert failing.num_failures == 1
        assert same(plain, found) == [], number


def test_a_guard_is_of_its_own_trainer_and_leaves_nothing() -> None:
    step = transformers.Trainer.training_step
    callback = TrainerGuard()
    with failing_at(TRAINER_STEP, 5), pytest.raises(torch.OutOfMemoryError):
        with_trainer(transformers.Trainer, [], 1)
    with_trainer(transformers.Trainer, [callback], 1)
    assert callback.statistics["steps"] == NUM_ROWS // 4
    assert transformers.Trainer.training_step is step


def test_a_training_that_ends_with_an_error_leaves_nothing() -> None:
    class Breaking(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **others: Any) -> Any:
            raise ValueError("in a step")

    class Between(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise ValueError("between steps")

    for kind, callbacks in ((Breaking, []), (transformers.Trainer, [Between()])):
        opening, given = open, queue.Queue.put
        with pytest.raises(ValueError, match=r"in a step|between steps"):
            with_trainer(kind, [TrainerGuard(), *callbacks], 1)
        gc.collect()
        assert (open, queue.Queue.put) == (opening, given), kind


def test_statements_in_a_database_are_not_run_twice() -> None:
    effects = OutsideEffects()
    effects.begin()
    try:
        with contextlib.closing(sqlite3.connect("losses.db")) as losses:
            effects.clear()
            losses.execute("create table losses (loss)")
            assert effects.first == "ran a statement in a database"
    finally:
        effects.end()


def test_what_hooks_do_in_the_thread_of_a_cards_backward_pass_is_of_the_turn() -> None:
    weight = torch.ones(2, requires_grad=True)
    stream = io.TextIOWrapper(io.BytesIO(), write_through=True)
    effects = OutsideEffects()

    def log(_: torch.Tensor) -> None:
        Path("log.txt").write_text("of the hook")
        print("of the hook")

    weight.register_hook(log)
    with contextlib.redirect_stdout(stream), BackwardThread().in_use():
        effects.begin()
        try:
            effects.clear()
            weight.sum().backward()
            assert effects.first == "opened log.txt to write to it"
            effects.printed.again()
            weight.sum().backward()
        finally:
            effects.end()
    assert stream.buffer.getvalue() == b"of the hook\n"


def test_two_guards_that_end_in_the_order_in_which_they_began() -> None:
    plain = open
    first, second = OutsideEffects(), OutsideEffects()
    first.begin()
    second.begin()
    first.end()
    with Path("log.txt").open("w") as log:
        second.clear()
        log.write("x")
    assert second.first == "wrote to log.txt"
    second.end()
    assert open is plain


def test_a_batch_that_never_fits_ends_with_its_error_and_a_post_mortem() -> None:
    with failing_at(LIGHTNING_CLOSURE, *range(40, 200)), pytest.raises(torch.OutOfMemoryError) as caught:
        with_lightning([LightningGuard(post_mortems=".")], 1)
    assert any("no plan that holds less is left" in note for note in caught.value.__notes__)
    assert list(Path().glob("tightfit-out-of-memory-*.json"))


def test_what_cannot_be_taken_back_is_refused_and_said() -> None:
    class Writing(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **others: Any) -> Any:
            with Path("losses.txt").open("a") as file:
                file.write("one\n")
            return super().compute_loss(model, inputs, **others)

    with failing_at(TRAINER_STEP, 30), pytest.raises(torch.OutOfMemoryError) as caught:
        with_trainer(Writing, [TrainerGuard()], 1)
    assert any("it opened losses.txt to write to it" in note for note in caught.value.__notes__)


def test_a_training_without_a_guarded_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    with_trainer(Own, [TrainerGuard()], 1)
    assert capsys.readouterr().err.startswith("tightfit: guard: no step of this training was guarded: its Trainer has")


SCRIPTS = {
    "Trainer": """
        from tests.cpu.test_guard_in_frameworks import CountingTrainer, with_trainer
        found = with_trainer(CountingTrainer, [], 1)
    """,
    "Lightning": """
        from tests.cpu.test_guard_in_frameworks import with_lightning
        found = with_lightning([], 2)
    """,
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_with_a_framework_is_guarded_as_it_is(kind: str) -> None:
    name = TRAININGS[kind][0]
    Path("train.py").write_text(textwrap.dedent(SCRIPTS[kind]) + "import torch\ntorch.save(found, 'found.pt')\n")

    def run(*numbers: int) -> tuple[Result, Failing, GuardedScript]:
        guarded = GuardedScript("train.py", [], has_first=False, folder=Path())
        with failing_at(name, *numbers) as failing, guarded.running() as compiled:
            run_script(Script(path="train.py", arguments=()), compiled=compiled)
        return torch.load("found.pt", weights_only=False), failing, guarded

    plain, counted, _ = run()
    for number in random.Random(kind).sample(range(1, counted.num_operators + 1), 3):
        found, failing, guarded = run(number)
        assert failing.num_failures == 1
        assert same(plain, found) == [], number
        assert guarded.num_loops >= 1


@pytest.mark.parametrize("kind", ["Trainer", "Lightning"])
def test_a_signal_to_end_is_told_behind_the_batch_in_which_it_came(kind: str) -> None:
    guard = TrainerGuard if kind == "Trainer" else LightningGuard
    former, told = signal.getsignal(signal.SIGTERM), []
    callback = guard(on_terminate=lambda: told.append(callback.statistics["steps"]), calm_steps=3, ballast=1024)

    class Signalling(StepOwner):
        def around_training_step(self, owner: Any, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
            if callback.statistics["steps"] == 1 and not told:
                os.kill(os.getpid(), signal.SIGTERM)
            assert not told or told == [2]
            return call()

    signalling = Signalling()
    leave = on_training_step(TRAINER_STEP if kind == "Trainer" else LIGHTNING_CLOSURE, signalling)
    try:
        with_trainer(transformers.Trainer, [callback], 1) if kind == "Trainer" else with_lightning([callback], 1)
    finally:
        leave()
    assert told == [2]
    assert signal.getsignal(signal.SIGTERM) is former
