"""The processes that a distributed program believes in: how many there are, and which of them is traced. No torch."""

import dataclasses
from collections.abc import Mapping, Sequence

from tightfit.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One process for each of `num_ranks` GPUs, on `num_nodes` machines with as many GPUs each, of which the process `rank` is traced.

    `received` are the objects that other ranks send it (`tightfit.capture.collectives.objects`), by their channels. With `ends_after`, a channel and a number, the process ends when it has sent that many
    objects there.

    Raises:
        UsageError: there are no such ranks or nodes.
    """

    num_ranks: int
    num_nodes: int = 1
    rank: int = 0
    received: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    ends_after: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise UsageError(f"--gpus {self.num_ranks}: give the number of GPUs of all nodes together, 1 or more")
        if self.num_nodes < 1 or self.num_ranks % self.num_nodes:
            raise UsageError(
                f"--nodes {self.num_nodes}: --gpus counts the GPUs of all nodes together, and {self.num_ranks} cannot be spread evenly over so many"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise UsageError(f"--rank {self.rank}: ranks go from 0 to {self.num_ranks - 1}")

    @property
    def ranks_per_node(self) -> int:
        """The GPUs, and processes, of one machine."""
        return self.num_ranks // self.num_nodes

    @property
    def local_rank(self) -> int:
        """The number of the traced process on its machine, which is that of its GPU."""
        return self.rank % self.ranks_per_node

    def environment(self) -> dict[str, str]:
        """What `torchrun` sets for the traced process (torch/distributed/elastic/agent/server/local_elastic_agent.py, `_start_workers`)."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.rank // self.ranks_per_node),
            "ROLE_RANK": str(self.rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": "tightfit",
        }
