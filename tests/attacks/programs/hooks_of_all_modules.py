"""Hooks that the program has put on all modules at once (`register_module_full_backward_hook` and its kin)."""

from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Block, Images, Net, images, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn.modules import module as of_all


def _trained(t: Trial, model: nn.Module, batch: Callable[[int], Any], put: Callable[[], Any], begins: int) -> None:
    """The plain loop; `put` puts the hook on before step `begins`, and it is taken off at the end."""
    optimizer, handles = sgd(model), []
    t.apply(model, optimizer)
    try:
        for step in range(begins + 3):
            if step == begins:
                handles.append(put())
            loss = model(*batch(step))
            t.note("loss", loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.end_step()
    finally:
        for handle in handles:
            handle.remove()


def _halving(seen: list[float]) -> Callable[..., Any]:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if not isinstance(module, nn.Linear | nn.Conv2d):
            return None
        seen.append(float(outputs[0].abs().sum()))
        return tuple(None if each is None else each * 0.5 for each in inputs)

    return hook


@attack("gradients", "a backward hook on all modules logs gradients and halves those of layers' inputs")
def all_backward_hooked(t: Trial) -> None:
    seen: list[float] = []
    _trained(t, Net(), tokens, lambda: of_all.register_module_full_backward_hook(_halving(seen)), 0)
    t.note("seen", seen)


@attack("gradients", "a backward hook on all modules is put on at step 4")
def all_backward_hooked_late(t: Trial) -> None:
    seen: list[float] = []
    _trained(t, Net(), tokens, lambda: of_all.register_module_full_backward_hook(_halving(seen)), 3)
    t.note("seen", seen)


@attack("gradients", "a backward hook on all modules, of a chain of convolutions")
def all_backward_hooked_in_chain(t: Trial) -> None:
    seen: list[float] = []
    _trained(t, Images(), images, lambda: of_all.register_module_full_backward_hook(_halving(seen)), 0)
    t.note("seen", seen)


@attack("gradients", "a backward hook on all modules is put on at step 4, of a chain of convolutions")
def all_backward_hooked_in_chain_late(t: Trial) -> None:
    seen: list[float] = []
    _trained(t, Images(), images, lambda: of_all.register_module_full_backward_hook(_halving(seen)), 3)
    t.note("seen", seen)


@attack("recomputation", "a hook before the backward pass of all modules scales by how often it was called")
def all_backward_pre_hooked(t: Trial) -> None:
    seen: list[int] = []

    def hook(module: nn.Module, outputs: Any) -> Any:
        if not isinstance(module, nn.GELU | nn.LayerNorm | Block):
            return None
        seen.append(1)
        return tuple(None if each is None else each * (1 + 0.01 * len(seen)) for each in outputs)

    _trained(t, Net(), tokens, lambda: of_all.register_module_full_backward_pre_hook(hook), 1)
    t.note("seen", len(seen))


@attack("parts", "a forward hook on all modules scales what convolutions return by its largest number so far")
def all_forward_hooked_in_chain(t: Trial) -> None:
    largest = [1.0]

    def hook(module: nn.Module, _: Any, output: torch.Tensor) -> Any:
        if not isinstance(module, nn.Conv2d):
            return None
        largest[0] = max(largest[0], float(output.detach().abs().max()))
        return output / largest[0]

    _trained(t, Images(), images, lambda: of_all.register_module_forward_hook(hook), 2)
    t.note("largest", largest)


@attack("parts", "a hook before the forward of all modules counts pixels that convolutions are given, from step 3 on")
def all_forward_pre_hooked_in_chain(t: Trial) -> None:
    pixels = [0]

    def hook(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, nn.Conv2d):
            pixels[0] += inputs[0][0, 0].numel()

    _trained(t, Images(), images, lambda: of_all.register_module_forward_pre_hook(hook), 2)
    t.note("pixels", pixels)
