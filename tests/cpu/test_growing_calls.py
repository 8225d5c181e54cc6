"""A generation loop after the steps: tokens of which only three are traced lead to the same peak as if all were.

The first loop gives the model one more argument, an object, of which a trace knows nothing: all its calls are run.
"""

from pathlib import Path

import pytest

from tightfit import fit
from tightfit.capture.steps.growing_calls import NUM_CALLS_TRACED

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

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


ENCODER_DECODER = """
import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
config = T5Config(vocab_size=500, d_model=64, d_ff=128, num_layers=1, num_decoder_layers=2, num_heads=4, d_kv=16, decoder_start_token_id=0)
model = T5ForConditionalGeneration(config).cuda()
ids = torch.zeros(32, 24, dtype=torch.long, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def generated(**more):
    torch.cuda.reset_peak_memory_stats()
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    token = torch.zeros(32, 1, dtype=torch.long, device="cuda")

    def next_token(length):
        nonlocal token
        out = model(encoder_outputs=encoded, decoder_input_ids=token, past_key_values=cache, use_cache=True, **more)
        assert out.encoder_last_hidden_state is encoded[0] and out.past_key_values is cache
        token = out.logits[:, -1:].argmax(-1)

    with torch.no_grad():
        encoded = model.encoder(ids)
        list(map(next_token, range(20)))
    assert cache.get_seq_length() == 20
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

assert generated(tag=object()) == generated()
"""


def test_a_decoder_that_returns_what_it_was_given_of_its_encoder_repeats_itself_too(tmp_path: Path) -> None:
    script = tmp_path / "generate.py"
    script.write_text(ENCODER_DECODER)
    tape = fit.capture(str(script), device="RTX 4090")
    assert not tape.coverage.stopped
    repeated = tape.strings.index("T5ForConditionalGeneration (repeated)")
    # The cache is empty in the first call.
    assert (tape.operators.name == repeated).sum() == 20 - 1 - NUM_CALLS_TRACED
