"""torchtune's ladder of techniques for one card, beside what plans of the same kinds of techniques are traced to need.

`python -m benchmarks.engine published`. The published rows (torchtune's README: Llama-3.2-3B, 2 x 4,096 tokens, packed, bfloat16, an A100 of 80 GB) add one technique each to the row before; from the
second on they are compiled, which a trace in eager mode is not. So ratios to the row before are compared. torchtune's chunks keep all logits, ours none.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.traffic import write_rows
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.simulate.peak import estimate_peak
from tightfit.tape import Tape
from tightfit.techniques.registry import technique
from tightfit.units import GIB

CARD = "A100 80GB"
NUM_TOKENS = 2 * 4096


def llama_3b() -> Iterator[Any]:
    """Llama-3.2-3B in bfloat16 with torch's fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    while True:
        ids = torch.randint(0, 128256, (2, 4096), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A row of the ladder: published GiB and tokens per second, and the technique that it adds, with the options of it that are taken."""

    name: str
    gib: float
    tokens_per_second: float
    technique: str = ""
    takes: Callable[[Option], bool] = lambda option: True
    replaces: str = ""


def _is_whole_block(option: Option) -> bool:
    return option.where.rpartition(".")[2].isdigit() and "keep" not in option.settings


# The row of compilation, 51.0 GiB and 8,998 tokens per second, is what the next one is compared with.
LADDER = (
    Rung(name="compiled", gib=51.0, tokens_per_second=8998),
    Rung(name="+ chunked cross entropy", gib=42.9, tokens_per_second=9174, technique="chunked_loss"),
    Rung(
        name="+ checkpointing", gib=24.9, tokens_per_second=7210, technique="checkpointing", takes=_is_whole_block
    ),
    Rung(
        name="+ optimizer in backward", gib=23.1, tokens_per_second=7309, technique="update_in_backward",
        takes=lambda option: option.settings.get("kernel") == "same",
    ),
    Rung(
        name="+ activation offload", gib=21.8, tokens_per_second=7301, technique="offloaded_checkpointing",
        takes=_is_whole_block, replaces="checkpointing",
    ),
    Rung(
        name="+ 8-bit AdamW", gib=17.6, tokens_per_second=6960, technique="low_bit_states",
        takes=lambda option: option.settings.get("bits") == 8, replaces="update_in_backward",
    ),
)  # fmt: skip


def published(path: Path | None = None) -> None:
    """Prints a row for each rung, and writes them."""
    card = find(CARD)
    plain = Profile(_traced(()), card)
    taken: list[Option] = []
    rows: list[dict[str, Any]] = []
    before: tuple[float, float, Rung] | None = None
    for rung in LADDER:
        if rung.technique:
            taken = [option for option in taken if option.technique != rung.replaces]
            found = [o for o in technique(rung.technique).options(plain) if rung.takes(o) and not _conflicts(o, taken)]
            taken += _compatible(found)
        tape = _traced(taken)
        estimate = estimate_peak(tape, card)
        peak, seconds = estimate.peak.reserved_bytes / GIB, estimate.seconds_per_step
        row: dict[str, Any] = {"row": rung.name, "published_gib": rung.gib, "gib": round(peak, 2)}
        row |= {"published_tokens_per_second": rung.tokens_per_second, "tokens_per_second": round(NUM_TOKENS / seconds)}
        row |= dict.fromkeys(("published_memory_ratio", "memory_ratio", "published_time_ratio", "time_ratio"), "")
        if before is not None:
            row["published_memory_ratio"] = round(rung.gib / before[2].gib, 3)
            row["memory_ratio"] = round(peak / before[0], 3)
            row["published_time_ratio"] = round(before[2].tokens_per_second / rung.tokens_per_second, 3)
            row["time_ratio"] = round(seconds / before[1], 3)
        before = peak, seconds, rung
        rows.append(row)
        print(
            "  ".join(f"{value!s:>24}" if key == "row" else f"{value!s:>8}" for key, value in row.items()), flush=True
        )
    if path is not None:
        write_rows(path, rows)


def _compatible(options: Sequence[Option]) -> list[Option]:
    """Those that go together, of each place the one that saves most."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: min((c.num_bytes for c in o.changes), default=0)):
        if not _conflicts(option, found):
            found.append(option)
    return found


def _conflicts(option: Option, taken: Sequence[Option]) -> bool:
    return any(option.slots & other.slots for other in taken)


def _traced(options: Sequence[Option]) -> Tape:
    choices = [
        Choice(
            technique=o.technique, where=o.where, settings=o.settings, saves_bytes=0, adds_seconds=0.0, exact=o.exact
        )
        for o in options
    ]
    return trace(
        GeneratorFunction(location=__file__, function="llama_3b", parameters={}),
        label="published",
        device=CARD,
        num_steps=3,
        preparation=Preparation(
            function="tightfit.runtime.attach:prepare",
            argument={"choices": [dataclasses.asdict(c) for c in choices]},
            imports=("tightfit.runtime.attach", "tightfit.techniques.registry:import_ours"),
        ),
    ).tape
