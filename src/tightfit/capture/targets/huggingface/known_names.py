"""Refuses a mistyped model name before anything is imported: transformers and torch take seconds, and the names of model types are text in their files."""

import difflib
import functools
import importlib.metadata
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tightfit.errors import UsageError

# Where transformers writes the names of its model types: the first since version 5, the second before it.
_FILES = ("auto_mappings.py", "configuration_auto.py")
NUM_NEAREST = 3
OF_CARDS = ("flash_attn", "flash_attn_interface")
"""Packages of which transformers asks at its import whether they can be used, which depends on the card."""
# And of which the code of some models asks at its own.
OF_CARDS_TOO = ("mamba_ssm", "causal_conv1d", "fla", "xformers", "natten", "apex")


def is_any_installed(packages: Iterable[str]) -> bool:
    """Whether one of these is there; none is imported."""
    return any(importlib.util.find_spec(name) is not None for name in packages)


@functools.cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Well-known sizes by name: `model_type`, `config` (what differs from its default) and `parameters` (how many)."""
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


def name_of(source: str) -> str:
    """The name of a preset or model type that `source` may be, which may have a name of an organisation in front."""
    return source.rsplit("/", 1)[-1].lower()


def in_one_spelling(name: str) -> str:
    """A model type in one spelling: some are written with `-`, others with `_`."""
    return name.lower().replace("-", "_")


def modules_of(source: str) -> tuple[str, ...]:
    """The module of transformers that most likely has the code of a model, to be imported before its traces are forked: once for all of them.

    None where it might ask for a card at its import: there is none in the process that is forked from.
    """
    if is_any_installed((*OF_CARDS, *OF_CARDS_TOO)):
        return ()
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    try:
        preset = presets().get(name_of(source), {"model_type": name_of(source)})
        fields = json.loads(file.read_bytes()) if file.is_file() else preset
        model_type = in_one_spelling(str(fields["model_type"]))
    except (OSError, ValueError, KeyError, TypeError):
        # The trace says what is wrong with it.
        return ()
    return (f"transformers.models.{model_type}.modeling_{model_type}",)


def refuse_unknown(source: str) -> None:
    """Returns for a preset, or a config or a name of what may be a model type of the transformers that is installed.

    Raises:
        UsageError: `source` is none of them.
    """
    name, path = name_of(source), Path(source)
    words = possible_model_types()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        fields = read_config(file)
        if words and in_one_spelling(str(fields["model_type"])) not in map(in_one_spelling, words):
            raise UsageError(no_such_type(file, fields, words))
        return
    if name in presets():
        return
    if words and in_one_spelling(name) not in map(in_one_spelling, words):
        raise UsageError(
            f"{source!r} is neither a file nor a preset nor a model type of transformers{words_of_nearest(name, words, source)}"
        )


def read_config(file: Path) -> dict[str, Any]:
    """The fields of a `config.json`.

    Raises:
        UsageError: it is no JSON, or has no model type.
    """
    try:
        # Some editors write a byte order mark.
        fields = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise UsageError(f"{file} is not a Hugging Face config: it has no model_type")
    if not isinstance(fields.get("quantization_config") or {}, dict):
        raise UsageError(f"{file}: quantization_config is no object")
    return fields


def no_such_type(file: Path, fields: Mapping[str, Any], model_types: Iterable[str]) -> str:
    """A message that transformers has no model of the type that the config in `file` names."""
    model_type = fields["model_type"]
    said = f"{file} has model_type {model_type!r}, which transformers {importlib.metadata.version('transformers')} does not have"
    if fields.get("auto_map"):
        return (
            f"{said}: its code comes with its weights (auto_map), and such code is not run from a config; "
            "estimate and plan take a script that makes the model"
        )
    return said + words_of_nearest(str(model_type), model_types)


def nearest_to(name: str, model_types: Iterable[str]) -> str:
    """The names that are spelled most alike, as text."""
    known = dict.fromkeys((*presets(), *sorted(word for word in model_types if word.islower())))
    return ", ".join(difflib.get_close_matches(name, known, n=NUM_NEAREST)) or "none"


def words_of_nearest(name: str, model_types: Iterable[str], source: str = "") -> str:
    """`; nearest: gpt2, gptj`, the script or the function that `source` may stand for, and nothing where none is near."""
    if source and Path(f"{source}.py").is_file():
        return f"; nearest: {source}.py"
    nearest = nearest_to(name, model_types)
    if nearest == "none":
        # As `%tightfit estimate workload` in a notebook, beside a function of that name.
        return f"; a function is given with its file: FILE.py:{source}" if source.isidentifier() else ""
    return f"; nearest: {nearest}"


def possible_model_types() -> frozenset[str]:
    """All words that may be names of model types, more than there are; empty where transformers is not installed."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    folder = Path(found.origin).parent / "models" / "auto"
    texts = [(folder / name).read_text(encoding="utf-8") for name in _FILES if (folder / name).is_file()]
    return frozenset(word for text in texts for word in re.findall(r"[\"']([\w.-]+)[\"']", text))
