"""The third kind of target: a Hugging Face config and a task, trained in the plainest loop there is.

Nothing is downloaded. A source is a `config.json`, a folder that has one, a well-known size (`llama-3-8b`) or a
bare model type (`bert`, its default config). From it come the model, by the auto class of the task, the optimizer
and one batch per step, and a generator that does what an ordinary training script does, in the same order, so
that objects are allocated and freed as they would be there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.capture.targets.huggingface import inputs as huggingface_inputs
from tightfit.capture.targets.huggingface import tasks as huggingface_tasks
from tightfit.capture.targets.huggingface.known_names import (
    in_one_spelling,
    name_of,
    no_such_type,
    presets,
    read_config,
    words_of_nearest,
)
from tightfit.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

    from torch import Tensor

OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
}
"""Name to class of `torch.optim` and the arguments that its name promises."""

NUM_CHARACTERS = 32
"""The vocabulary of a speech recogniser whose config names none (`vocab_size` of facebook/wav2vec2-base-960h)."""

DTYPES = ("float32", "bfloat16", "float16")
_ALSO_CALLED = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

LEFT_OPEN: list[str] = []
"""What was assumed of the configs that this process has loaded."""

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTarget:
    """A model, a task and the settings of one training run.

    `sequence_length` counts all tokens of a row, those that stand for an image included; None is 512, or as many
    as the model has positions for, plus those of the image. `dtype` is that of the weights; None is what the
    config says, else float32. `image_size` (pixels a side) and `audio_seconds` matter only where the config
    leaves them open.
    """

    source: str
    task: str | None = None
    batch_size: int = 1
    sequence_length: int | None = None
    dtype: str | None = None
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    autocast: str | None = None
    lora_rank: int | None = None
    gradient_checkpointing: bool = False
    attention: str | None = None
    image_size: int | None = None
    audio_seconds: float = 5.0

    def __post_init__(self) -> None:
        _one_of("optimizer", self.optimizer, tuple(OPTIMIZERS))
        _one_of("task", self.task, tuple(huggingface_tasks.TASKS))
        for name in ("dtype", "autocast"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, dtype_name(value))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("autocast dtype", self.autocast, DTYPES[1:])
        for name in ("batch_size", "sequence_length", "lora_rank", "image_size"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"{name} is {number}; it must be at least 1")


def dtype_name(text: str) -> str:
    """`bfloat16` for `bf16` and `torch.bfloat16`; what is no dtype is as it was."""
    name = text.removeprefix("torch.").lower()
    return _ALSO_CALLED.get(name, name if name in DTYPES else text)


def is_huggingface_source(text: str) -> bool:
    """Whether `text` names a config rather than a script, `FILE.py:FUNCTION` or `package.module:FUNCTION`.

    True for a `.json` file, a folder with a `config.json`, and a word that could be a preset or a model type
    (`gpt2`, `openai-community/gpt2`); whether there is one of that name is found out when it is loaded.
    """
    path = Path(text)
    if path.is_dir():
        return (path / "config.json").is_file()
    if path.suffix in (".json", ".py"):
        return path.suffix == ".json"
    return not path.is_file() and re.fullmatch(r"([\w.-]+/)?[A-Za-z][\w.-]*", text) is not None


def load_config(source: str) -> Any:
    """The `PretrainedConfig` that `source` names, read from this machine only.

    Raises:
        UsageError: no such file, preset or model type, or a type that this transformers does not have.
        MissingExtra: transformers is not installed.
    """
    _require("transformers", "tightfit[hf]")
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    is_file = file.is_file()
    if is_file:
        fields = read_config(file)
    else:
        name = name_of(source)
        preset = presets().get(name, {"model_type": name, "config": {}})
        fields = {"model_type": preset["model_type"], **preset["config"]}
    model_type = str(fields["model_type"])
    model_types = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    found = next((key for key in model_types if in_one_spelling(key) == in_one_spelling(model_type)), None)
    if found is None and is_file:
        raise UsageError(no_such_type(file, fields, list(model_types)))
    if found is None:
        raise UsageError(
            f"{source!r} is neither a file nor a preset nor a model type of transformers{words_of_nearest(model_type, list(model_types), source)}"
        )
    del fields["model_type"]
    strict = getattr(importlib.import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError)
    try:
        config = model_types[found].from_dict(fields)
    except (AttributeError, ValueError, TypeError, strict) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{source} is not a valid config for a {found} model: {reason}") from error
    if is_file:
        LEFT_OPEN.extend(_left_open(file, fields, config))
    return config


def _left_open(file: Path, fields: Mapping[str, Any], config: Any) -> Iterator[str]:
    """What is assumed where a config does not say it: sizes that are then those of its class, and a class that is none."""
    names = {name: config.attribute_map.get(name, name) for name in _SIZES}
    missing = {
        own: getattr(config, own)
        for name, own in names.items()
        if name not in fields and own not in fields and isinstance(getattr(config, own, None), int)
    }
    if missing:
        sizes = ", ".join(f"{name} {value}" for name, value in missing.items())
        yield f"{file} does not say all sizes: those of the model type in transformers are assumed ({sizes})"
    classes = fields.get("architectures")
    transformers = importlib.import_module("transformers")
    if isinstance(classes, list) and classes and not hasattr(transformers, str(classes[0])):
        yield f"{file} names the architecture {classes[0]}, which is no class of transformers: a {config.model_type} model is assumed"


def workload(target: HuggingFaceTarget, *, device: str = "cuda") -> Iterator[Tensor]:
    """Train `target` on `device` without end, yielding the loss (a scalar) once per step.

    Raises:
        UsageError: the source, the task or a length is not one that the model has.
        MissingExtra: a package that the model needs is not installed.
    """
    torch = _require("torch", "tightfit[torch]")
    config = load_config(target.source)
    name, task = huggingface_tasks.choose(config, target.task)
    _complete(config, task)
    model = _build(config, task, target)
    request = huggingface_inputs.BatchRequest(
        labels=task.labels,
        with_images=name != "causal-lm",
        batch_size=target.batch_size,
        sequence_length=target.sequence_length,
        image_size=target.image_size,
        audio_seconds=target.audio_seconds,
    )
    make_batch = huggingface_inputs.batch_maker(model, config, request)
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    # Before the optimizer is made, as training scripts do: its states are then made on the card.
    model = _adapt(model, config, target).to(device)
    model.train()
    optimizer_class, arguments = OPTIMIZERS[target.optimizer]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, optimizer_class)(trained, lr=target.learning_rate, **arguments)
    # Only float16 underflows without a loss scale; bfloat16 has float32's range.
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=target.autocast == "float16")
    while True:
        batch = make_batch()
        batch = _move(batch, device, dtype)  # only now: rebinding the name has freed the last batch on the device
        with _autocast(target.autocast, device):
            outputs = _forward(model, batch)
            loss = _loss(outputs)
        if scaler.is_enabled():
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        # After the step, as in the loops of transformers and PyTorch's tutorials: no gradient is held through
        # the next forward pass.
        optimizer.zero_grad()
        yield loss


def _build(config: Any, task: huggingface_tasks.Task, target: HuggingFaceTarget) -> Any:
    """The model on the host, as `from_config` makes it."""
    torch = importlib.import_module("torch")
    auto_class = getattr(importlib.import_module("transformers"), task.auto_class)
    arguments = {"attn_implementation": target.attention} if target.attention else {}
    if target.dtype is not None:
        # The field was renamed in transformers 4.56.
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", getattr(torch, target.dtype))
    try:
        return auto_class.from_config(config, **arguments)
    except ImportError as error:
        raise _missing(config.model_type, error) from error
    except ValueError as error:
        if target.attention is None:
            raise
        raise UsageError(f"{config.model_type} with attention {target.attention!r}: {str(error).strip()}") from error


def _forward(model: Any, batch: dict[str, Any]) -> Any:
    """Runs the model; some import packages only when they run, such as the matcher of a detector or a fused kernel."""
    try:
        return model(**batch)
    except ImportError as error:
        raise _missing(model.config.model_type, error) from error


def _missing(model_type: str, error: ImportError) -> MissingExtra:
    found = re.search(r"requires the (\S+) library|No module named '(\S+?)'|install (\S+)", str(error))
    if found is None:
        return MissingExtra(f"a {model_type} model cannot be built here: {' '.join(str(error).split())}")
    package = next(group for group in found.groups() if group).lower()
    return MissingExtra(f"a {model_type} model needs {package}, which is not installed: pip install {package}")


def _adapt(model: Any, config: Any, target: HuggingFaceTarget) -> Any:
    """Low-rank adapters and gradient checkpointing, as their documentation says to switch them on."""
    if target.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UsageError(f"a {config.model_type} model has no gradient checkpointing; leave it off")
        # The method was renamed within transformers 5; both take the arguments of torch.utils.checkpoint first.
        renamed = getattr(model, "activation_checkpointing_enable", None)
        (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if target.lora_rank is None:
        return model
    peft = _require("peft", "peft")
    known = importlib.import_module("peft.utils").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    where = None if config.model_type in known else "all-linear"
    return peft.get_peft_model(model, peft.LoraConfig(r=target.lora_rank, target_modules=where))


def _complete(config: Any, task: huggingface_tasks.Task) -> None:
    """Set fields that a default config leaves open and a tokenizer or a checkpoint would have set."""
    if getattr(config, "architectures", None) is None:
        config.architectures = []
    text = config.get_text_config()
    for part in {id(config): config, id(text): text}.values():
        is_pair = getattr(part, "is_encoder_decoder", False)
        if is_pair and getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = 0
        if (is_pair or task.labels == "classes") and getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    if getattr(config, "vocab_size", 0) is None:
        config.vocab_size = NUM_CHARACTERS
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, 0) is None:
            setattr(config, name, text.vocab_size - 1)


def _loss(outputs: Any) -> Tensor:
    """The model's own loss, or the mean of its first output where it has none."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    return next(value for value in outputs.values() if hasattr(value, "requires_grad") and value.requires_grad).mean()


def _move(value: Any, device: str, dtype: Any) -> Any:
    """A batch on `device`, its floating-point tensors in the dtype of the weights."""
    if isinstance(value, dict):
        return {key: _move(item, device, dtype) for key, item in value.items()}
    if isinstance(value, list):
        return [_move(item, device, dtype) for item in value]
    if not hasattr(value, "is_floating_point"):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _autocast(name: str | None, device: str) -> contextlib.AbstractContextManager[Any]:
    if name is None:
        return contextlib.nullcontext()
    torch = importlib.import_module("torch")
    return torch.autocast(torch.device(device).type, dtype=getattr(torch, name))


def _require(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        quoted = f"'{package}'" if "[" in package else package
        raise MissingExtra(f"this target needs {module}, which is not installed: pip install {quoted}") from error


def _one_of(what: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UsageError(f"no {what} {value!r}; choose one of {', '.join(choices)}")
