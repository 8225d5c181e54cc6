"""One rank of a distributed script on the virtual GPU holds what the same rank of real processes holds."""

import json
from pathlib import Path

import pytest
from tests.forked_python import forked_python

from tightfit.capture.collectives.world import World
from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import trace
from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.simulate.peak import estimate_peak
from tightfit.tape import Category, CollectiveKind, EventKind, Tape
from tightfit.units import format_bytes

PROGRAM = Path(__file__).with_name("distributed_program.py")

TWO_RANKS = """
import multiprocessing, runpy, sys
import torch.distributed as dist
import torch.distributed.fsdp, torch.distributed.optim, torch.distributed.pipelining, torch.distributed.tensor

store, *words = sys.argv[1:]
join = dist.init_process_group

def run(rank):
    dist.init_process_group = lambda kind: join(kind, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")

ranks = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(2)]
for each in ranks:
    each.start()
for each in ranks:
    each.join()
sys.exit(any(each.exitcode for each in ranks))
"""
EXPECTED = {
    "ddp": {CollectiveKind.ALL_REDUCE},
    "fsdp1": {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER},
    "fsdp2": {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER},
    "zero": {CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST},
    "pipeline": {CollectiveKind.SEND, CollectiveKind.RECEIVE},
}
"""The ways to shard, and some of the collectives of each."""


@pytest.fixture(scope="module")
def real_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    """What each of two real processes holds after two steps, on the host, by the way to shard."""
    out = tmp_path_factory.mktemp("real") / "held"
    words = (f"{out}.store", str(PROGRAM), ",".join(EXPECTED), str(out))
    forked_python("-c", TWO_RANKS, *words, env={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, check=True)
    return {kind: [json.loads(Path(f"{out}.{kind}.{rank}").read_text()) for rank in range(2)] for kind in EXPECTED}


def held_at_the_end(tape: Tape) -> dict[str, int]:
    alive = set(tape.events.storage[tape.events.kind == EventKind.ALLOCATE].tolist())
    alive -= set(tape.events.storage[tape.events.kind == EventKind.FREE].tolist())
    wanted = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
    return {
        c.name: sum(int(tape.storages.num_bytes[i]) for i in alive if tape.storages.category[i] == c) for c in wanted
    }


# The second rank of those whose ranks differ: it has the shorter shards, and what a stage receives.
@pytest.mark.parametrize(("kind", "rank"), [("ddp", 0), ("fsdp1", 1), ("fsdp2", 1), ("zero", 1), ("pipeline", 1)])
def test_a_rank_holds_the_bytes_of_the_real_one(
    kind: str, rank: int, real_ranks: dict[str, list[dict[str, int]]], tmp_path: Path
) -> None:
    real = real_ranks[kind]
    script = Script(path=str(PROGRAM), arguments=(kind, str(tmp_path / "none")))
    tape = trace(script, label=kind, device="H100", num_steps=2, world=World(num_ranks=2, rank=rank)).tape
    assert held_at_the_end(tape) == real[rank]
    assert {CollectiveKind(k) for k in tape.collectives.kind.tolist()} >= EXPECTED[kind]
    assert tape.communicators == ((0, 1),)
    assert (real[0] == real[1]) is (kind == "ddp")


def test_a_process_that_makes_a_group_by_itself_is_the_only_rank() -> None:
    """As where a script spawns a process for each GPU, and there is one. DistributedDataParallel's own code would read the data of weights."""
    script = Script(path=str(PROGRAM), arguments=("ddp", "none"))
    tape = trace(script, label="ddp", device="H100", num_steps=1).tape
    reduced = tape.collectives.num_bytes[tape.collectives.kind == CollectiveKind.ALL_REDUCE]
    assert (reduced.tolist(), tape.num_ranks) == ([4 * 33_217], 1)
    estimate = estimate_peak(tape, find("H100"))
    assert estimate.at_peak["communication"] > 0
    assert sum(estimate.at_peak.values()) == estimate.peak.device_bytes


@pytest.mark.parametrize(("num_ranks", "num_nodes", "rank"), [(0, 1, 0), (8, 3, 0), (8, 0, 0), (8, 2, 8), (8, 2, -1)])
def test_ranks_that_do_not_exist_are_refused(num_ranks: int, num_nodes: int, rank: int) -> None:
    with pytest.raises(UsageError):
        World(num_ranks=num_ranks, num_nodes=num_nodes, rank=rank)


def test_the_estimate_of_a_rank_has_collectives_and_their_buffers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--device", "H100", "--gpus", "16", "--steps", "1", "--json"]
    kept = [str(tmp_path / "ddp.npz"), str(tmp_path / "ddp.pickle")]
    words = ["--save-tape", kept[0], "--save-recording", kept[1]]
    assert run(["estimate", str(PROGRAM), *asked, *words, "--", "ddp", "none"]) == 0
    found = json.loads(capsys.readouterr().out)
    for path in kept:
        # A report and a diagnosis count the communicators too.
        assert run(["report", path, "--format", "json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["peak_reserved_bytes"] + summary["context_bytes"] == found["peak"]["device_bytes"]
        assert run(["doctor", path]) == 0
        assert f"{format_bytes(found['peak']['device_bytes'])} with the CUDA context" in capsys.readouterr().out
    # A DGX H100 has eight; in one node of sixteen collectives would be ten times as fast as they are.
    assert found["nodes"] == 2
    assert run(["estimate", str(PROGRAM), *asked, "--nodes", "1", "--", "ddp", "none"]) == 2
    assert "DGX H100 has 8" in capsys.readouterr().err
    (reduced,) = [c for c in found["collectives"] if c["kind"] == "all_reduce"]
    # The gradients, 33,217 numbers of 4 bytes.
    assert (reduced["bytes"], reduced["group_size"]) == (4 * 33_217, 16)
    assert 0 < reduced["seconds"] <= found["seconds_per_step"]
    (rank,) = found["ranks"]
    assert (rank["rank"], rank["role"], rank["peak"]) == (0, "every rank", found["peak"])
    assert found["at_peak"]["nccl"] > 0
    assert sum(found["at_peak"].values()) == found["peak"]["device_bytes"]
    assert run(["estimate", str(PROGRAM), *asked, "--node", "p9", "--", "ddp", "none"]) == 2
