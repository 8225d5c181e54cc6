"""GPU memory of NCCL's communicators: what each connection to a neighbour has in buffers, times channels, made when an algorithm is first used.

    connection   its receiver's buffers for LL (512 KiB), LL128 (4.7 MiB) and Simple (4 MiB) are 10 MiB, its sender's 2 MiB, in pages of 2 MiB (src/include/device.h, src/init.cc,
                 `computeBuffSizes`; src/transport/p2p.cc, `p2pSendSetup` and `p2pRecvSetup`; NVIDIA/nccl#1685 counts allocations of both sizes)
    ring         one connection for each channel; a tree as many again (src/graph/connect.cc). All-gathers and reduce-scatters take rings, all-reduces between nodes trees too
    NVLS         all-reduces inside of one node's switches: 16 channels of twice 1 MiB for each member (src/transport/nvls.cc, `nvlsBufferSetup`)
    messages     32 channels to and from each peer in the node (NVIDIA/nccl#1685: 3.28 GB more after the first all-to-all on 8 H100, 3.2 GB here), 128 MiB shared by all peers in other nodes;
                 what is scattered or gathered has a sender at one end and a receiver at the other
                 (src/transport/net.cc, `sharedBuffersInit`)

NCCL connects at first use where CUDA's virtual memory is (NCCL_RUNTIME_CONNECT, 2.22 and later). Over PCIe buffers are at the host or few: 30 to 60 MiB were measured for a communicator.
"""

from collections.abc import Collection

from tightfit.cost.collectives import Group
from tightfit.devices.node import Node
from tightfit.units import MIB

_RECEIVER_BYTES, _SENDER_BYTES = 10 * MIB, 2 * MIB
_CONNECTION_BYTES = _RECEIVER_BYTES + _SENDER_BYTES
_CHANNELS_IN_NODE = 24
_CHANNELS_OF_NODES = 16
_MESSAGE_CHANNELS = 32
_NVLS_BYTES_PER_MEMBER = 16 * 2 * MIB
_SHARED_BYTES = 128 * MIB
_ON_PCIE_BYTES = 48 * MIB

RINGS = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"})
MESSAGES = frozenset({"all_to_all", "send", "receive", "gather", "scatter"})


def communicator_bytes(
    node: Node, group: Group, kinds: Collection[str], *, num_peers: int | None = None, num_sources: int | None = None
) -> int:
    """GPU memory of the communicator of `group` on one of its ranks, that runs collectives of these kinds: those of `RINGS` and `MESSAGES`.

    `num_peers` are those that a rank sends messages to, by default all of the group, `num_sources` those that it receives some from, by default as many.
    """
    if group.size <= 1 or not (RINGS | MESSAGES).intersection(kinds):
        return 0
    if node.link == "pcie":
        return _ON_PCIE_BYTES
    found = 0
    is_on_switches = bool(node.nvls_bytes_per_second) and group.num_nodes == 1 and group.size > 2
    if RINGS.intersection(kinds) and not (is_on_switches and RINGS.intersection(kinds) == {"all_reduce"}):
        found += _CONNECTION_BYTES * (_CHANNELS_IN_NODE if group.num_nodes == 1 else _CHANNELS_OF_NODES)
    if "all_reduce" in kinds and is_on_switches:
        found += _NVLS_BYTES_PER_MEMBER * group.size
    elif "all_reduce" in kinds and group.num_nodes > 1:
        found += _CONNECTION_BYTES * _CHANNELS_OF_NODES
    if MESSAGES.intersection(kinds):
        peers = group.size if num_peers is None else num_peers
        sources = peers if num_sources is None else num_sources
        near = group.per_node if group.per_node > 1 else 0
        each = _SENDER_BYTES * min(peers, near) + _RECEIVER_BYTES * min(sources, near)
        found += _MESSAGE_CHANNELS * each
        found += _SHARED_BYTES if group.num_nodes > 1 else 0
    return found
