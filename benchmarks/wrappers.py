"""What techniques cost the processor in each step: 12 small Llama layers, processor time of a step, all ways in turn in one process.

    python -m benchmarks.wrappers [--steps 30] [--only checkpointing]

A card is as fast as what the processor hands it; the layers are so small that little else is measured. Beside each technique stands what torch has for the
same, where it has something. `as on a card`: nothing is read at once, what a block saves last is summed (`effects.card_sums`), and no call is watched. The last
column is what `cost.host_python` needs: seconds beyond the plain step, and beyond the forwards that are run again, by block, parameter or part.
"""

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.effects.values import card_sums, contents
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.micro_batches import split_forward
from tightfit.techniques.micro_batches.saved_by_parts import SavedByParts
from tightfit.techniques.recomputation import recompute
from tightfit.techniques.registry import technique
from tightfit.techniques.tiling import tile_function

NUM_LAYERS = 12
NUM_TILES = 4
_WARM_UP = 10
_CARD = "RTX 4090"
TECHNIQUES = (
    "checkpointing",
    "selective_checkpointing",
    "nested_checkpointing",
    "offloaded_checkpointing",
    "activation_offload",
    "update_in_backward",
    "optimizer_offload",
    "trained_weight_streaming",
    "micro_batches",
    "chunked_loss",
    "tiled_tokens",
)
Step = Callable[[], None]


def _model(device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train().to(device)


def workload(num_rows: int = 2) -> Iterator[torch.Tensor]:
    """The same on the card of the machine, for the options of techniques."""
    model = _model("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        ids = torch.randint(0, 64, (num_rows, 8), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def chosen(name: str, profile: Profile) -> list[Option]:
    """What a technique offers for the layers, or for all of the model."""
    options = list(technique(name).options(profile))
    layers = [option for option in options if option.where.rpartition(".")[2].isdecimal()]
    found: list[Option] = []
    taken: set[str] = set()
    for option in layers or options:
        if not taken & option.slots:
            found.append(option)
            taken |= option.slots
    return found


def training(choices: Sequence[Choice] = (), way_of_torch: str = "") -> Step:
    """A step of the model, plain, with choices, or with what torch has."""
    model = _model("cpu")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    contexts: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    num_parts = 1
    if way_of_torch == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif way_of_torch == "activation_offload":
        contexts = torch.autograd.graph.save_on_cpu
    elif way_of_torch == "update_in_backward":
        optimizer = None
        for parameter in model.parameters():
            own = torch.optim.AdamW([parameter], lr=1e-3)
            parameter.register_post_accumulate_grad_hook(functools.partial(_update, own))
    elif way_of_torch == "micro_batches":
        num_parts = 2
    elif way_of_torch == "tiled_tokens":
        for module in model.modules():
            if type(module).__name__ in ("LlamaMLP", "LlamaRMSNorm"):
                module.forward = functools.partial(_in_tiles, module.forward)
    if choices:
        apply_choices(list(choices), model, [optimizer])
    ids = torch.randint(0, 64, (2, 8))

    def step() -> None:
        for part in ids.chunk(num_parts):
            with contexts():
                loss = model(input_ids=part, labels=part).loss / num_parts
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _in_tiles(forward: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in rows.chunk(NUM_TILES, dim=1)], dim=1)


def _update(optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def milliseconds(steps: Sequence[Step], num_steps: int) -> list[float]:
    """The median of each over the steps after the first ones, which are checked; in turn, as the machine's speed changes."""
    found: list[list[float]] = [[] for _ in steps]
    for number in range(_WARM_UP + num_steps):
        for times, step in zip(found, steps, strict=True):
            begin = time.process_time()
            step()
            if number >= _WARM_UP:
                times.append(1e3 * (time.process_time() - begin))
    return [*map(statistics.median, found)]


# Functions, as a mock takes longer than what it stands for.
def _nothing(_: torch.Tensor) -> None:
    return None


def _unwatched(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _not_walked(*_: object) -> None:
    return None


@contextlib.contextmanager
def as_on_a_card() -> Iterator[None]:
    """Tensors at the host are looked at as those on a card are."""
    with (
        mock.patch.object(contents, "_place_of", _nothing),
        mock.patch.object(card_sums, "DEVICE_TYPES", ("cpu",)),
        # On a card calls are watched in the first steps alone.
        mock.patch.object(recompute, "without_outside_calls", _unwatched),
        mock.patch.object(split_forward, "without_outside_calls", _unwatched),
        # Nor are operators looked at beside the functions that call them.
        mock.patch.object(split_forward, "operators_at", _unwatched),
        mock.patch.object(tile_function, "operators_at", _unwatched),
        # And the graphs of parts are walked in those.
        mock.patch.object(SavedByParts, "add", _not_walked),
    ):
        yield


def choice_of(option: Option) -> Choice:
    """The option as a plan has it."""
    return Choice(
        technique=option.technique,
        where=option.where,
        settings=option.settings,
        saves_bytes=0,
        adds_seconds=option.seconds,
        exact=option.exact,
    )


OF_TORCH = ("checkpointing", "activation_offload", "update_in_backward", "micro_batches", "tiled_tokens")


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=TECHNIQUES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = GeneratorFunction(location=__file__, function="workload", parameters={})
    profile = Profile(trace(target, label="layers", device=_CARD, num_steps=2).tape, find(_CARD))
    print(f"{'processor time of a step, ms':28} {'plain':>7} {'torch':>7} {'ours':>7} {'ours/torch':>10} {'places':>7}")
    for name in [arguments.only] if arguments.only else TECHNIQUES:
        options = chosen(name, profile)
        if not options:
            print(f"{name:28} not offered")
            continue
        with as_on_a_card():
            steps = [training(), training([choice_of(option) for option in options])]
            steps += [training(way_of_torch=name)] if name in OF_TORCH else []
            plain, ours, *torchs = milliseconds(steps, arguments.steps)
        beside = f"{torchs[0]:7.1f} {ours:7.1f} {ours / torchs[0]:10.2f}" if torchs else f"{'':7} {ours:7.1f} {'':10}"
        print(f"{name:28} {plain:7.1f} {beside} {len(options):7d}", flush=True)
    if arguments.only in (None, "checkpointing"):
        steps = [training(), training([choice_of(option) for option in chosen("checkpointing", profile)])]
        plain, ours = milliseconds(steps, arguments.steps)
        print(f"{'checkpointing, at the host':28} {plain:7.1f} {'':7} {ours:7.1f}")


if __name__ == "__main__":
    main()
