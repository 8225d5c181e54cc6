"""Several servers on one card: each with the least that serves its requests, all awake together, or one awake at a time while the others sleep."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tightfit.serving.host_memory import Sleep
from tightfit.serving.serving_estimate import ServingEstimate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedServer:
    """One of them: its estimate, with the least share of the card; why there is none in `why`."""

    model: str
    estimate: ServingEstimate | None
    why: str = ""

    @property
    def awake_bytes(self) -> int:
        """Bytes of the card while it serves: its share, and what its version does not count against that."""
        found = self.estimate
        if found is None:
            return 0
        share = int(found.capacity_bytes * found.settings.gpu_memory_utilization)
        context = 0 if found.non_torch_bytes >= found.context_bytes else found.context_bytes
        return share + context + (0 if found.counts_graphs else found.graph_bytes)

    @property
    def sleep(self) -> Sleep:
        """What it holds while it sleeps."""
        found = self.estimate
        if found is None or found.sleep is None:
            return Sleep(gpu_bytes=0, host_bytes=0, wake_seconds=0.0)
        return found.sleep


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedCard:
    """The servers on a card of so many bytes."""

    device: str
    capacity_bytes: int
    servers: tuple[SharedServer, ...]

    @property
    def is_known(self) -> bool:
        """Whether each of them fits the card by itself."""
        return all(server.estimate is not None for server in self.servers)

    @property
    def together_bytes(self) -> int:
        """All of them awake."""
        return sum(server.awake_bytes for server in self.servers)

    @property
    def in_turns_bytes(self) -> int:
        """The most of any turn: one is awake, and the others sleep."""
        asleep = sum(server.sleep.gpu_bytes for server in self.servers)
        return max((server.awake_bytes + asleep - server.sleep.gpu_bytes for server in self.servers), default=0)

    @property
    def host_bytes(self) -> int:
        """The most at the host in any turn: the weights of all but the smallest."""
        sizes = [server.sleep.host_bytes for server in self.servers]
        return sum(sizes) - min(sizes, default=0)

    @property
    def fits_together(self) -> bool:
        """Whether all can be awake."""
        return self.is_known and self.together_bytes <= self.capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether they can share the card, at least in turns."""
        return self.fits_together or (self.is_known and self.in_turns_bytes <= self.capacity_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a schema version."""
        return {
            "schema": 1,
            "fits": self.fits,
            "fits_together": self.fits_together,
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "together_bytes": self.together_bytes,
            "in_turns_bytes": self.in_turns_bytes,
            "host_bytes": self.host_bytes,
            "servers": [_row(server) for server in self.servers],
        }


def shared_card(device: str, capacity_bytes: int, servers: Sequence[SharedServer]) -> SharedCard:
    """The card with those servers."""
    return SharedCard(device=device, capacity_bytes=capacity_bytes, servers=tuple(servers))


def _row(server: SharedServer) -> dict[str, Any]:
    found = server.estimate
    return {
        "model": server.model,
        "why": server.why,
        "awake_bytes": server.awake_bytes,
        "asleep_bytes": server.sleep.gpu_bytes,
        "host_bytes": server.sleep.host_bytes,
        "wake_seconds": server.sleep.wake_seconds,
        "gpu_memory_utilization": None if found is None else found.settings.gpu_memory_utilization,
        "settings": None if found is None else dataclasses.asdict(found.settings),
    }
