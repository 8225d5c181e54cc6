"""Bytes of a model's weights in a format, whole or the share of one rank of several. The formats are data: `weight_formats.toml`."""

import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.errors import UsageError
from tightfit.serving.model.model_facts import ModelFacts, WeightRow

# Styles of transformers' tensor-parallel plans that leave a rank with a share of the tensor; all others keep it whole.
_CUT_STYLES = frozenset(
    {"colwise", "rowwise", "packed_colwise", "packed_rowwise", "colwise_rep", "rowwise_rep", "colwise_gather_output"}
)
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
# Weights for which ggml's K types take their scales together.
_SUPER_BLOCK = 256
# Products that choose experts are in float32 in a file, as are vectors (conversion/base.py of llama.cpp).
_ROUTERS = (".mlp.gate", ".block_sparse_moe.gate", ".router", ".mlp.shared_expert_gate")
_ALIASES = {
    "compressed-tensors": "int8",
    "fbgemm_fp8": "fp8",
    "w8a8": "int8",
    "bnb": "bitsandbytes",
    "bnb-4bit": "bitsandbytes",
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "marlin": "gptq",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """One format; sizes in bits, see `weight_formats.toml`. `left_out` are modules that a checkpoint keeps in the model's own type: parts of their path, or
    a regular expression after `re:`. `loss` is what is published of the loss of quality."""

    name: str
    bits: float
    keeps: tuple[str, ...]
    source: str
    group: int = 0
    group_bits: float = 0.0
    row_bits: float = 0.0
    input_bits: float = 0.0
    tensor_bits: float = 0.0
    embedding_bits: float = 0.0
    head_bits: float = 0.0
    computes_in: str = ""
    bandwidth: float = 1.0
    flops: float = 1.0
    fused_rows: int = 0
    written_copies: int = 1
    kept_copies: int = 0
    host_microseconds: float = 0.0
    of_files: bool = False
    raised: tuple[tuple[str, str], ...] = ()
    raised_bits: float = 0.0
    uneven_bits: float = 0.0
    uneven_raised_bits: float = 0.0
    uneven_head_bits: float = 0.0
    kernels: str = ""
    loss: str = ""
    left_out: tuple[str, ...] = ()

    def num_bytes(self, row: WeightRow, degree: int = 1) -> int:
        """Bytes of `row` in this format on one of `degree` ranks."""
        if self.of_files and (len(row.shape) < 2 or _path(row).endswith(_ROUTERS)):
            return row.num_elements * 4 // _share(row, degree)
        if row.role == "other" or row.role in self.keeps or len(row.shape) < 2 or self._leaves_out(row):
            return row.num_bytes // _share(row, degree)
        is_uneven = self.uneven_bits > 0 and row.shape[-1] % _SUPER_BLOCK > 0
        whole = {"embedding": self.embedding_bits, "head": self.head_bits}.get(row.role, 0.0)
        if row.shape[-1] % _SUPER_BLOCK:
            whole = {"embedding": self.uneven_bits, "head": self.uneven_head_bits}.get(row.role, 0.0) or whole
        if whole:
            return math.ceil(row.num_elements * whole / 8) // _share(row, degree)
        *others, num_inputs = row.shape
        num_rows = math.prod(others)
        bits = (
            row.num_elements * self._of_module(row, is_uneven=is_uneven) + num_rows * self.row_bits + self.tensor_bits
        )
        bits += num_inputs * self.input_bits * math.prod(others[:-1])
        if self.group:
            bits += num_rows * math.ceil(num_inputs / self.group) * self.group_bits
        return math.ceil(bits / 8 / _share(row, degree))

    def _of_module(self, row: WeightRow, *, is_uneven: bool) -> float:
        """Bits of a weight of `row`, whose place among the layers decides where a file mixes types."""
        path, found = _path(row), _LAYER.search(row.name)
        rules = (rule for module, rule in self.raised if path.endswith(f".{module}"))
        rule = next(rules, "") if found is not None and row.num_layers else ""
        is_raised = found is not None and _is_raised(rule, int(found.group()), row)
        if is_uneven:
            return self.uneven_raised_bits if is_raised else self.uneven_bits
        return self.raised_bits if is_raised else self.bits

    def _leaves_out(self, row: WeightRow) -> bool:
        module = row.name.rpartition(".")[0]
        return any(
            re.match(name.removeprefix("re:"), module) is not None
            if name.startswith("re:")
            else f".{name}." in f".{module}."
            for name in self.left_out
        )


def _is_raised(rule: str, at: int, row: WeightRow) -> bool:
    """Whether `rule` (see `weight_formats.toml`) gives `row` more bits in the layer `at`."""
    number, eighth = row.num_layers, row.num_layers // 8
    if rule == "more":
        return at < eighth or at >= 7 * number // 8 or (at - eighth) % 3 == 2
    if rule == "grouped":
        # Four queries or more for each pair of key and value.
        return 4 * row.shape[-2] <= row.shape[-1]
    return at < {"first four": 4, "eighth": eighth}.get(rule, 0)


def _path(row: WeightRow) -> str:
    """The path of the module; of a parameter with a name of its own, as experts have them, that is part of it."""
    return row.name.removesuffix(".weight")


@functools.cache
def all_formats() -> dict[str, WeightFormat]:
    """The formats by name."""
    tables = tomllib.loads(Path(__file__).with_name("weight_formats.toml").read_text(encoding="utf-8"))
    return {name: _format(name, table) for name, table in tables.items()}


def _format(name: str, table: dict[str, Any]) -> WeightFormat:
    return WeightFormat(
        name=name, keeps=tuple(table.pop("keeps")), raised=tuple(table.pop("raised", {}).items()), **table
    )


def format_named(name: str | None) -> WeightFormat | None:
    """The format called `name` (also as engines and checkpoints call it); None for None and `none`.

    Raises:
        UsageError: it is not known.
    """
    if name is None or name.lower() == "none":
        return None
    known = all_formats()
    plain = name.lower()
    found = known.get(_ALIASES.get(plain, plain))
    if found is None:
        raise UsageError(f"--quantization {name}: this format's size is not known; one of none, {', '.join(known)}")
    return found


def is_of_files(name: str) -> bool:
    """Whether `name` is a type of GGUF, which llama.cpp reads.

    Raises:
        UsageError: it is not known.
    """
    found = format_named(name)
    return found is not None and found.of_files


def weights_bytes(facts: ModelFacts, of: WeightFormat | None, degree: int = 1) -> int:
    """Bytes of all weights on one of `degree` ranks; `of` None: in the type of the model."""
    return sum(row_bytes(row, of, degree) for row in facts.weights)


def row_bytes(row: WeightRow, of: WeightFormat | None, degree: int = 1) -> int:
    """Bytes of one weight on one of `degree` ranks."""
    return row.num_bytes // _share(row, degree) if of is None else of.num_bytes(row, degree)


def whole_rows(facts: ModelFacts) -> Sequence[WeightRow]:
    """Weights of matrix products that the model's tensor-parallel plan does not cut."""
    return [row for row in facts.weights if row.role == "linear" and row.cut not in _CUT_STYLES]


def _share(row: WeightRow, degree: int) -> int:
    if row.role in ("embedding", "head") and len(row.shape) == 2:
        # Engines cut both along the vocabulary, also where the plan of transformers does not.
        return degree
    if row.cut in _CUT_STYLES and (len(row.shape) > 1 or row.cut.startswith(("col", "packed_col"))):
        return min(degree, row.parts or degree)
    return 1
