"""The collectives of a traced rank on a kind of node: seconds of each, and what NCCL's communicators hold."""

import numpy as np
import numpy.typing as npt

from tightfit.cost.collectives import Collective, Group, collective_seconds
from tightfit.cost.communicators import MESSAGES, RINGS, communicator_bytes
from tightfit.devices.node import Node
from tightfit.tape import CollectiveKind, Tape

# A root's link passes what all others send or receive, one after the other; a reduction to one rank is half of one to all.
_PRICED_AS: dict[CollectiveKind, Collective] = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
    CollectiveKind.BROADCAST: "broadcast",
    CollectiveKind.REDUCE: "reduce_scatter",
    CollectiveKind.GATHER: "all_to_all",
    CollectiveKind.SCATTER: "all_to_all",
    CollectiveKind.SEND: "send",
    CollectiveKind.RECEIVE: "send",
}
_BARRIER_BYTES = 4.0


def group_of(tape: Tape, communicator: int, node: Node) -> Group:
    """How the ranks of a communicator lie on nodes: those of one node, or of one domain of NVLink, share its links."""
    ranks = np.array(tape.communicators[communicator])
    own = tape.num_ranks // tape.num_nodes
    linked = max(own, node.num_linked if node.num_linked > node.num_gpus else 0)
    _, counts = np.unique(ranks // linked, return_counts=True)
    return Group(size=len(ranks), per_node=int(counts.max()))


def traced_collective_seconds(tape: Tape, node: Node) -> npt.NDArray[np.float64]:
    """Seconds of each collective of `tape` on its own: shape `(len(tape.collectives),)`."""
    table = tape.collectives
    groups = [group_of(tape, number, node) for number in range(len(tape.communicators))]
    rows = np.stack(
        [table.kind.astype(np.int64), table.num_bytes, table.group.astype(np.int64), table.peer.astype(np.int64)],
        axis=1,
    )
    distinct, place = np.unique(rows, axis=0, return_inverse=True)
    found = [
        _seconds(CollectiveKind(kind), num_bytes, groups[group], _pair(tape, peer, node), node)
        for kind, num_bytes, group, peer in distinct.tolist()
    ]
    return np.array(found, dtype=np.float64)[place.reshape(-1)] if found else np.zeros(0)


def _seconds(kind: CollectiveKind, num_bytes: int, group: Group, pair: Group, node: Node) -> float:
    if kind is CollectiveKind.BARRIER:
        return collective_seconds("all_reduce", _BARRIER_BYTES, group, node)
    is_message = kind in (CollectiveKind.SEND, CollectiveKind.RECEIVE)
    return collective_seconds(_PRICED_AS[kind], num_bytes, pair if is_message else group, node)


def _pair(tape: Tape, peer: int, node: Node) -> Group:
    """This rank and another one, in one node or not."""
    own = tape.num_ranks // tape.num_nodes
    linked = max(own, node.num_linked if node.num_linked > node.num_gpus else 0)
    return Group(size=2, per_node=2 if peer < 0 or peer // linked == tape.rank // linked else 1)


def traced_communicator_bytes(tape: Tape, node: Node) -> int:
    """What the communicators that the traced rank has used hold on its GPU."""
    table, found = tape.collectives, 0
    for number in range(len(tape.communicators)):
        chosen = table.group == number
        kinds = {CollectiveKind(kind).name.lower() for kind in np.unique(table.kind[chosen]).tolist()}
        kinds = {"all_reduce" if kind == "barrier" else kind for kind in kinds} & (RINGS | MESSAGES)
        sent, received = _peers(tape, chosen, len(tape.communicators[number]))
        found += communicator_bytes(node, group_of(tape, number, node), kinds, num_peers=sent, num_sources=received)
    return found


def _peers(tape: Tape, chosen: npt.NDArray[np.bool_], size: int) -> tuple[int, int]:
    """How many ranks the traced one sends messages to in the collectives `chosen`, and how many it receives some from."""
    table = tape.collectives
    sent, received = set[int](), set[int]()
    for kind, peer in {*zip(table.kind[chosen].tolist(), table.peer[chosen].tolist(), strict=True)}:
        match CollectiveKind(kind):
            case CollectiveKind.ALL_TO_ALL:
                return size, size
            case CollectiveKind.SEND:
                sent.add(peer)
            case CollectiveKind.RECEIVE:
                received.add(peer)
            case CollectiveKind.SCATTER | CollectiveKind.GATHER:
                others = {-1 - n for n in range(size - 1)} if peer == tape.rank else {peer}
                # A root scatters to all others and gathers from them.
                is_sender = (kind == CollectiveKind.SCATTER) == (peer == tape.rank)
                (sent if is_sender else received).update(others)
    return len(sent), len(received)
