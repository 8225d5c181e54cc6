"""One rank of a distributed script on the virtual GPU holds what the same rank of real processes holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.capture.targets import Script
from tightfit.capture.trace import trace
from tightfit.capture.world import World
from tightfit.errors import UsageError
from tightfit.tape import Category, CollectiveKind, EventKind, Tape

PROGRAM = Path(__file__).with_name("distributed_program.py")


def real_ranks(kind: str, folder: Path) -> list[dict[str, int]]:
    """What each of two real processes holds after two steps, on the host."""
    out = folder / "held"
    addressed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(PROGRAM),
        kind,
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120, env={**os.environ, **addressed})
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def held_at_the_end(tape: Tape) -> dict[str, int]:
    alive = set(tape.events.storage[tape.events.kind == EventKind.ALLOCATE].tolist())
    alive -= set(tape.events.storage[tape.events.kind == EventKind.FREE].tolist())
    wanted = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
    return {
        c.name: sum(int(tape.storages.num_bytes[i]) for i in alive if tape.storages.category[i] == c) for c in wanted
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_holds_the_bytes_of_the_real_one(kind: str, tmp_path: Path) -> None:
    real = real_ranks(kind, tmp_path)
    script = Script(path=str(PROGRAM), arguments=(kind, str(tmp_path / "none")))
    for rank, held in enumerate(real):
        tape = trace(script, label=kind, device="H100", num_steps=2, world=World(num_ranks=2, rank=rank)).tape
        assert held_at_the_end(tape) == held
        kinds = {CollectiveKind(k) for k in tape.collectives.kind.tolist()}
        expected = (
            {CollectiveKind.ALL_REDUCE} if kind == "ddp" else {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}
        )
        assert expected <= kinds
        assert tape.communicators == ((0, 1),)
    # Uneven shards: the two ranks differ where parameters are sharded, and only there.
    assert (real[0] == real[1]) is (kind == "ddp")


@pytest.mark.parametrize(("num_ranks", "num_nodes", "rank"), [(0, 1, 0), (8, 3, 0), (8, 0, 0), (8, 2, 8), (8, 2, -1)])
def test_ranks_that_do_not_exist_are_refused(num_ranks: int, num_nodes: int, rank: int) -> None:
    with pytest.raises(UsageError):
        World(num_ranks=num_ranks, num_nodes=num_nodes, rank=rank)
