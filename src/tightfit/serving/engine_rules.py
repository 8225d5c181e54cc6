"""How an engine sizes its cache at start-up, by version: data from `engines/`, read into one frozen object."""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.units import GIB

ENGINES = ("vllm",)
_LARGE_BYTES = 70 * GIB
# Above this length engines of the "long" rule cut prompts into chunks.
_LONG_TOKENS = 32_768
_LARGEST_GRAPH, _LARGEST_WHOLE = 512, 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """The rules of one version of an engine; the fields are described in `engines/vllm.toml`."""

    engine: str
    version: str
    utilization: float
    block_tokens: int
    activation_peak: Literal["reserved", "allocated"]
    charges_context: bool
    chunked_prefill: Literal["off", "long", "on"]
    tokens_chunked: int
    tokens_whole: int
    num_seqs: int
    sorts_on: Literal["first", "all"]
    graphs: Literal["whole", "pieces", "both"]
    charges_graphs: bool
    source: str
    large_tokens_chunked: int = 0
    large_num_seqs: int = 0
    admits_whole: bool = False
    graph_layer_kib: int = 0
    fused: tuple[tuple[str, ...], ...] = ()

    def num_graphs(self, max_num_seqs: int) -> int:
        """How many CUDA graphs are captured: of steps in pieces between attention, and of decoding steps as a whole."""
        sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_GRAPH + 1, 16)]
        whole = sum(size <= min(max_num_seqs, _LARGEST_GRAPH) for size in sizes)
        pieces = sum(size <= min(2 * max_num_seqs, _LARGEST_GRAPH) for size in sizes)
        first = sum(size <= min(max_num_seqs, _LARGEST_WHOLE) for size in sizes)
        return {"whole": first, "pieces": pieces, "both": whole + pieces}[self.graphs]

    def chunked_above(self, asked: bool | None = None) -> int | None:
        """Prompts of requests that may be longer than so many tokens are cut into chunks, None: never. `asked` is what the user has said."""
        if asked is not None:
            return 0 if asked else None
        return {"on": 0, "long": _LONG_TOKENS, "off": None}[self.chunked_prefill]

    def is_chunked(self, max_model_len: int, asked: bool | None = None) -> bool:
        """Whether prompts are cut into chunks where requests may have that length."""
        above = self.chunked_above(asked)
        return above is not None and max_model_len > above

    def chunk_tokens(self, device: Device) -> int:
        """The default of `max_num_batched_tokens` where prompts are cut."""
        return self.large_tokens_chunked if self.large_tokens_chunked and _is_large(device) else self.tokens_chunked

    def batched_tokens(self, device: Device, max_model_len: int, *, is_chunked: bool) -> int:
        """The default of `max_num_batched_tokens`."""
        return self.chunk_tokens(device) if is_chunked else max(max_model_len, self.tokens_whole)

    def max_sequences(self, device: Device) -> int:
        """The default of `max_num_seqs`."""
        return self.large_num_seqs if self.large_num_seqs and _is_large(device) else self.num_seqs


def rules_of(engine: str, version: str | None = None) -> EngineRules:
    """The rules of `engine` at `version` ("0.8.5"); by default the newest that are known.

    Raises:
        UsageError: the engine is not known, or not that far back.
    """
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: its start-up is not known; one of vllm, transformers, llama.cpp")
    content = _content(engine)
    tables = content["version"]
    common = {"engine": engine, **{name: value for name, value in content.items() if name != "version"}}
    wanted = None if version is None else parsed_version(version)
    fitting = [table for table in tables if wanted is None or parsed_version(table["from"]) <= wanted]
    if not fitting:
        raise UsageError(f"--engine-version {version}: {engine} is known from {tables[0]['from']} on")
    table: dict[str, Any] = {**common, **fitting[-1]}
    first = table.pop("from")
    table["fused"] = tuple(tuple(names) for names in table.get("fused", ()))
    return EngineRules(**table, version=version or first)


def parsed_version(text: str) -> tuple[int, ...]:
    """`0.8.5.dev169` as (0, 8, 5).

    Raises:
        UsageError: the text begins with no version.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise UsageError(f"--engine-version {text}: write it as 0.8.5")
    return tuple(int(part or 0) for part in found.groups())


@functools.cache
def _content(engine: str) -> Mapping[str, Any]:
    return tomllib.loads((Path(__file__).parent / "engines" / f"{engine}.toml").read_text(encoding="utf-8"))


def _is_large(device: Device) -> bool:
    return device.capacity_bytes >= _LARGE_BYTES and "a100" not in device.name.lower()
