"""What recomputation costs the processor: 12 small Llama layers, processor time of a step, in turn in one process.

    python -m benchmarks.recomputation [--steps 30]

A card is as fast as what the processor hands it; the layers are so small that little else is measured. `as on a card`: nothing is read at once, what a
block saves last is summed (`effects.card_sums`), and no call is watched.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.effects import card_sums, contents
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.recomputation import recompute

NUM_LAYERS = 12
_WARM_UP = 8


def training(way: str) -> Callable[[], None]:
    """A step of the model, plain, with torch's checkpoints, or with ours."""
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
    model = LlamaForCausalLM(config).train()
    if way == "torch's checkpoints":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    places = [f"LlamaForCausalLM.model.layers.{number}" for number in range(NUM_LAYERS)]
    if way.startswith("ours"):
        choices = [
            Choice(technique="checkpointing", where=place, settings={}, saves_bytes=0, adds_seconds=0.0, exact=True)
            for place in places
        ]
        apply_choices(choices, model, [optimizer])
    ids = torch.randint(0, 64, (1, 8))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(step: Callable[[], None], num_steps: int) -> float:
    """The median over the steps after the first ones, which are checked."""
    found = []
    for _ in range(_WARM_UP + num_steps):
        begin = time.process_time()
        step()
        found.append(1e3 * (time.process_time() - begin))
    return statistics.median(found[_WARM_UP:])


# Functions, as a mock takes longer than what it stands for.
def _nothing(_: torch.Tensor) -> None:
    return None


def _unwatched(*_: object, **__: object) -> AbstractContextManager[None]:
    return nullcontext()


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)
    for way in ("plain", "torch's checkpoints", "ours, at the host"):
        print(f"{way:22} {milliseconds(training(way), num_steps):6.1f} ms a step", flush=True)
    with (
        mock.patch.object(contents, "_place_of", _nothing),
        mock.patch.object(card_sums, "DEVICE_TYPES", ("cpu",)),
        # On a card calls are watched in the first steps alone.
        mock.patch.object(recompute, "without_outside_calls", _unwatched),
    ):
        print(f"{'ours, as on a card':22} {milliseconds(training('ours'), num_steps):6.1f} ms a step", flush=True)


if __name__ == "__main__":
    main()
