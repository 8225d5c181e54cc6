"""Libraries that ask gradients for their class, or whether they are there, read nothing; programs that do, and libraries that keep them, are readers."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from tests.cpu.module_training import choice
from torch.distributed.tensor import DTensor
from transformers import trainer_optimizer

from tightfit.capture.steps.effects.looks_at_gradients import is_only_a_look
from tightfit.capture.targets.target_kinds import GeneratorFunction, Script
from tightfit.capture.trace import trace
from tightfit.runtime.apply import apply_choices
from tightfit.tape import EffectKind

_ACCELERATE = str(Path(accelerate.__file__).with_name("accelerator.py"))
_TRAINER = str(Path(transformers.__file__).with_name("trainer.py"))
_CLIPS = """
def clips(parameters):
    found = []
    for p in parameters:
        if p.grad is None:
            continue
        if isinstance(p.grad, DTensor):
            found.append(p)
    return found
"""
_MESHES = "def meshes(parameters): return has_mixed_dtensor(p.grad for p in parameters if p.grad is not None)"


class _Asked:
    """Something with a gradient, which notes whether a read of it was only a look."""

    def __init__(self) -> None:
        self.looks: list[bool] = []

    @property
    def grad(self) -> object:
        """An object that is no tensor."""
        self.looks.append(is_only_a_look(sys._getframe(1)))
        return object()


def _looks(source: str, name: str, file: str, **names: Any) -> set[bool]:
    names |= {"DTensor": DTensor, "has_mixed_dtensor": trainer_optimizer.has_mixed_dtensor}
    exec(compile(source, file, "exec"), names)
    asked = _Asked()
    names[name]([asked])
    assert asked.looks
    return set(asked.looks)


def test_what_libraries_ask_before_they_clip_is_a_look() -> None:
    assert _looks(_CLIPS, "clips", _ACCELERATE) == {True}
    assert _looks(_MESHES, "meshes", _TRAINER) == {True}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (
            _CLIPS.replace("found.append(p)", "found.append(p.grad)").replace(
                "if isinstance(p.grad, DTensor)", "if True"
            ),
            "clips",
        ),
        (_CLIPS.replace("DTensor", "kinds"), "clips"),
        (_CLIPS.replace("isinstance(p.grad, DTensor)", "kept(p.grad, DTensor)"), "clips"),
        (_MESHES.replace("has_mixed_dtensor(", "list("), "meshes"),
        (_MESHES.replace("p.grad for", "(p.grad, p.name) for").replace("p.name", "kinds"), "meshes"),
    ],
)
def test_libraries_that_take_something_of_gradients_read_them(source: str, name: str) -> None:
    assert False in _looks(source, name, _ACCELERATE, kinds=DTensor, kept=lambda *_: False)


def test_a_programs_own_look_is_a_read(tmp_path: Path) -> None:
    assert _looks(_CLIPS, "clips", str(tmp_path / "train.py")) == {False}
    assert _looks(_MESHES, "meshes", str(tmp_path / "train.py")) == {False}


@pytest.mark.parametrize("clips", [False, True])
def test_a_look_finds_the_same_where_updates_are_made_in_the_backward_pass(*, clips: bool) -> None:
    found = []
    for choices in ([], [choice("update_in_backward", "optimizer", kernel="same", clips=clips)]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters())
        apply_choices(choices, model, [optimizer])
        for _ in range(2):
            # The last layer gets no gradient.
            model[:2](torch.ones(3, 4)).sum().backward()
            found.append([(p.grad is None, isinstance(p.grad, DTensor)) for p in model.parameters()])
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert found == [[(False, False)] * 4 + [(True, False)] * 2] * 4


def accelerated() -> Iterator[torch.Tensor]:
    """A loop of accelerate's that clips."""
    accelerator = accelerate.Accelerator()
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    while True:
        loss = model(torch.ones(4, 8, device="cuda")).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.by_turns(2)
def test_clipping_of_accelerate_and_of_the_trainer_has_no_readers() -> None:
    trainer = Path(__file__).parents[2] / "examples" / "trainer_llama.py"
    sizes = [
        "--hidden-size",
        "128",
        "--num-layers",
        "1",
        "--batch-size",
        "2",
        "--sequence-length",
        "32",
        "--steps",
        "3",
    ]
    for target in (
        GeneratorFunction(location=__file__, function="accelerated", parameters={}),
        Script(path=str(trainer), arguments=tuple(sizes)),
    ):
        tape = trace(target, label="clips", device="RTX 4090", with_effects=True).tape
        assert EffectKind.GRADIENT not in {effect.kind for effect in tape.effects}
