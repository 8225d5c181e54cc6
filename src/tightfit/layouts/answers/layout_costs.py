"""What a layout costs: prices per hour, tokens for the money, and how long a whole training takes.

Prices are the user's, as a number per GPU or a TOML file of nodes and GPUs: list prices of clouds change, and few pay them. Whole nodes are paid for.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightfit.devices.catalogue import words
from tightfit.devices.node import Node
from tightfit.devices.nodes import nodes_for
from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file

_TABLES = ("per_node_hour", "per_gpu_hour")
_SECONDS_PER_HOUR = 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a node, or of a GPU where `is_per_gpu`, in an hour, in whatever currency it was given."""

    amount: float
    is_per_gpu: bool

    def per_hour(self, node: Node, num_gpus: int) -> float:
        """What `num_gpus` in nodes of this kind cost in an hour."""
        return self.amount * (num_gpus if self.is_per_gpu else nodes_for(node, num_gpus))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """What a layout costs that goes through `rate` tokens (or examples) per second; None of what was not asked for."""

    rate: float
    price_per_hour: float | None = None
    total: float | None = None
    deadline_seconds: float | None = None

    @property
    def per_price(self) -> float | None:
        """Tokens (or examples) for one unit of the currency."""
        return None if not self.price_per_hour else self.rate * _SECONDS_PER_HOUR / self.price_per_hour

    @property
    def total_seconds(self) -> float | None:
        """How long all of `total` takes, with nothing lost to restarts, evaluations and saving."""
        return None if self.total is None else self.total / self.rate

    @property
    def total_price(self) -> float | None:
        """What all of `total` costs."""
        if self.total_seconds is None or self.price_per_hour is None:
            return None
        return self.total_seconds / _SECONDS_PER_HOUR * self.price_per_hour

    @property
    def meets_deadline(self) -> bool:
        """Whether it is done in time; with no deadline it is."""
        if self.deadline_seconds is None or self.total_seconds is None:
            return True
        return self.total_seconds <= self.deadline_seconds

    def to_json(self) -> dict[str, Any]:
        """The figures; those that were not asked for are null."""
        return {
            "price_per_hour": self.price_per_hour,
            "per_price": self.per_price,
            "total_seconds": self.total_seconds,
            "total_price": self.total_price,
            "meets_deadline": self.meets_deadline,
        }


def price_of(text: str, node: Node, card_name: str) -> Price:
    """The price that `text` gives for this kind of node: a number per GPU and hour, or a TOML file with the tables `per_node_hour` and `per_gpu_hour`.

    Raises:
        UsageError: it is no number above 0, the file cannot be read, or has no price for the node or its GPU.
    """
    if not text.endswith(".toml"):
        return Price(amount=_positive(text, "--price"), is_per_gpu=True)
    tables = _read(Path(text))
    names = {words(name) for name in (node.name, *node.aliases)}
    for name, amount in tables.get("per_node_hour", {}).items():
        if words(name) in names:
            return Price(amount=_positive(amount, f"{text}, per_node_hour, {name}"), is_per_gpu=False)
    for name, amount in tables.get("per_gpu_hour", {}).items():
        if words(name) == words(card_name):
            return Price(amount=_positive(amount, f"{text}, per_gpu_hour, {name}"), is_per_gpu=True)
    raise UsageError(
        f'--price {text}: it has no price of {node.name} nor of {card_name}; add "{node.name}" to its table per_node_hour, or "{card_name}" to per_gpu_hour'
    )


def _read(path: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--price: {no_file(str(path))}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--price {path}: the file cannot be read: {error}") from error
    wrong = [key for key, table in content.items() if key not in _TABLES or not isinstance(table, dict)]
    if wrong:
        raise UsageError(f"--price {path}: {wrong[0]!r} is not one of its tables, {' and '.join(_TABLES)}")
    return content


def _positive(value: object, where: str) -> float:
    try:
        amount = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
    except ValueError:
        amount = 0.0
    if not 0.0 < amount < float("inf"):
        raise UsageError(f"{where}: {value} is no price: give a number above 0, per hour")
    return amount
