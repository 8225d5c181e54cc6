"""A generation loop after the steps: tokens of which only three are traced lead to the same peak as if all were.

The first loop gives the model one more argument, an object, of which a trace knows nothing: all its calls are run.
"""

from pathlib import Path

import pytest

from tightfit import fit
from tightfit.capture.steps.growing_calls import NUM_CALLS_TRACED

pytest.importorskip("transformers", minversion="5")

SCRIPT = """
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     vocab_size=500, attn_implementation="eager")
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    ids = torch.zeros(2, 16, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def generated(**more):
    cache = DynamicCache(config=config)
    token = torch.zeros(32, 24, dtype=torch.long, device="cuda")

    def next_token(length):
        nonlocal token
        mask = torch.ones(32, length, dtype=torch.long, device="cuda")
        out = model(input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True, **more)
        assert out.past_key_values is cache and out.logits.shape[0] == 32
        token = out.logits[:, -1:].argmax(-1)

    # A loop of a library's, as `generate` has it: one of the program's own is cut short.
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        list(map(next_token, range(24, 50)))
    assert cache.get_seq_length() == 49 and cache.layers[1].keys.shape == (32, 2, 49, 16), cache.layers[1].keys.shape

generated(tag=object())
torch.cuda.synchronize()
allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
torch.cuda.reset_peak_memory_stats()
generated()
assert allocated == (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
"""


def test_the_peak_is_that_of_a_trace_of_every_token(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text(SCRIPT)
    tape = fit.capture(str(script), device="RTX 4090")
    assert not tape.coverage.stopped
    repeated = tape.strings.index("LlamaForCausalLM (repeated)")
    # The first call is of the prompt.
    assert (tape.operators.name == repeated).sum() == 26 - 1 - NUM_CALLS_TRACED
