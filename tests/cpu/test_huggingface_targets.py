"""A Hugging Face config with a task trains like the plain loop it stands for, whatever the architecture."""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tightfit.capture.targets.huggingface import inputs as huggingface_inputs
from tightfit.capture.targets.huggingface import target as huggingface
from tightfit.capture.targets.huggingface import tasks as huggingface_tasks
from tightfit.capture.targets.huggingface.known_names import in_one_spelling, possible_model_types, refuse_unknown
from tightfit.capture.targets.huggingface.target import HuggingFaceTarget, is_huggingface_source, load_config, workload
from tightfit.capture.targets.target_kinds import parse_target
from tightfit.errors import MissingExtra, UsageError

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("breadth", ROOT / "benchmarks" / "breadth.py")
breadth = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = breadth  # dataclasses look their module up there
spec.loader.exec_module(breadth)

CASES = {case.name: case for case in breadth.cases()}


@pytest.fixture
def small(tmp_path):
    return lambda name: str(breadth.write_config(CASES[name], "small", tmp_path))


@pytest.fixture
def narrow_gpt2(tmp_path):
    """GPT-2 with all of its positions, and little else: a host fills the published one with random numbers for three seconds."""
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def run(target, steps=2):
    """The generator after `steps` steps, with the losses and the locals of its frame."""
    generator = workload(target, device="cpu")
    losses = [next(generator) for _ in range(steps)]
    return losses, dict(generator.gi_frame.f_locals)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "name",
    [
        *("bert", "distilbert", "albert", "canine", "mpnet", "roberta", "modernbert", "xlm-roberta"),
        *("gpt2", "llama", "opt", "gemma2", "falcon", "phi3", "mixtral", "gpt_oss", "mamba", "lfm2"),
        *("t5", "bart", "switch_transformers", "vit", "resnet", "convnext", "segformer", "videomae", "vit_mae"),
        *("wav2vec2", "audio-spectrogram-transformer", "whisper", "speech_to_text", "clip", "blip"),
    ],
)
def test_a_small_model_of_every_kind_trains_for_two_steps(name, small):
    task = CASES[name].task
    sizes = {"batch_size": 2, "sequence_length": 32, "audio_seconds": 1.0, "image_size": breadth.SIDE}
    target = HuggingFaceTarget(source=small(name), task=task, **sizes)
    losses, frame = run(target)
    assert all(loss.ndim == 0 and math.isfinite(loss.item()) for loss in losses)
    assert len(frame["optimizer"].state) > 0


def test_a_step_is_the_plain_loop(small):
    torch.manual_seed(0)
    target = HuggingFaceTarget(source=small("gpt2"), task="causal-lm", batch_size=2, sequence_length=16)
    losses, frame = run(target, steps=1)
    model, batch = frame["model"], frame["batch"]
    assert model.training
    assert batch["input_ids"].shape == (2, 16)
    assert losses[0] is frame["outputs"].loss
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert", "masked-lm"),
        ("gpt2", "causal-lm"),
        ("t5", "seq2seq"),
        ("vit", "image-classification"),
        ("whisper", "speech-seq2seq"),
    ],
)
def test_without_a_task_the_model_type_says_it(name, task):
    assert huggingface_tasks.choose(load_config(name), None)[0] == task


def test_the_architecture_of_a_config_says_its_task(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForTokenClassification"]})
    )
    assert huggingface_tasks.choose(load_config(str(tmp_path)), None)[0] == "token-classification"


@pytest.mark.parametrize("optimizer", huggingface.OPTIMIZERS)
def test_every_optimizer_steps(optimizer, small):
    target = HuggingFaceTarget(source=small("gpt2"), optimizer=optimizer, sequence_length=8)
    losses, _ = run(target)
    assert all(math.isfinite(loss.item()) for loss in losses)


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_autocast_keeps_the_weights_and_computes_in_the_small_type(autocast, small):
    _, frame = run(HuggingFaceTarget(source=small("gpt2"), autocast=autocast, sequence_length=8), steps=1)
    assert frame["outputs"].logits.dtype == getattr(torch, autocast)
    assert next(frame["model"].parameters()).dtype == torch.float32
    assert frame["scaler"].is_enabled() == (autocast == "float16")


def test_dtype_is_that_of_the_weights_and_of_the_images(small):
    target = HuggingFaceTarget(source=small("vit"), task="image-classification", dtype="bfloat16")
    _, frame = run(target, steps=1)
    assert next(frame["model"].parameters()).dtype == torch.bfloat16
    assert frame["batch"]["pixel_values"].dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_adapters_are_all_that_trains(small):
    _, frame = run(HuggingFaceTarget(source=small("llama"), lora_rank=4, sequence_length=8), steps=1)
    trained = [name for name, parameter in frame["model"].named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_gradient_checkpointing_is_switched_on(small):
    target = HuggingFaceTarget(source=small("llama"), gradient_checkpointing=True, sequence_length=8)
    _, frame = run(target, steps=1)
    assert any(getattr(module, "gradient_checkpointing", False) for module in frame["model"].modules())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("gpt2", True),
        ("openai-community/gpt2", True),
        ("llama-3-8b", True),
        ("model.json", True),
        ("train.py", False),
        ("train.py:workload", False),
        ("package.module:workload", False),
        ("/no/such/folder/train.py", False),
    ],
)
def test_a_source_is_told_apart_from_a_script(text, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_huggingface_source(text) is answer


def test_a_mistyped_name_is_refused_before_torch_is_imported():
    code = (
        "import sys\n"
        "from tightfit.capture.targets.target_kinds import parse_target\n"
        "from tightfit.errors import UsageError\n"
        "try:\n    parse_target('lama-3-8b')\n"
        "except UsageError as error:\n    print(error, 'torch' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "nearest: llama-3-8b" in said
    assert said.endswith("False\n")


def test_a_config_that_cannot_be_is_refused_before_torch_is_imported(tmp_path):
    path = tmp_path / "config.json"
    for text, says in (
        ('{"model_type": "lama"}', "does not have; nearest: llama"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "c.C"}}', "its code comes with its weights"),
        ('{"model_type": "llama", "quantization_config": "fp8"}', "quantization_config is no object"),
        ('{"model_ty', "is not JSON"),
        ("[]", "has no model_type"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=re.escape(says)):
            refuse_unknown(str(tmp_path))
    path.write_text("\ufeff" + '{"model_type": "llama"}')
    refuse_unknown(str(path))


def test_what_a_config_leaves_open_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "LEFT_OPEN", [])
    path = tmp_path / "config.json"
    whole = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_inner": 8}
    path.write_text(json.dumps(whole))
    load_config(str(tmp_path))
    assert huggingface.LEFT_OPEN == []
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "vocab_size": 99, "architectures": ["Mine"]}))
    load_config(str(tmp_path))
    sizes, architecture = huggingface.LEFT_OPEN
    assert "(n_embd 768, n_head 12)" in sizes
    assert "names the architecture Mine" in architecture


def test_every_model_type_of_transformers_is_a_known_name():
    known = set(map(in_one_spelling, possible_model_types()))
    assert [name for name in CONFIG_MAPPING if in_one_spelling(name) not in known] == []


def test_a_folder_is_a_source_only_with_a_config(tmp_path):
    assert not is_huggingface_source(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert is_huggingface_source(str(tmp_path))
    assert load_config(str(tmp_path)).model_type == "gpt2"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"source": "gtp2"}, "nearest: gpt2"),
        ({"task": "ctc"}, "has no task 'ctc'; it has causal-lm"),
        ({"task": "poetry"}, "the tasks are|choose one of image-text"),
        ({"optimizer": "lion"}, "choose one of adamw"),
        ({"dtype": "int4"}, "choose one of float32"),
        ({"sequence_length": 2000}, "has 1024 positions"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_choices(narrow_gpt2, change, says):
    with pytest.raises(UsageError, match=says) as caught:
        next(workload(HuggingFaceTarget(**{"source": narrow_gpt2, **change}), device="cpu"))
    assert "\n" not in str(caught.value)


def test_wrong_options_are_told_before_transformers_is_loaded():
    for options, says in (
        ({"dtype": "int4"}, "no dtype 'int4'"),
        ({"optimizer": "lion"}, "no optimizer"),
        ({"lora_rank": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=says):
            parse_target("gpt2", options=options)
    named = {
        HuggingFaceTarget(source="gpt2", dtype=name).dtype for name in ("bf16", "BF16", "torch.bfloat16", "bfloat16")
    }
    assert named == {"bfloat16"}
    assert HuggingFaceTarget(source="gpt2", autocast="fp16").autocast == "float16"


def test_a_missing_package_is_named_with_its_installation(narrow_gpt2, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match="pip install peft"):
        next(workload(HuggingFaceTarget(source=narrow_gpt2, lora_rank=4), device="cpu"))


def test_positions_that_are_not_looked_up_do_not_bound_a_row(small):
    target = HuggingFaceTarget(source=small("llama"), sequence_length=40)
    assert next(itertools.islice(workload(target, device="cpu"), 1)).isfinite()


@pytest.mark.parametrize("name", huggingface.presets())
def test_a_preset_has_as_many_parameters_as_the_published_model(name):
    config = load_config(name)
    _, task = huggingface_tasks.choose(config, None)
    with torch.device("meta"):
        model = getattr(transformers, task.auto_class).from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == huggingface.presets()[name]["parameters"]


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_vl", "idefics3", "mistral3"])
def test_every_image_has_its_placeholder_tokens(name, small):
    target = HuggingFaceTarget(source=small(name), task="image-text", batch_size=2)
    losses, frame = run(target, steps=1)
    placeholders = (frame["batch"]["input_ids"] == huggingface_inputs.image_token(frame["config"])).sum(dim=1)
    assert placeholders[0] == placeholders[1] > 0
    assert losses[0].isfinite()
    with pytest.raises(UsageError, match="ask for more than"):
        next(workload(dataclasses.replace(target, sequence_length=int(placeholders[0])), device="cpu"))
