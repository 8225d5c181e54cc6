"""A generation loop after the steps: tokens of which only three are traced lead to the same peaks as if all were.

The second script gives the model one more argument, an object, of which a trace knows nothing: all its calls are run.
"""

from pathlib import Path

import pytest

from tightfit import fit

pytest.importorskip("transformers", minversion="5")

SCRIPT = """
import torch
from transformers import DynamicCache, {family}Config as Config, {family}ForCausalLM as Model
config = Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=500, attn_implementation="{attention}")
model = Model(config).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    ids = torch.zeros(2, 16, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
cache, more = DynamicCache(config=config), {more}
out, token = None, torch.zeros(32, 24, dtype=torch.long, device="cuda")

def next_token(length):
    global out, token
    mask = torch.ones(32, length, dtype=torch.long, device="cuda")
    out = model(input_ids=token, attention_mask=mask, past_key_values=cache, use_cache=True, **more)
    token = out.logits[:, -1:].argmax(-1)

# A loop of a library's, as `generate` has it: one of the program's own is cut short.
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled={autocast}):
    list(map(next_token, range(24, 50)))
length = 49
assert out.past_key_values is cache and cache.get_seq_length() == length, cache.get_seq_length()
assert cache.layers[1].keys.shape == (32, 2, length, 16), cache.layers[1].keys.shape
"""


@pytest.mark.parametrize(
    ("family", "attention", "autocast"), [("Llama", "sdpa", False), ("Llama", "eager", True), ("Qwen2", "sdpa", True)]
)
def test_the_peaks_are_those_of_a_trace_of_every_token(
    tmp_path: Path, family: str, attention: str, autocast: bool
) -> None:
    peaks = []
    for name, more in (("all", "{'tag': object()}"), ("three", "{}")):
        script = tmp_path / f"{name}.py"
        script.write_text(SCRIPT.format(family=family, attention=attention, autocast=autocast, more=more))
        tape = fit.capture(str(script), device="RTX 4090")
        assert not tape.coverage.stopped
        assert any("with a growing cache" in each.what for each in tape.assumptions) == (name == "three")
        found = fit.estimate(tape, "RTX 4090")
        peaks.append(
            (
                len(tape.operators.name),
                [
                    found.peak.allocated_bytes,
                    found.peak.reserved_bytes,
                    *((s.peak_allocated_bytes, s.peak_reserved_bytes, s.end_allocated_bytes) for s in found.spans),
                ],
            )
        )
    (num_all, all_peaks), (num_three, three_peaks) = peaks
    assert num_three < num_all / 2
    assert three_peaks == all_peaks
