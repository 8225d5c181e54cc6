"""Micro-batches where the loop of a framework computes the loss: the gradients of each of its optimizer steps, or a reason why not."""

import copy
import functools
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.loop_training import (
    NUM_CLASSES,
    Scores,
    attached,
    network,
    parts,
    score_loss,
    train_lightning,
    train_trainer,
)
from tests.cpu.module_training import assert_same, choice
from torch import nn

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_to
from tightfit.techniques.session import Session

# Both warn of loaders without workers, and of much else.
pytestmark = pytest.mark.filterwarnings("ignore")

LOG = logging.getLogger(__name__)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(scope="module", autouse=True)
def frameworks() -> None:
    """They take five seconds to import: not in each process that collects tests."""
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    """So that a wrong weight is told from rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def lit(base: type, **settings: Any) -> Any:
    """A LightningModule with the loss in its step, which logs and keeps things."""

    class Lit(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.class_weight = nn.Buffer(torch.linspace(0.5, 2.0, NUM_CLASSES))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.net(values)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            values, classes = batch["pair"] if isinstance(batch, dict) else batch
            scores = self(values)
            loss = score_loss(scores, classes, weight=self.class_weight, **settings)
            LOG.info("%d examples", len(values))
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log_dict({"size": scores.square().mean(), "most": float(len(values))}, reduce_fx="mean")
            self.log("sum", scores.sum(), reduce_fx="sum", on_epoch=True)
            return {"loss": loss, "scores": scores.detach()}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Lit()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("num_parts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_lightning_steps_with_the_same_gradients(package: str, num_parts: int) -> None:
    plain, logged = train_lightning(package, lit, [])
    split, split_logged = train_lightning(package, lit, parts("Lightning", num_parts))
    assert len(plain.gradients) == 6  # three batches of 5, 5 and 3, twice
    assert_same(plain, split, **CLOSE)
    assert split_logged.pop("most") <= 3
    assert split_logged == pytest.approx({name: value for name, value in logged.items() if name != "most"})


def asks(base: type) -> Any:
    """A module that goes another way where an example is large, which only some parts of a batch have."""

    class Asks(type(lit(base))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            values, classes = batch
            # Asked in the middle: a run that is ended there has logged and counted.
            self.log("large", values.amax((1, 2)).mean(), on_epoch=True)
            share = 0.5 if (values > 2.3).any() else 1.0
            loss = share * score_loss(self(values), classes)
            self.log("sum", values.sum(), reduce_fx="sum", on_epoch=True)
            self.log("loss", loss, on_epoch=True)
            return loss

    return Asks()


def test_steps_whose_parts_are_led_by_the_whole_log_once() -> None:
    plain, logged = train_lightning(PACKAGES[0], asks, [])
    split, split_logged = train_lightning(PACKAGES[0], asks, parts("Lightning", 2))
    assert_same(plain, split, **CLOSE)
    assert split_logged == pytest.approx(logged)


def test_a_last_batch_of_one_example_runs_whole() -> None:
    plain, _ = train_lightning(PACKAGES[0], lit, [], num_examples=11)
    split, _ = train_lightning(PACKAGES[0], lit, parts("Lightning", 2), num_examples=11)
    assert_same(plain, split, **CLOSE)


def test_accumulation_and_clipping_of_lightning_stay_what_they_are() -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    smoothed = functools.partial(lit, label_smoothing=0.1)
    plain, logged = train_lightning(PACKAGES[0], smoothed, [], **settings)
    split, split_logged = train_lightning(PACKAGES[0], smoothed, parts("Lightning", 3), **settings)
    assert len(plain.gradients) == 4  # the last batch of an epoch steps by itself
    assert_same(plain, split, **CLOSE)
    assert split_logged["loss_epoch"] == pytest.approx(logged["loss_epoch"])


def test_a_scaler_of_lightning_in_float16() -> None:
    torch.set_default_dtype(torch.float32)
    amp = importlib.import_module("lightning.pytorch.plugins.precision.amp")

    def mixed() -> Any:
        # So large a loss scale that gradients without it are nothing in float16.
        return amp.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))

    def make(base: type) -> Any:
        class Small(type(lit(base))):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return {"loss": super().training_step(batch, batch_idx)["loss"] * 1e-6}

        return Small()

    settings = {"precision": None, "loaded": in_single_precision}
    plain, _ = train_lightning(PACKAGES[0], make, [], plugins=[mixed()], **settings)
    split, _ = train_lightning(PACKAGES[0], make, parts("Lightning", 2), plugins=[mixed()], **settings)
    assert all(gradient.abs().max() > 0 for step in plain.gradients for gradient in step.values())
    assert_same(plain, split, rtol=2e-2, atol=1e-9)


def in_single_precision(rows: list[Any]) -> list[torch.Tensor]:
    """Rows of the examples as a batch."""
    values, classes = zip(*rows, strict=True)
    return [torch.stack(values).float(), torch.stack(classes)]


def test_nothing_is_left_on_the_framework_and_a_session_is_undone() -> None:
    strategy = importlib.import_module("lightning.pytorch.strategies.strategy").Strategy
    before = strategy.training_step
    made: list[Any] = []

    def make(base: type) -> Any:
        made.append(lit(base))
        return made[-1]

    train_lightning(PACKAGES[0], make, [])
    module, own = made[0], set(vars(made[0]))
    with attached([]):
        assert strategy.training_step is before  # no choice concerns it
    session = Session(model=module, optimizers=(), loop=module)
    apply_to(session, parts("Lightning", 2))
    assert "training_step" in vars(module)
    session.undo()
    assert set(vars(module)) == own
    train_lightning(PACKAGES[0], make, parts("Lightning", 2))
    assert strategy.training_step is before


def test_a_batch_of_lists_dicts_and_strings() -> None:
    def loaded(rows: list[Any]) -> dict[str, Any]:
        values, classes = zip(*rows, strict=True)
        return {"pair": [torch.stack(values), torch.stack(classes)], "names": [str(len(values))] * len(values), "n": 3}

    plain, _ = train_lightning(PACKAGES[0], lit, [], loaded=loaded)
    split, _ = train_lightning(PACKAGES[0], lit, parts("Lightning", 2), loaded=loaded)
    assert_same(plain, split, **CLOSE)


def test_a_step_that_counts_its_calls_is_refused() -> None:
    def make(base: type) -> Any:
        module = lit(base)
        step = type(module).training_step
        module.num_steps = 0

        def counting(self: Any, batch: Any, batch_idx: int) -> Any:
            self.num_steps += 1
            return step(self, batch, batch_idx)

        type(module).training_step = counting
        return module

    with pytest.raises(
        ApplyError, match=r"Lit\.num_steps was changed in a forward, which would happen once for each part"
    ):
        train_lightning(PACKAGES[0], make, parts("Lightning", 2), max_epochs=1)


def test_a_copy_of_the_module_trains_itself() -> None:
    made: list[Any] = []

    def first(base: type) -> Any:
        made.append(lit(base))
        return made[-1]

    train_lightning(PACKAGES[0], first, parts("Lightning", 2))
    before = copy.deepcopy(made[0].state_dict())
    other, plain = copy.deepcopy(made[0]), lit(importlib.import_module(PACKAGES[0]).LightningModule)
    plain.load_state_dict(before)
    expected, _ = train_lightning(PACKAGES[0], lambda _: plain, [])
    found, _ = train_lightning(PACKAGES[0], lambda _: other, parts("Lightning", 2))
    assert_same(expected, found, **CLOSE)
    torch.testing.assert_close(made[0].state_dict(), before, rtol=0, atol=0)


def test_what_looks_at_gradients_before_they_are_dropped_sees_them() -> None:
    seen: list[list[torch.Tensor]] = []

    def make(base: type) -> Any:
        class Looking(type(lit(base))):  # type: ignore[misc]
            def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
                seen.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

        return Looking()

    train_lightning(PACKAGES[0], make, [])
    train_lightning(PACKAGES[0], make, parts("Lightning", 2))
    plain, split = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert sum(map(len, plain)) == 20  # at all but the first of six steps, four parameters have gradients
    torch.testing.assert_close(split, plain, **CLOSE)


@pytest.mark.parametrize("beside", [[], [choice("checkpointing", "Measured.net")]], ids=["alone", "recomputed"])
def test_metrics_have_seen_each_example_once(beside: list[Choice]) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def make(base: type) -> Any:
        class Measured(type(lit(base))):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=NUM_CLASSES, ignore_index=-100)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                output = super().training_step(batch, batch_idx)
                self.accuracy(output["scores"].flatten(0, 1), batch[1].flatten())
                self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
                return output

        return Measured()

    _, logged = train_lightning(PACKAGES[0], make, [])
    _, split = train_lightning(PACKAGES[0], make, [*parts("Lightning", 2), *beside])
    assert split["accuracy"] == pytest.approx(logged["accuracy"])


def test_what_a_hook_changes_before_the_backward_pass_and_a_second_run_would_read_is_refused() -> None:
    """Lightning's own notes on the module, which change too, are not."""

    def make(base: type) -> Any:
        class Scaled(type(lit(base))):  # type: ignore[misc]
            scale = 1.0

            def on_before_backward(self, loss: torch.Tensor) -> None:
                self.scale = 2.0

        return Scaled()

    chosen = [*parts("Lightning", 2), choice("checkpointing", "Scaled.net")]
    with pytest.raises(ApplyError, match=r"Scaled\.scale was changed between forward and backward"):
        train_lightning(PACKAGES[0], make, chosen)


class _Normalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 15), nn.Unflatten(1, (3, NUM_CLASSES)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"net": _Normalised}, "batch norm in training"),
        ({"net": lambda: nn.Sequential(network(), nn.Dropout(0.3))}, "draws random numbers"),
        ({"automatic_optimization": lambda: False}, "manual optimization"),
        ({"add": lambda: 0.5}, "not one mean or sum over the batch"),
    ],
)
def test_what_parts_cannot_stand_for_is_refused_before_anything_is_trained(
    changes: dict[str, Any], reason: str
) -> None:
    made: list[Any] = []

    def make(base: type) -> Any:
        class Changed(type(lit(base))):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                output = super().training_step(batch, batch_idx)
                return (
                    {"loss": output["loss"] + vars(self).get("add", 0) * output["loss"].square()}
                    if "add" in changes
                    else output
                )

        made.append(Changed())
        for name, value in changes.items():
            setattr(made[0], name, value())
        return made[0]

    with pytest.raises(ApplyError, match=reason):
        train_lightning(PACKAGES[0], make, parts("Lightning", 2))
    assert all(p.grad is None for p in made[0].parameters())
    assert not made[0].trainer.global_step


def test_dropout_is_taken_where_it_is_allowed() -> None:
    def make(base: type) -> Any:
        module = lit(base)
        module.net.append(nn.Dropout(0.1))
        return module

    plain, _ = train_lightning(PACKAGES[0], make, [])
    split, _ = train_lightning(PACKAGES[0], make, parts("Lightning", 2, draws_anew=True))
    assert split.losses != plain.losses
    assert split.losses == pytest.approx(plain.losses, rel=0.5)


def _own_loss(base: type) -> type:
    class OwnLoss(base):  # type: ignore[misc,valid-type]
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(inputs["values"])
            loss = score_loss(outputs["logits"], inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return OwnLoss


def _sum_over_items(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    loss = score_loss(outputs["logits"], labels, reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"trainer_class": _own_loss},
        {"compute_loss_func": _sum_over_items},
        {"label_smoothing_factor": 0.1},
    ],
    ids=["own compute_loss", "compute_loss_func", "label smoother"],
)
def test_the_trainer_steps_with_the_same_gradients(settings: Any, accumulation: int, tmp_path: Path) -> None:
    settings |= {"gradient_accumulation_steps": accumulation}
    plain, _ = train_trainer(tmp_path, [], **settings)
    split, trainer = train_trainer(tmp_path, parts("Trainer", 2), **settings)
    assert len(plain.gradients) == (6 if accumulation == 1 else 4)
    # The label smoother adds up in float32, whatever the scores are.
    assert_same(plain, split, **({"rtol": 1e-6, "atol": 1e-7} if "label_smoothing_factor" in settings else CLOSE))
    assert trainer.args.per_device_train_batch_size == 5


def test_the_trainer_makes_its_model_anew(tmp_path: Path) -> None:
    def again(base: type) -> type:
        class Again(_own_loss(base)):  # type: ignore[misc]
            def train(self) -> Any:
                super().train()
                torch.manual_seed(7)
                self.model = self.model_wrapped = Scores()
                self.optimizer = self.lr_scheduler = None
                return super().train()

        return Again

    plain, first = train_trainer(tmp_path, [], trainer_class=again)
    split, second = train_trainer(tmp_path, parts("Trainer", 2), trainer_class=again)
    assert len(plain.gradients) == 12
    assert_same(plain, split, **CLOSE)
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), **CLOSE)


def test_the_trainer_with_dropout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="draws random numbers"):
        train_trainer(tmp_path, parts("Trainer", 2), make=lambda: Scores(dropout=0.2), trainer_class=_own_loss)


def test_a_loop_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ApplyError, match="nothing to put it on at batch"):
        train_trainer(tmp_path, parts("Lightning", 2), trainer_class=_own_loss)
