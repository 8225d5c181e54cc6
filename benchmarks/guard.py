"""Injected out-of-memory errors under `guard`: `python -m benchmarks.guard [--failures 200]`.

Six architectures train three steps each, plainly and guarded, with one error at a random operator of the guarded run: in the forward or the backward
pass, in clipping, in the optimizer's step or behind it. Losses, weights, optimizer states and the random state are compared to the bit. Then the time
of a guarded step without an error is compared with the plain one's, in turn, in one process.
"""

import argparse
import queue
import random
import statistics
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit

NUM_STEPS = 3


def _below_torch(method: types.FunctionType) -> Any:
    """The method as code of torch's: an allocator that fails is not the program's, and nothing that looks at the program's code may see it."""
    code = method.__code__.replace(co_filename=torch.__file__)
    return types.FunctionType(code, method.__globals__, method.__name__, method.__defaults__, method.__closure__)


class Failing(TorchDispatchMode):
    """Raises an out-of-memory error at those operators inside of `counting` that have these numbers."""

    # What is refused or left alone inside of a mode of the program's is not to be so here.
    __module__ = "torch.failing"

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        # The state of a step is taken back with it; these counts are to stay, and so are kept where guard does not look.
        self._operators: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._inside: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._numbers = set(numbers)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._inside.put(None)
        try:
            yield
        finally:
            self._inside.get()

    @_below_torch
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside.empty():
            return func(*args, **(kwargs or {}))
        self._operators.put(None)
        if self.num_operators in self._numbers:
            self._failures.put(None)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))

    @property
    @_below_torch
    def num_operators(self) -> int:
        return self._operators.qsize()

    @property
    def num_failures(self) -> int:
        return self._failures.qsize()


def _decoder() -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=200, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def _llama() -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
    )
    model = transformers.LlamaForCausalLM(config)
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def _encoder() -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=200
    )
    model = transformers.BertForMaskedLM(config)
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def _encoder_decoder() -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    import transformers

    config = transformers.T5Config(
        num_layers=2, d_model=64, d_kv=16, d_ff=128, num_heads=4, vocab_size=200, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def _convolutions() -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    nn = torch.nn
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16 * 16, 10),
        ),
    )
    return model, lambda ids: nn.functional.cross_entropy(
        model(ids.view(-1, 1, 8, 8) / 200.0), ids.view(-1, 64)[:, 0] % 10
    )


def _recurrent() -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    model = torch.nn.ModuleDict(
        {
            "table": torch.nn.Embedding(200, 32),
            "cell": torch.nn.LSTM(32, 32, num_layers=2, dropout=0.2, batch_first=True),
        }
    )
    return model, lambda ids: model["cell"](model["table"](ids))[0].square().mean()


ARCHITECTURES = {
    "GPT-2": (_decoder, torch.optim.AdamW),
    "Llama": (_llama, torch.optim.Adam),
    "BERT": (_encoder, torch.optim.NAdam),
    "T5": (_encoder_decoder, torch.optim.Adafactor),
    "convolutions": (_convolutions, torch.optim.RMSprop),
    "LSTM": (_recurrent, torch.optim.Adagrad),
}


class Training:
    """One of the architectures, with its optimizer and batches: the same from the same seed."""

    def __init__(self, name: str, *, num_steps: int = NUM_STEPS, batch_size: int = 4) -> None:
        torch.manual_seed(0)
        make, optimizer = ARCHITECTURES[name]
        self.model, self._loss = make()
        self.model.train()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        self.batches = list(torch.randint(0, 200, (num_steps, batch_size, 64)))

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One step, with clipping; its loss."""
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def result(self, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        """Losses, weights, optimizer states and the random state."""
        states = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*losses, *self.model.state_dict().values(), *states, torch.get_rng_state()]


def plain(name: str) -> tuple[list[torch.Tensor], int]:
    """The results of the plain run, and its number of operators."""
    training = Training(name)
    with Failing() as failing, failing.counting():
        losses = [training.step(batch) for batch in training.batches]
    return training.result(losses), failing.num_operators


def guarded(name: str, at: int) -> tuple[list[torch.Tensor], Counter[str]]:
    """The results of a guarded run with an error at the operator `at`."""
    training, failing = Training(name), Failing(at)

    def step(batch: torch.Tensor) -> torch.Tensor:
        with failing.counting():
            return training.step(batch)

    with tightfit.guard(training.model, training.optimizer) as guard, failing:
        losses = [guard.step(step, batch) for batch in training.batches]
    return training.result(losses), guard.statistics


def overhead(num_turns: int = 15) -> tuple[float, float, float]:
    """Processor seconds of a plain and of a guarded step of a larger GPT-2, and the median of their ratios, in turn."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=6, n_embd=384, n_head=6, vocab_size=8000, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 8000, (4, 256))

    def training() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
        model = transformers.GPT2LMHeadModel(config)
        # As torch does on a card.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

        def step() -> None:
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()

        return model, optimizer, step

    def seconds(run: Callable[[], object]) -> float:
        begun = time.process_time()
        run()
        return time.process_time() - begun

    _, _, plain_step = training()
    model, optimizer, step = training()
    pairs = []
    with tightfit.guard(model, optimizer) as guard:
        # What the first steps learn is not what a long run pays.
        for _ in range(3):
            plain_step()
            guard.step(step)
        for _ in range(num_turns):
            pairs.append((seconds(plain_step), seconds(lambda: guard.step(step))))
    return (
        statistics.median(p for p, _ in pairs),
        statistics.median(g for _, g in pairs),
        statistics.median(g / p for p, g in pairs),
    )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--failures", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    print(f"{'architecture':14} {'operators':>9} {'failures':>8} {'same':>5} {'replayed':>8} {'operator again':>14}")
    for number, name in enumerate(ARCHITECTURES):
        expected, num_operators = plain(name)
        count = options.failures // len(ARCHITECTURES) + (number < options.failures % len(ARCHITECTURES))
        places = [draw.randint(1, num_operators) for _ in range(count)]
        runs = [guarded(name, place) for place in places]
        num_same = sum(all(map(torch.equal, expected, found)) for found, _ in runs)
        again = [sum(statistic[what] for _, statistic in runs) for what in ("replays", "retried operators")]
        print(f"{name:14} {num_operators:9} {count:8} {num_same:5} {again[0]:8} {again[1]:14}", flush=True)
    plain_seconds, guarded_seconds, ratio = overhead()
    print(
        f"\na step of a GPT-2 of 6 layers: plain {1e3 * plain_seconds:.1f} ms, guarded {1e3 * guarded_seconds:.1f} ms, ratio {ratio:.4f} (median of 15, in turn)"
    )


if __name__ == "__main__":
    main()
