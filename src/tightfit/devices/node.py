"""A node as numbers: how many GPUs it has, what links them to each other, and what links nodes.

A `Node` is plain frozen data, as a `Device` is. The figures are limits in one direction and the share of them that NCCL reaches as bus bandwidth.
"""

import dataclasses
from typing import Literal, get_args

GpuLinkKind = Literal["nvswitch", "nvlink", "pcie"]
NetworkKind = Literal["infiniband", "efa", "ethernet"]

GPU_LINK_KINDS: tuple[str, ...] = get_args(GpuLinkKind)
NETWORK_KINDS: tuple[str, ...] = get_args(NetworkKind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of GPUs. `num_linked` GPUs share the fast link: those of the node, or of a rack that is one NVLink domain.

    `gpu_bytes_per_second` is the limit of a GPU in one direction and `ring_bytes_per_second` the bus bandwidth that a ring of NCCL reaches on it;
    `nvls_bytes_per_second` that of an all-reduce inside the switches, 0 without. `network_bytes_per_second` is what all adapters of the node reach together, in one direction.
    """

    name: str
    aliases: tuple[str, ...]
    cards: tuple[str, ...]
    num_gpus: int
    num_linked: int
    link: GpuLinkKind
    gpu_bytes_per_second: float
    ring_bytes_per_second: float
    nvls_bytes_per_second: float
    network_kind: NetworkKind
    network_bytes_per_second: float
    network_latency_seconds: float
    source: tuple[str, ...]
