"""`serve` of a script: the model, type and lengths of its call of `generate`, and one line where they do not say what to serve."""

import json
from pathlib import Path

import pytest

from tightfit.capture.trace_settings import AS_USUAL
from tightfit.cli.main import run
from tightfit.errors import UsageError
from tightfit.fit.generating_scripts import GeneratingCall, generating_call, refuse_what_is_beside

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

pytest.importorskip("transformers", minversion="5")

HEAD = """
import sys, threading, torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

def prompt(rows, length):
    return torch.zeros(rows, length, dtype=torch.long, device="cuda")

def llama():
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=99)
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)

"""
NUM_LINES = HEAD.count("\n")


def script(folder: Path, body: str) -> str:
    path = folder / "gen.py"
    path.write_text(HEAD + body)
    return str(path)


def call_of(path: str, *arguments: str, number: int = 1) -> GeneratingCall:
    return generating_call(path, "L4", arguments=arguments, number=number, tracing=AS_USUAL)


def test_a_script_is_served_as_the_config_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "model, other = llama(), GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4)).cuda()\n"
    body += "model.generate(prompt(2, int(sys.argv[1])), max_length=300)\n"
    path = script(tmp_path, body)
    assert run(["serve", path, "--device", "L4", "--json", "--", "200"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f":{NUM_LINES + 2}, LlamaForCausalLM in bfloat16, 200:100 as the script generates" in found["model"]
    assert found["concurrency_at_lengths"] is not None
    notes = "\n".join(found["assumptions"])
    assert "GPT2LMHeadModel on the GPU too" in notes and "2 sequences at once" in notes
    assert found["launch"]["vllm"][2] == "MODEL"
    config = tmp_path / "config.json"
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 99, "dtype": "bfloat16", **fields}))
    assert run(["serve", str(config), "--device", "L4", "--json", "--lengths", "200:100"]) == 0
    plain = json.loads(capsys.readouterr().out)
    for name in ("weights_bytes", "activation_bytes", "kv_bytes", "kv_tokens", "concurrency_at_lengths"):
        assert found[name] == plain[name]


def test_a_later_call_is_chosen(tmp_path: Path) -> None:
    body = "tokens = llama().generate(prompt(1, 8), max_new_tokens=5)\n"
    body += "GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4)).cuda().generate(tokens, num_beams=3)\n"
    path = script(tmp_path, body)
    found = call_of(path, number=2)
    # By default 20 tokens are made.
    assert (found.class_name, found.dtype, found.lengths, found.rows) == ("GPT2LMHeadModel", "float32", [(13, 20)], 3)
    with pytest.raises(UsageError, match=r"--call 3: .* calls generate of transformers 2 times"):
        call_of(path, number=3)


def test_a_thread_generates_and_the_program_catches_everything(tmp_path: Path) -> None:
    body = "def work(model, tokens):\n    while True:\n        try:\n            model.generate(tokens, max_new_tokens=5)\n        except BaseException:\n            pass\n"
    body += "thread = threading.Thread(target=work, args=(llama(), prompt(1, 8)))\nthread.start()\nthread.join()\n"
    assert call_of(script(tmp_path, body)).lengths == [(8, 5)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("llama()(prompt(1, 8))\n", "calls no generate of transformers: give the config.json"),
        ("def main():\n    llama().generate(prompt(1, 8))\n", "only defines"),
        (
            "model = llama()\nmodel.model.layers = model.model.layers[:2]\nmodel.generate(prompt(1, 8))\n",
            "not as its config says, it lacks model.layers.2",
        ),
        ("llama().double().generate(prompt(1, 8))\n", "are in float64, which is not served"),
    ],
)
def test_what_cannot_be_served_is_one_line(tmp_path: Path, body: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        call_of(script(tmp_path, body))


def test_an_answer_for_the_scripts_own_process_counts_all_of_it() -> None:
    call = GeneratingCall(
        where="gen.py:3",
        class_name="LlamaForCausalLM",
        config={},
        name="",
        dtype="float16",
        prompt=1,
        new_tokens=1,
        rows=1,
        changes="",
        others=[("UNet", 1 << 30)],
    )
    refuse_what_is_beside(call, "gen.py", "vllm")
    with pytest.raises(UsageError, match=r"UNet \(1.00 GiB of weights\) on the GPU beside LlamaForCausalLM"):
        refuse_what_is_beside(call, "gen.py", "transformers")


def test_options_of_a_script_are_refused_with_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "llama-3-8b", "--device", "L4", "--call", "2"]) == 2
    assert "--call" in capsys.readouterr().err
    assert run(["serve", "llama-3-8b", "--device", "L4", "--", "x"]) == 2
    assert run(["serve", "missing.py", "--device", "L4"]) == 2
