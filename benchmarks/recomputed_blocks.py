"""What recomputation costs the processor by kind of block: small blocks of nine models, with and without wrappers, in turn in one process.

    python -m benchmarks.recomputed_blocks [--steps 25] [--selective]

Beside each: its modules, the tensors that it saves for backward, the milliseconds of a call beyond the plain step and beyond the forward that is run
again, looked at as on a card (`benchmarks.wrappers`), and what `cost.host_python` says. Both are for a processor on which `reference_work` takes as
long as where its constants were measured.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.wrappers import as_on_a_card
from tightfit.cost.host_python import REFERENCE_SECONDS, HostWork, reference_work
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices

_WARM_UP = 8
_NUM_LAYERS = 4


def _llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=_NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            use_cache=False,
        )
    )


def _adapted(*names: str) -> nn.Module:
    return get_peft_model(_llama(), LoraConfig(r=2, target_modules=list(names), task_type="CAUSAL_LM"))


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=_NUM_LAYERS, n_head=2, n_positions=32, use_cache=False)
    )


def _bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=_NUM_LAYERS,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        )
    )


class _Blocks(nn.Module):
    """Residual blocks of these layers, with the call of the others."""

    def __init__(self, *layers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(make() for make in layers)) for _ in range(_NUM_LAYERS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        rows = torch.ones(*input_ids.shape, 32)
        for block in self.blocks:
            rows = rows + block(rows)
        return argparse.Namespace(loss=rows.square().mean())


def _linear() -> nn.Module:
    return nn.Linear(32, 32)


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Llama layer, 7 adapters": (
        lambda: _adapted("q_proj", "v_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        r"layers\.\d+$",
    ),
    "Llama layer, 2 adapters": (lambda: _adapted("q_proj", "v_proj"), r"layers\.\d+$"),
    "Llama layer": (_llama, r"layers\.\d+$"),
    "its network": (_llama, r"layers\.\d+\.mlp$"),
    "its attention": (_llama, r"self_attn$"),
    "GPT-2 block": (_gpt2, r"h\.\d+$"),
    "BERT layer": (_bert, r"layer\.\d+$"),
    "BERT encoder": (_bert, r"bert\.encoder$"),
    "Llama, all layers": (_llama, r"^model$"),
    "two layers": (lambda: _Blocks(_linear, nn.GELU), r"blocks\.\d+$"),
    "40 layers": (lambda: _Blocks(*[_linear, nn.GELU] * 20), r"blocks\.\d+$"),
    "two, and 80 that do nothing": (lambda: _Blocks(_linear, nn.GELU, *[nn.Identity] * 80), r"blocks\.\d+$"),
}
IDS = torch.arange(16).reshape(2, 8)


class _Case:
    """A model with the blocks that are recomputed."""

    def __init__(self, make: Callable[[], nn.Module], pattern: str, technique: str = "") -> None:
        torch.manual_seed(0)
        self.model = make().train()
        self.blocks = {name: block for name, block in self.model.named_modules() if re.search(pattern, name)}
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        if technique:
            root, settings = type(self.model).__name__, {"keep": [0, 1, 2]} if technique.startswith("sel") else {}
            choices = [
                Choice(
                    technique=technique,
                    where=f"{root}.{name}",
                    settings=settings,
                    saves_bytes=0,
                    adds_seconds=0.0,
                    exact=True,
                )
                for name in self.blocks
            ]
            apply_choices(choices, self.model, [self.optimizer])

    def step(self) -> None:
        self.model(input_ids=IDS, labels=IDS).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def num_saved(self) -> float:
        """Tensors that a block saves."""
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(1), t)[1], lambda t: t):
            counts: list[int] = []
            for block in self.blocks.values():
                block.register_forward_pre_hook(lambda *_: counts.append(-len(saved)))
                block.register_forward_hook(lambda *_: counts.append(len(saved)))
            self.step()
        return sum(counts) / len(self.blocks)

    def forward_seconds(self) -> Callable[[], float]:
        """A function that runs the model and says how long its blocks took."""
        spent = 0.0

        def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal spent
                begin = time.process_time()
                result = forward(*args, **kwargs)
                spent += time.process_time() - begin
                return result

            return run

        for block in self.blocks.values():
            setattr(block, "forward", timed(block.forward))  # noqa: B010 - a method, for a type checker

        def measure() -> float:
            nonlocal spent
            spent = 0.0
            self.model(input_ids=IDS, labels=IDS)
            return spent

        return measure


def _seconds_of(run: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        begin = time.process_time()
        run()
        return time.process_time() - begin

    return measure


def _medians(measures: Sequence[Callable[[], float]], num_steps: int) -> list[float]:
    found = [[measure() for measure in measures] for _ in range(_WARM_UP + num_steps)][_WARM_UP:]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def main() -> None:
    """Prints a line for each kind of block."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--selective", action="store_true", help="blocks keep the results of their first products")
    arguments = parser.parse_args()
    technique = "selective_checkpointing" if arguments.selective else "checkpointing"
    of_tensor = HostWork.RECOMPUTED_TENSOR.value + arguments.selective * HostWork.SELECTED_TENSOR.value
    torch.set_num_threads(1)
    print(f"{'of a call, ms':28} {'modules':>7} {'saved':>6} {'measured':>9} {'priced':>7} {'measured/priced':>15}")
    with as_on_a_card():
        for name, case in CASES.items():
            plain, recomputed, timed = _Case(*case), _Case(*case, technique), _Case(*case)
            factor = min(_seconds_of(reference_work)() for _ in range(50)) / REFERENCE_SECONDS
            measures = [_seconds_of(plain.step), _seconds_of(recomputed.step), timed.forward_seconds()]
            without, with_wrappers, forwards = _medians(measures, arguments.steps)
            num_calls, num_saved = len(plain.blocks), plain.num_saved()
            num_modules = sum(len([*block.modules()]) for block in plain.blocks.values()) // num_calls
            own = 1e3 * (with_wrappers - without - forwards) / num_calls / factor
            priced = 1e3 * (HostWork.RECOMPUTED_CALL.value + num_saved * of_tensor)
            print(
                f"{name:28} {num_modules:7d} {num_saved:6.0f} {own:9.2f} {priced:7.2f} {own / priced:15.2f}", flush=True
            )


if __name__ == "__main__":
    main()
