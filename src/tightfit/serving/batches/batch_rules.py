"""What engines of whole batches keep on a card, by version: data from `serving/engines/`."""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tightfit.errors import UsageError
from tightfit.serving.engine_rules import is_beyond, parsed_version

BATCH_ENGINES = ("transformers", "llama.cpp")
CACHES = ("dynamic", "static", "offloaded", "quantized", "fp8")
"""Kinds of the cache of `generate`, as its `cache_implementation` has them."""
_BUILD = "b"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """The rules of one version; the fields are described in the files of `serving/engines/`."""

    engine: str
    version: str
    source: str
    caches: tuple[str, ...] = ()
    copies: str = ""
    layers_on_card: int = 0
    quantized_bits: int = 0
    quantized_group: int = 0
    residual_tokens: int = 0
    micro_batch: int = 0
    context_step: int = 0
    embedding_at_host: bool = False
    output_first: bool = False
    logits_of_slots: bool = False
    mask_bytes: int = 0
    host_microseconds: tuple[float, ...] = (0.0, 0.0)
    newest: str = ""

    @classmethod
    def of(cls, engine: str, version: str | None) -> Self:
        """Those of `engine` at `version` ("4.46.0", or "b6900" of llama.cpp); by default the newest that are known.

        Raises:
            UsageError: the version is none, or from before the first that is known.
        """
        content = _content(engine)
        tables = content["version"]
        wanted = None if version is None else parsed_version(_numbered(version))
        fitting = [table for table in tables if wanted is None or parsed_version(table["from"]) <= wanted]
        if not fitting:
            raise UsageError(f"--engine-version {version}: {engine} is known from {_named(engine, tables[0])} on")
        table = {name: value for name, value in {**content, **fitting[-1]}.items() if name not in ("version", "from")}
        table |= {name: tuple(table[name]) for name in ("caches", "host_microseconds") if name in table}
        newest = _named(engine, tables[-1]) if is_beyond(wanted, tables[-1]["from"]) else ""
        return cls(engine=engine, version=version or _named(engine, fitting[-1]), newest=newest, **table)


def _numbered(version: str) -> str:
    return f"0.{version.removeprefix(_BUILD)}" if version.startswith(_BUILD) else version


def _named(engine: str, table: Mapping[str, Any]) -> str:
    return f"{_BUILD}{parsed_version(table['from'])[1]}" if engine == "llama.cpp" else str(table["from"])


@functools.cache
def _content(engine: str) -> Mapping[str, Any]:
    path = Path(__file__).parents[1] / "engines" / f"{engine}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))
