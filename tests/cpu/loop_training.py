"""Trains small models in the loops of Lightning and of the Trainer, on the host, plain and with choices on the loop."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.cpu.module_training import Trained, choice
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tightfit.planner.plan import Choice
from tightfit.runtime.attach import Attachment

NUM_CLASSES = 5


def parts(loop: str, num_parts: int, *, draws_anew: bool = False) -> list[Choice]:
    """The batch in parts, through the loop; none for one part."""
    made = choice("micro_batches", "batch", num_parts=num_parts, draws_anew=draws_anew, loop=loop)
    return [made] if num_parts > 1 else []


def examples(num_examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers, and three classes for each, of which some are ignored: no two parts of a batch have as many targets."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(num_examples, 3, 8, generator=generator)
    classes = torch.randint(0, NUM_CLASSES, (num_examples, 3), generator=generator)
    return values, classes.masked_fill(torch.rand(classes.shape, generator=generator) < 0.4, -100)


def network() -> nn.Sequential:
    """It returns scores and no loss."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, NUM_CLASSES))


def score_loss(scores: torch.Tensor, classes: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The mean over the targets that count."""
    return functional.cross_entropy(scores.flatten(0, 1), classes.flatten(), **settings)


@contextmanager
def attached(choices: Sequence[Choice]) -> Iterator[Attachment]:
    """What `tightfit run` does around a script."""
    attachment = Attachment(choices)
    end = attachment.install()
    try:
        yield attachment
        attachment.report()
    finally:
        end()


def train_lightning(
    package: str,
    make: Callable[[type], Any],
    choices: Sequence[Choice],
    *,
    num_examples: int = 13,
    batch_size: int = 5,
    loaded: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> tuple[Trained, dict[str, float]]:
    """Two epochs of what `make` makes of the class LightningModule, whose last batch is incomplete; and what it has logged."""
    lightning = importlib.import_module(package)
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []

    class Keep(lightning.Callback):  # type: ignore[name-defined,misc]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradients.append({n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    torch.manual_seed(0)
    module = make(lightning.LightningModule)
    defaults = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    defaults |= {"enable_progress_bar": False, "enable_model_summary": False, "precision": "64-true"}
    trainer = lightning.Trainer(**defaults | settings, callbacks=[Keep()])
    data = TensorDataset(*examples(num_examples))
    with attached(choices):
        trainer.fit(module, DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=loaded))
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    return Trained(losses=losses, gradients=gradients, state=dict(module.state_dict())), logged


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The examples as the Trainer wants them."""

    def __init__(self, num_examples: int) -> None:
        self._values, self._classes = examples(num_examples)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"values": self._values[index], "labels": self._classes[index]}


class Scores(nn.Module):
    """A model that returns scores for its loop to compute a loss of."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.network, self.dropout = network(), nn.Dropout(dropout)
        self.config = SimpleNamespace(problem_type=None, pad_token_id=None, bos_token_id=None, eos_token_id=None)

    def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.dropout(self.network(values))}


def train_trainer(
    folder: Path,
    choices: Sequence[Choice],
    *,
    trainer_class: Callable[[type], type] = lambda base: base,
    make: Callable[[], nn.Module] = Scores,
    compute_loss_func: Any = None,
    num_examples: int = 13,
    **settings: Any,
) -> tuple[Trained, Any]:
    """Two epochs of the Trainer, whose last batch is incomplete; and the trainer."""
    transformers = importlib.import_module("transformers")
    gradients: list[dict[str, torch.Tensor]] = []

    class Keep(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    torch.manual_seed(0)
    model = make()
    defaults = {"per_device_train_batch_size": 5, "num_train_epochs": 2, "use_cpu": True, "report_to": "none"}
    defaults |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **defaults | settings)
    trainer = trainer_class(transformers.Trainer)(
        model=model,
        args=arguments,
        train_dataset=Rows(num_examples),
        callbacks=[Keep()],
        compute_loss_func=compute_loss_func,
    )
    with attached(choices):
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(losses=losses, gradients=gradients, state=dict(model.state_dict())), trainer
