"""Seconds of collectives of NCCL: the latency of their steps, plus bytes over the bus bandwidth of the slowest link that they cross.

A group is how many ranks take part and how many of those share a node's fast link. The model is that of NCCL's own tuner (`src/graph/tuning.cc`):

    ring     all-reduce 2(n-1) steps, all-gather and reduce-scatter n-1; each byte passes every link once (twice in an all-reduce)
    tree     all-reduce only: 2(ranks per node - 1) steps in the node and 2 log2(nodes) between nodes
    NVLS     all-reduce on one node: the switches add up, at the bandwidth of the node's entry

each with three protocols (LL: a quarter of the bandwidth and the least latency, LL128: 0.92 of it, Simple: all of it), of which the fastest is taken. A ring over
whole nodes has one channel per adapter, so its bus bandwidth is that of the GPU's own link or that of all the node's adapters together, whichever is less; groups
that have only some GPUs of a node share its adapters with the other groups of the same kind, which run at the same time. `all_to_all` sends n-1 of n parts
directly: those to other nodes through the share of the network that a GPU has. What NCCL holds is in `tightfit.cost.communicators`.
"""

import dataclasses
import math
from typing import Literal

from tightfit.devices.node import Node

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

# NCCL 2.19 to 2.23, src/graph/tuning.cc: baseLat and hwLat in us for LL, LL128 and Simple.
_PROTOCOLS = ("LL", "LL128", "Simple")
_SHARE = {"LL": 0.25, "LL128": 0.92, "Simple": 1.0}
_BASE = {"ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4}, "tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4}}
_STEP = {
    "nvlink": {
        "ring": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
        "tree": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0},
    },
    "pcie": {
        "ring": {"LL": 1.0, "LL128": 2.5, "Simple": 5.7},
        "tree": {"LL": 1.0, "LL128": 1.9, "Simple": 4.0},
    },
}
# Of a network step, relative to Simple on a ring, which is the latency that a node's entry has.
_NETWORK_STEP = {
    "ring": {"LL": 2.7 / 14, "LL128": 4.0 / 14, "Simple": 1.0},
    "tree": {"LL": 5.0 / 14, "LL128": 8.5 / 14, "Simple": 1.0},
}
# A tree sends and receives on the same links, which costs it a tenth (same file: busBw * .9).
_TREE_SHARE = 0.9
_NVLS_SECONDS = 25e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of a collective: `size` of them, `per_node` of them on each node. All groups of its kind run at once and share the network."""

    size: int
    per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the group spans."""
        return -(-self.size // self.per_node)

    @classmethod
    def of(cls, size: int, *, stride: int, num_linked: int) -> "Group":
        """The group of `size` ranks that are `stride` apart, where `num_linked` consecutive ranks share a fast link."""
        return cls(size=size, per_node=max(1, min(size, num_linked // stride)))


def collective_seconds(kind: Collective, num_bytes: float, group: Group, node: Node) -> float:
    """Seconds of one collective on a group that nothing disturbs but the groups of its kind.

    `num_bytes` is the whole: the result of an all-gather, the input of a reduce-scatter or all-reduce, what a rank sends in an all-to-all or a send.
    """
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    if kind == "send":
        return _send_seconds(num_bytes, group, node)
    if kind == "all_to_all":
        return _all_to_all_seconds(num_bytes, group, node)
    found = [_seconds("ring", protocol, kind, num_bytes, group, node) for protocol in _PROTOCOLS]
    if kind == "all_reduce":
        found += [_seconds("tree", protocol, kind, num_bytes, group, node) for protocol in _PROTOCOLS]
        if node.nvls_bytes_per_second and group.num_nodes == 1 and group.size > 2:
            factor = 2 * (group.size - 1) / group.size
            found.append(_NVLS_SECONDS + factor * num_bytes / node.nvls_bytes_per_second)
    return min(found)


def bus_bytes_per_second(group: Group, node: Node) -> float:
    """The bus bandwidth of a ring over `group`: of the GPU's link, or of the share of the node's network that the group has."""
    if group.num_nodes == 1:
        return node.ring_bytes_per_second
    return min(node.ring_bytes_per_second, _network_share(group, node))


def _network_share(group: Group, node: Node) -> float:
    return node.network_bytes_per_second * min(1.0, group.per_node / node.num_gpus)


def _seconds(
    algorithm: Literal["ring", "tree"], protocol: str, kind: Collective, num_bytes: float, group: Group, node: Node
) -> float:
    num_nodes, passes = group.num_nodes, 2 if kind == "all_reduce" else 1
    step = _STEP["pcie" if node.link == "pcie" else "nvlink"][algorithm][protocol] * 1e-6
    network = node.network_latency_seconds * _NETWORK_STEP[algorithm][protocol]
    if algorithm == "tree":
        num_network = 2 * math.log2(num_nodes) if num_nodes > 1 else 0.0
        latency = 2 * (group.per_node - 1) * step + num_network * network
    else:
        num_network = passes * (num_nodes - 1)
        latency = (passes * (group.size - 1) - num_network) * step + num_network * network
    rate = bus_bytes_per_second(group, node) * _SHARE[protocol] * (_TREE_SHARE if algorithm == "tree" else 1.0)
    on_links = passes * (group.size - 1) / group.size if algorithm == "ring" else passes
    return _BASE[algorithm][protocol] * 1e-6 + latency + on_links * num_bytes / rate


def _all_to_all_seconds(num_bytes: float, group: Group, node: Node) -> float:
    part = num_bytes / group.size
    inside, outside = (group.per_node - 1) * part, (group.size - group.per_node) * part
    seconds = inside / node.ring_bytes_per_second
    if outside:
        # Each GPU sends through its own share of the adapters.
        seconds = max(seconds, outside / (node.network_bytes_per_second / node.num_gpus))
    latency = node.network_latency_seconds if outside else 0.0
    return _BASE["ring"]["Simple"] * 1e-6 + latency + seconds


def _send_seconds(num_bytes: float, group: Group, node: Node) -> float:
    if group.per_node > 1:
        return _BASE["ring"]["Simple"] * 1e-6 + num_bytes / node.ring_bytes_per_second
    rate = node.network_bytes_per_second / node.num_gpus
    return (
        _BASE["ring"]["Simple"] * 1e-6
        + node.network_latency_seconds
        + num_bytes / min(rate, node.ring_bytes_per_second)
    )
