"""A trace that leaves out turns of `generate` has the tape of one that runs them all; where turns are not alike, or code of the program's own sees each, all are run."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.cpu.alike_tapes import tape_differences

from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import trace
from tightfit.tape import Source, Tape

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

pytest.importorskip("transformers")

_HEAD = """
import sys
import torch
from transformers import (
    AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig, LogitsProcessor, LogitsProcessorList,
    StoppingCriteria, StoppingCriteriaList,
)

torch.manual_seed(0)
SIZES = dict(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)
NEW = int(sys.argv[1])
how = dict(do_sample=False, pad_token_id=0, max_new_tokens=NEW)

def model_of(config):
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).to("cuda").eval()

ids = torch.randint(3, 100, (2, 8), device="cuda")
"""
_LLAMA = "model = model_of(LlamaConfig(**SIZES))\n"
_PROGRAMS = {
    "sampling": _LLAMA
    + "out = model.generate(ids, **{**how, 'do_sample': True, 'top_p': 0.9, 'repetition_penalty': 1.1})\n",
    "a cache that is kept": _LLAMA
    + """
cache = DynamicCache()
out = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, **how)
assert out.past_key_values.get_seq_length() == ids.shape[1] + NEW - 1
with torch.no_grad():
    model(out.sequences[:, -1:], past_key_values=cache)
out = model.generate(torch.cat([out.sequences, ids[:, :1]], 1), **how)
""",
    "a window in between": """
model = model_of(Gemma3TextConfig(**SIZES, sliding_window=30))
out = model.generate(ids, **how)
""",
    "beams": _LLAMA
    + """
out = model.generate(ids, num_beams=2, **how)
""",
    "masks in steps of eight": _LLAMA
    + """
mask = torch.ones(2, 8, dtype=torch.long)
mask[0, :3] = 0
out = model.generate(ids, attention_mask=mask.to("cuda"), **how)
""",
}
_NUM_TOKENS = {"masks in steps of eight": 88, "a window in between": 50}
_ENOUGH = 30
_ALL_RUN = {
    "scores that are kept": "out = model.generate(ids, output_scores=True, return_dict_in_generate=True, **how)\n",
    "a processor of the program's own": """
class Held(LogitsProcessor):
    def __call__(self, ids, scores):
        return scores

out = model.generate(ids, logits_processor=LogitsProcessorList([Held()]), **how)
""",
    "an end of the program's own": """
class End(StoppingCriteria):
    number = 0

    def __call__(self, ids, scores, **_):
        self.number += 1
        return torch.full((len(ids),), self.number >= 20, device=ids.device)

out = model.generate(ids, stopping_criteria=StoppingCriteriaList([End()]), **how)
""",
    "a hook that counts": """
calls = [0]

def count(module, args, out):
    calls[0] += 1
    if calls[0] == 14:
        torch.zeros(1 << 20, device="cuda")

model.register_forward_hook(count)
out = model.generate(ids, **how)
""",
    "a method of the program's own that counts elsewhere": """
calls = []

class Model(type(model)):
    def prepare_inputs_for_generation(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 14:
            torch.zeros(1 << 20, device="cuda")
        return super().prepare_inputs_for_generation(*args, **kwargs)

model.__class__ = Model
out = model.generate(ids, **how)
""",
    "a function in the place of one of the library's": """
forward, calls = type(model.model).forward, []

def counted(self, *args, **kwargs):
    calls.append(None)
    return forward(self, *args, **kwargs)

type(model.model).forward = counted
out = model.generate(ids, **how)
""",
    "a hook on all modules that counts": """
calls = []
torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: calls.append(module) if module is model else None)
out = model.generate(ids, **how)
""",
    "a part of the program's own that counts": """
class Counts(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.inner(*args, **kwargs)

model.lm_head = Counts(model.lm_head)
out = model.generate(ids, **how)
""",
    "a hook that keeps what it sees": """
kept = []
model.lm_head.register_forward_hook(lambda module, args, out: kept.append(out))
out = model.generate(ids, **how)
""",
}


def _tape(folder: Path, program: str, num_tokens: int, *, runs_all_turns: bool = False) -> Tape:
    path = folder / "answer.py"
    path.write_text(_HEAD + program)
    target = Script(path=str(path), arguments=(str(num_tokens),))
    return trace(target, label="answer.py", device="A100-40GB", runs_all_turns=runs_all_turns).tape


def _num_left_out(tape: Tape) -> int:
    found = [each.what.partition(" of the tokens")[0] for each in tape.assumptions if "tokens made here" in each.what]
    return sum(int(number.replace(",", "")) for number in found)


def _without_scratch(tape: Tape) -> Tape:
    """What the kernels of attention take for themselves follows rules of its own, and stays as it was."""
    is_scratch = tape.storages.source == Source.SCRATCH
    sizes = {
        name: np.where(is_scratch, 512, getattr(tape.storages, name))
        for name in ("num_bytes", "low_bytes", "high_bytes")
    }
    return dataclasses.replace(tape, storages=dataclasses.replace(tape.storages, **sizes))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_tape_has_all_turns(name: str, tmp_path: Path) -> None:
    num_tokens = _NUM_TOKENS.get(name, 26)
    everything = _tape(tmp_path, _PROGRAMS[name], num_tokens, runs_all_turns=True)
    made = _tape(tmp_path, _PROGRAMS[name], num_tokens)
    assert _num_left_out(everything) == 0
    assert _num_left_out(made) >= 16
    kept = tuple(each for each in made.assumptions if "tokens made here" not in each.what)
    made = dataclasses.replace(made, assumptions=kept)
    assert tape_differences(_without_scratch(everything), _without_scratch(made)) == []


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", _ALL_RUN)
def test_all_turns_are_run_where_something_sees_each(name: str, tmp_path: Path) -> None:
    assert _num_left_out(_tape(tmp_path, _LLAMA + _ALL_RUN[name], _ENOUGH)) == 0


def test_as_many_are_enough_to_leave_some_out(tmp_path: Path) -> None:
    assert _num_left_out(_tape(tmp_path, _LLAMA + "out = model.generate(ids, **how)\n", _ENOUGH)) >= 16


def test_turns_that_change_later_are_run_until_they_do(tmp_path: Path) -> None:
    # The end is masked for the first tokens alone, which no number of the model's tells.
    program = _LLAMA + "out = model.generate(ids, eos_token_id=[5], min_new_tokens=8, **how)\n"
    everything, made = (_tape(tmp_path, program, 50, runs_all_turns=runs_all) for runs_all in (True, False))
    assert 16 <= _num_left_out(made) < 28
    assert len(made.operators) == len(everything.operators)
    assert np.array_equal(made.events.storage, everything.events.storage)


@pytest.mark.parametrize("runs_all", [False, True])
def test_beams_are_searched_to_the_longest_sequence(runs_all: bool, tmp_path: Path) -> None:
    call = "out = model.generate(ids, num_beams=2, **{**how, 'max_new_tokens': %d})\n"
    few, more = (_tape(tmp_path, _LLAMA + call % number, 0, runs_all_turns=runs_all) for number in (6, 9))
    per_token = (len(more.operators) - len(few.operators)) / 3
    assert per_token > 50
    assert len(few.operators) > 5 * per_token


def test_an_error_behind_what_was_left_out_is_the_programs(tmp_path: Path) -> None:
    program = _LLAMA + "out = model.generate(ids, **how)\nassert out.shape[1] == 8 + NEW\nraise ValueError('mine')\n"
    with pytest.raises(Exception, match="mine"):
        _tape(tmp_path, program, _ENOUGH)
