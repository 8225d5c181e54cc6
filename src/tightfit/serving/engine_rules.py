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
from tightfit.units import GIB, MIB

ENGINES = ("vllm", "sglang")
_LARGE_BYTES = 70 * GIB
# Above this length engines of the "long" rule cut prompts into chunks.
_LONG_TOKENS = 32_768
_LARGEST_GRAPH, _LARGEST_WHOLE = 512, 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """The rules of one version of an engine; the fields are described in `engines/vllm.toml`, those of SGLang in `engines/sglang.toml`. `newest` is the newest version that is known, where an even newer one was asked for."""

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
    sorts_on: Literal["first", "all", "none"]
    graphs: Literal["whole", "pieces", "both"]
    charges_graphs: bool
    source: str
    large_tokens_chunked: int = 0
    large_num_seqs: int = 0
    admits_whole: bool = False
    graph_layer_kib: int = 0
    fused: tuple[tuple[str, ...], ...] = ()
    classes: tuple[tuple[int, int, int, int], ...] = ()
    rotary_item_bytes: int = 0
    newest: str = ""

    @property
    def has_static_share(self) -> bool:
        """Whether its share of the card is of weights and cache alone."""
        return bool(self.classes)

    def num_graphs(self, max_num_seqs: int, device: Device, degree: int) -> int:
        """How many CUDA graphs are captured: of steps in pieces between attention, and of decoding steps as a whole."""
        if self.classes:
            largest = self.largest_graph(device, degree)
            found = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32)]
            return sum(size <= largest for size in found)
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

    def largest_graph(self, device: Device, degree: int) -> int:
        """Requests of the largest batch with a CUDA graph of an engine with classes of cards."""
        _, _, few, many = self._class_of(device)
        return few if degree < 4 else many

    def profiled_rows(self, device: Device, degree: int, max_num_seqs: int) -> int:
        """Of how many requests a next token is chosen in the largest batch that counts."""
        return min(max_num_seqs, self.largest_graph(device, degree)) if self.classes else max_num_seqs

    def share_of(self, device: Device, degree: int, num_tokens: int) -> float:
        """The default share of the card, for batches of so many tokens."""
        if not self.classes:
            return self.utilization
        whole = device.capacity_bytes / MIB
        kept = 512 + 1.5 * max(num_tokens, 2048) + 2 * self.largest_graph(device, degree) + 128 * degree
        if whole > 60 * 1024:
            kept = max(kept, 10 * 1024)
        return round((whole - kept) / whole, 3)

    def _class_of(self, device: Device) -> tuple[int, int, int, int]:
        return next((each for each in self.classes if device.capacity_bytes / MIB < each[0]), self.classes[-1])

    def chunk_tokens(self, device: Device) -> int:
        """The default of `max_num_batched_tokens` where prompts are cut."""
        if self.classes:
            return self._class_of(device)[1]
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
        raise UsageError(f"--engine {engine}: its start-up is not known; one of vllm, sglang, transformers, llama.cpp")
    content = _content(engine)
    tables = content["version"]
    common = {"engine": engine, **{name: value for name, value in content.items() if name != "version"}}
    wanted = None if version is None else parsed_version(version)
    fitting = [table for table in tables if wanted is None or parsed_version(table["from"]) <= wanted]
    if not fitting:
        raise UsageError(f"--engine-version {version}: {engine} is known from {tables[0]['from']} on")
    table: dict[str, Any] = {**common, **fitting[-1]}
    first = table.pop("from")
    for name in ("fused", "classes"):
        table[name] = tuple(tuple(row) for row in table.get(name, ()))
    return EngineRules(**table, version=version or first, newest=first if is_beyond(wanted, tables[-1]["from"]) else "")


def is_beyond(wanted: tuple[int, ...] | None, newest: str) -> bool:
    """Whether a version is newer than the newest that is known, and no patch of it."""
    return wanted is not None and wanted[:2] > parsed_version(newest)[:2]


def newest_words(engine: str, newest: str) -> list[str]:
    """What is assumed of such a version."""
    return [f"the rules of {engine} {newest}, the newest that are known, are used"] if newest else []


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
