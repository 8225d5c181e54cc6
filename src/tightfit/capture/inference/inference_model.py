"""A Hugging Face model for inference from its config alone: without memory (on the device `meta`), in the type that its weights are kept in."""

import contextlib
import copy
import importlib
from typing import Any

from tightfit.capture.inference.paged_attention import NAME
from tightfit.capture.targets.huggingface.target import load_config
from tightfit.errors import UsageError

# The classes that generate, and the names of the tables of model types that transformers has for them.
_AUTO_CLASSES = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
# Engines load bfloat16 weights in float16 on older cards, and refuse to where they are told to keep it.
_BFLOAT16 = (8, 0)
_ENCODERS = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
# What configs call the tokens beyond which a layer keeps no more.
_WINDOWS = ("window", "chunk", "local")
_SCALED_BEYOND = frozenset({"linear", "dynamic", "yarn"})
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "max_target_positions",
)


def build(source: str, dtype: str | None, *, attention: str | None = NAME) -> tuple[Any, Any]:
    """The model of `source` and its config; `dtype` by default that of the config, bfloat16 where it says none or float32, and float16 on cards without bfloat16.

    `attention` is the name of an implementation, None: the model's own.

    Raises:
        UsageError: the model generates no text, or `dtype` is none of the card's.
    """
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    config = load_config(source)
    kept = dtype or dtype_of(config)
    if kept == "bfloat16" and torch.cuda.get_device_capability() < _BFLOAT16:
        if dtype is not None:
            raise UsageError("--dtype bfloat16: this GPU has no bfloat16; give --dtype float16")
        kept = "float16"
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    for name, table in _classes(config):
        if config.model_type in getattr(tables, table) and not _sees_both_ways(tables, config):
            with torch.device("meta"):
                made = _made(getattr(transformers, name), config, getattr(torch, kept), attention)
            return made.eval().requires_grad_(False), config
    raise UsageError(f"{source}: a {config.model_type} model generates no tokens; serve takes models that do")


def _classes(config: Any) -> list[tuple[str, str]]:
    """The classes in the order that they are tried: those of encoder-decoders first for a config that says so, as their decoder alone is a class of the first kind (BART)."""
    is_pair = bool(getattr(config, "is_encoder_decoder", False))
    return sorted(_AUTO_CLASSES.items(), key=lambda item: is_pair != ("Seq2Seq" in item[0]))


def _sees_both_ways(tables: Any, config: Any) -> bool:
    """Whether it is an encoder (BERT): those have a class that generates too, if their config says that they are decoders."""
    is_encoder = config.model_type in getattr(tables, _ENCODERS)
    return is_encoder and not getattr(config, "is_encoder_decoder", False) and not getattr(config, "is_decoder", False)


def dtype_of(config: Any) -> str:
    """The type that an engine keeps the weights in: that of the config; of float32 ones bfloat16, as engines load them."""
    text = config.get_text_config()
    named = next((getattr(part, "dtype", None) for part in (config, text) if getattr(part, "dtype", None)), None)
    name = str(named).removeprefix("torch.") if named is not None else "bfloat16"
    return "bfloat16" if name == "float32" else name


def input_width(config: Any) -> int | None:
    """How many positions the model has as engines read its config, with the scaling of its rotary positions; None where it names no limit."""
    text = config.get_text_config(decoder=True)
    found = next((int(getattr(text, name)) for name in _POSITIONS if isinstance(getattr(text, name, None), int)), None)
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    factor = scaling.get("factor")
    # The others name the scaled length (vllm/config/model.py, _get_and_verify_max_len).
    if found is None or not factor or scaling.get("rope_type", scaling.get("type")) not in _SCALED_BEYOND:
        return found
    return int(scaling.get("original_max_position_embeddings", found) * factor)


def widest_window(config: Any) -> int:
    """The largest window of attention that `config` or a part of it names, 0 if none."""
    numbers = [0]
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            numbers.append(widest_window(value))
        elif type(value) is int and any(word in name for word in _WINDOWS):
            numbers.append(value)
    return max(numbers)


def _made(auto: Any, config: Any, dtype: Any, attention: str | None) -> Any:
    """With `attention`; as the model has it, where it takes no other."""
    if attention is not None:
        # transformers notes the name in the config, also where the model then has no such attention.
        with contextlib.suppress(KeyError, ValueError):
            return auto.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)
    return auto.from_config(copy.deepcopy(config), dtype=dtype)
