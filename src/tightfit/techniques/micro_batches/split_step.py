"""Runs the step of a framework's training loop over micro-batches: Lightning's `training_step`, the Trainer's `compute_loss`.

Both take a batch and return its loss, on which the framework calls `backward`; so `SplitForward` works for them as for a model that returns its
loss, whatever the model returns. The loader, its sampler, the number of batches, the accumulation and the clipping of the framework stay the
same: it sees one batch, one loss and one backward pass.
"""

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.effects.values.value_checks import has_values
from tightfit.errors import ApplyError
from tightfit.techniques.micro_batches.loaded_batch import LoadedBatch, num_examples
from tightfit.techniques.micro_batches.logged_parts import LoggedParts
from tightfit.techniques.micro_batches.loss_means import Term, active_watch
from tightfit.techniques.micro_batches.split_forward import WRAPPERS, SplitForward
from tightfit.techniques.session import Session
from tightfit.techniques.wrappers.first_order import Refuse

Step = Callable[..., Any]

# The name of the hook that runs, which Lightning sets around each; `log` reads it.
# Source: `_call_lightning_module_hook` of lightning/pytorch/trainer/call.py.
_OF_LIGHTNING = frozenset({"_current_fx_name"})


def split_step(
    session: Session,
    framework: str,
    num_parts: int,
    *,
    allows_randomness: bool,
    counted: Callable[[], None],
    refuse: Refuse,
) -> None:
    """Wraps the method of `session.loop` that computes the loss of a batch.

    Raises:
        ApplyError: the loop compiles the step, or runs its losses backwards by itself.
    """
    loop = session.loop
    # Where each framework keeps its GradScaler: Lightning's MixedPrecision plugin, and the Trainer's
    # Accelerator.
    holder = loop.trainer.precision_plugin if framework == "Lightning" else loop.accelerator
    scaler = getattr(holder, "scaler", None)
    splits = functools.partial(
        SplitForward,
        num_parts=num_parts,
        allows_randomness=allows_randomness,
        counted=counted,
        refuse=refuse,
        check_steps=session.check_steps,
        batch_of=LoadedBatch,
        scaled=None if scaler is None else scaler.scale,
    )
    if framework == "Lightning":
        if not loop.automatic_optimization:
            raise ApplyError("the training step calls backward itself (manual optimization); leave micro_batches out")
        if loop._compiler_ctx is not None:
            raise ApplyError("the training step is compiled as a whole; leave micro_batches out")
        session.set(loop, "training_step", _TrainingStep(loop, splits))
        return
    if loop.label_smoother is not None:
        session.set(loop, "label_smoother", _watched(loop.label_smoother))
    session.set(loop, "compute_loss", _in_parts_of_trainer(loop.compute_loss, splits))


class _TrainingStep:
    """The `training_step` of a LightningModule. A copy of the module, or one that is unpickled, has its own plain step."""

    def __init__(self, module: Any, splits: Callable[..., SplitForward]) -> None:
        self._module = module
        self._step = module.training_step
        self._logged = logged = LoggedParts(module)
        self._split = splits(
            module, unseen=lambda: _unseen(module, logged), forget=logged.forget, of_loop=_OF_LIGHTNING
        )
        functools.update_wrapper(self, self._step, updated=())

    def __call__(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._step(batch, *rest, **kwargs)

        def of_part(part: Any) -> Any:
            output = self._step(part, *rest, **kwargs)
            self._logged.end_part(_loss(output), num_examples(part))
            return output

        _drop_gradients(self._module)
        with self._logged.gathered():
            output = self._split(of_part, batch)
        self._logged.hand_over(_loss(output))
        # What is logged, and the methods that gathered it, are of the step.
        self._split.end_forward()
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        module = copy.deepcopy(self._module, memo)
        return types.MethodType(type(module).training_step, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return (functools.partial, (type(self._module).training_step, self._module))


def _drop_gradients(module: Any) -> None:
    """Calls Lightning's own `zero_grad` early: it comes after the step and before the backward pass, and here the step makes the gradients.

    Source: `Closure` and `_make_zero_grad_fn` of lightning/pytorch/loops/optimization/automatic.py.
    """
    trainer = module.trainer
    # Only before the first batch of an accumulation, and only if nothing of the user's runs at that time: then
    # nobody sees that the gradients went earlier.
    is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
    hooks = [module.optimizer_zero_grad, *(owner.on_before_zero_grad for owner in (module, *trainer.callbacks))]
    if is_first and all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks):
        module.optimizers(use_pl_optimizer=False).zero_grad()


def _in_parts_of_trainer(compute: Step, splits: Callable[..., SplitForward]) -> Step:
    split: SplitForward | None = None

    @functools.wraps(compute)
    def compute_loss(model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
        nonlocal split
        if not torch.is_grad_enabled():
            return compute(model, inputs, *rest, **kwargs)
        # The Trainer makes a new model for each trial of a search.
        if split is None or split.model is not model:
            if type(model).__name__ in WRAPPERS or model._compiled_call_impl is not None:
                raise ApplyError(
                    "the Trainer calls the model compiled or on several cards, which would not be called for the "
                    "parts of a batch; leave micro_batches out"
                )
            split = splits(model)
        return split(lambda part: compute(model, part, *rest, **kwargs), inputs)

    return compute_loss


def _loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _watched(smoother: Any) -> Step:
    """Wraps the Trainer's label smoother as a loss function with a known number of terms: the labels that count, or those of the whole batch.

    Source: `LabelSmoother` of transformers/trainer_pt_utils.py.
    """

    @functools.wraps(smoother, updated=())
    def smoothed(outputs: Any, labels: torch.Tensor, shift_labels: bool = False, **kwargs: Any) -> torch.Tensor:
        watch = active_watch()
        run = _called if watch is None else watch.run
        loss = run(smoother, outputs, labels, shift_labels=shift_labels, **kwargs)
        if watch is not None:
            counting = labels[..., 1:] if shift_labels else labels
            is_sum = kwargs.get("num_items_in_batch") is not None
            term = Term(
                loss=loss,
                num_terms=None if is_sum else (counting != smoother.ignore_index).sum(),
                max_terms=max(1, counting.numel()),
                is_contrastive=False,
            )
            logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
            watch.noted(term, {"input": logits.movedim(-1, 1), "target": labels}, is_of_classes=True)
        return loss

    return smoothed


def _called(function: Step, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@contextmanager
def _unseen(module: torch.nn.Module, logged: LoggedParts) -> Iterator[None]:
    """Runs a block without side effects on the module: nothing is logged, no metric updated, no list grown."""
    kept = [(owner, _plain_state(vars(owner))) for owner in module.modules()]
    try:
        # A run for its decisions alone ends in the middle.
        with logged.muted():
            yield
    finally:
        for owner, state in kept:
            own = vars(owner)
            for name, (value, content) in state.items():
                if isinstance(value, list):
                    value[:] = content
                elif isinstance(value, dict):
                    value.clear()
                    value.update(content)
                elif isinstance(value, torch.Tensor):
                    _put_back(value, content)
                # The same object: others may hold it as well.
                own[name] = value


def _put_back(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Gives a tensor back the content that it had, if it has another one."""
    if not has_values(tensor) or (tensor.shape == content.shape and torch.equal(tensor, content)):
        return
    with torch.inference_mode(tensor.is_inference()):
        if tensor.shape == content.shape:
            tensor.data.copy_(content)
        else:
            tensor.data = content


def _plain_state(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Attributes that a step may change, such as the counters and sums of metrics, with copies of their contents."""
    kept: dict[str, tuple[Any, Any]] = {}
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            kept[name] = (value, value.detach().clone())
        elif isinstance(value, bool | int | float | None) and name != "training":
            kept[name] = (value, value)
        elif isinstance(value, list) or (isinstance(value, dict) and not name.startswith("_")):
            kept[name] = (value, value.copy())
    return kept
