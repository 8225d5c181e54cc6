"""The catalogue of nodes, and the node that a GPU is found in.

Nodes are described in the TOML files of `node_types`, or in one of your own with the same keys at the top level (`--node FILE.toml`). Names are
compared as those of GPUs are. A GPU that several nodes have is taken to be in the first of them: clouds come after complete systems.
"""

import functools
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tightfit.devices.catalogue import words
from tightfit.devices.device import Device
from tightfit.devices.node import GPU_LINK_KINDS, NETWORK_KINDS, GpuLinkKind, NetworkKind, Node
from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file

_FOLDER = Path(__file__).with_name("node_types")
_FILES = ("nvidia_systems.toml", "clouds.toml", "boards.toml")
_ANY_CARD = "*"
_KEYS = {
    "name": str,
    "aliases": list,
    "cards": list,
    "gpus": int,
    "domain": int,
    "link": str,
    "gpu_link": (int, float),
    "gpu_reached": (int, float),
    "nvls": (int, float),
    "network_kind": str,
    "network": (int, float),
    "network_reached": (int, float),
    "network_latency_us": (int, float),
    "source": list,
}
_OPTIONAL: Mapping[str, Any] = {"aliases": [], "cards": [_ANY_CARD], "domain": 0, "gpu_link": 0.0, "nvls": 0.0}


@functools.cache
def all_nodes() -> tuple[Mapping[str, Any], ...]:
    """The tables of all nodes, in the order of the catalogue."""
    tables = []
    for name in _FILES:
        content = tomllib.loads((_FOLDER / name).read_text(encoding="utf-8"))
        tables += [_checked(table, where=f"{name}, {table['name']}") for table in content["node"]]
    return tuple(tables)


def node_of(card: Device, text: str | os.PathLike[str] | None = None) -> Node:
    """The node that `text` names (or describes: a path that ends in `.toml`), with GPUs `card`; by default the first one that has such GPUs.

    Raises:
        UsageError: no node has that name, the file cannot be read, or the node has other GPUs.
    """
    if text is not None and str(text).endswith(".toml"):
        return _node(_read(Path(text)), card)
    tables = all_nodes()
    if text is None:
        named = [table for table in tables if card.name in table["cards"]]
        return _node((named or [t for t in tables if _ANY_CARD in t["cards"]])[0], card)
    for table in tables:
        if words(str(text)) in [words(name) for name in (table["name"], *table["aliases"])]:
            if card.name not in table["cards"] and _ANY_CARD not in table["cards"]:
                raise UsageError(f"--node {text}: {table['name']} has {' or '.join(table['cards'])}, not {card.name}")
            return _node(table, card)
    raise UsageError(
        f"--node {text}: no such node; one of {', '.join(table['name'] for table in tables)}, or a TOML file"
    )


def nodes_for(kind: Node, num_gpus: int, num_nodes: int | None = None) -> int:
    """How many nodes of one kind `num_gpus` are in: `num_nodes`, or by default the fewest that hold them, with as many in each.

    Raises:
        UsageError: they cannot be spread evenly over so many, or a node does not hold its share.
    """
    if num_nodes is None:
        fewest = -(-num_gpus // kind.num_gpus)
        return next(n for n in range(fewest, num_gpus + 1) if num_gpus % n == 0)
    if num_nodes < 1 or num_gpus % num_nodes:
        raise UsageError(
            f"--nodes {num_nodes}: --gpus counts the GPUs of all nodes together, and {num_gpus} cannot be spread evenly over so many"
        )
    if num_gpus // num_nodes > kind.num_gpus:
        raise UsageError(
            f"--gpus {num_gpus} on --nodes {num_nodes} are {num_gpus // num_nodes} a node, and {kind.name} has {kind.num_gpus}"
        )
    return num_nodes


def _node(table: Mapping[str, Any], card: Device) -> Node:
    # A card in a slot has the link that it has: the catalogue of GPUs knows it.
    gpu_bytes_per_second = table["gpu_link"] * 1e9 or card.link.bytes_per_second
    return Node(
        name=table["name"],
        aliases=tuple(table["aliases"]),
        cards=tuple(table["cards"]),
        num_gpus=table["gpus"],
        num_linked=table["domain"] or table["gpus"],
        link=cast(GpuLinkKind, table["link"]),
        gpu_bytes_per_second=gpu_bytes_per_second,
        ring_bytes_per_second=gpu_bytes_per_second * table["gpu_reached"],
        nvls_bytes_per_second=table["nvls"] * 1e9,
        network_kind=cast(NetworkKind, table["network_kind"]),
        network_bytes_per_second=table["network"] * 1e9 * table["network_reached"],
        network_latency_seconds=table["network_latency_us"] * 1e-6,
        source=tuple(table["source"]),
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the node file: {no_file(str(path))}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the node file {path} cannot be read: {error}") from error
    return _checked(content, where=str(path))


def _checked(table: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    full: dict[str, Any] = {**_OPTIONAL, **table}
    faults = [f"unknown key {key!r}" for key in table if key not in _KEYS]
    faults += [f"{key} is missing" for key in _KEYS if key not in full]
    faults += [
        f"{key} = {full[key]!r} is not what it must be"
        for key, kind in _KEYS.items()
        if key in full and (not isinstance(full[key], kind) or isinstance(full[key], bool))
    ]
    if not faults:
        positive = ("gpus", "gpu_reached", "network", "network_reached", "network_latency_us")
        faults += [f"{key} = {full[key]!r} must be above 0" for key in positive if not full[key] > 0]
        faults += [
            f"{key} = {full[key]!r} must be one of {', '.join(known)}"
            for key, known in (("link", GPU_LINK_KINDS), ("network_kind", NETWORK_KINDS))
            if full[key] not in known
        ]
    if faults:
        raise UsageError(f"{where}: {'; '.join(faults)}")
    return full
