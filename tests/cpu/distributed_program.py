"""A script that shards itself in the ways of its first argument, with commas between, on cards with NCCL or on the host with gloo; the second argument is a file for what a rank holds."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

kinds, out = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()


def make() -> torch.nn.Sequential:
    # 257 rows are not divisible by 2: the shards are uneven.
    return torch.nn.Sequential(torch.nn.Linear(64, 257), torch.nn.ReLU(), torch.nn.Linear(257, 64)).to(device)


def num_bytes(tensors: list[torch.Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def train_stages() -> torch.optim.Optimizer:
    """A pipeline of two stages, that tell each other the shapes of what they send."""
    model = make()[:2] if rank == 0 else make()[2:]
    schedule = Schedule1F1B(
        PipelineStage(model, rank, 2, torch.device(device)), 2, lambda out, target: (out - target).square().mean()
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.randn(4, 64, device=device))
        else:
            schedule.step(target=torch.randn(4, 64, device=device))
        optimizer.step()
    return optimizer


def train_whole(kind: str) -> torch.optim.Optimizer:
    model = make()
    if kind == "fsdp2":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        )
    else:
        model = DistributedDataParallel(model)
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, foreach=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64, device=device)).square().mean().backward()
        optimizer.step()
    return optimizer


def held(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes of a rank by category, but for step counters, which are on the host on a card too."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # ZeroRedundancyOptimizer has those of its rank in another one.
    states = [v for s in getattr(optimizer, "optim", optimizer).state.values() for k, v in s.items() if k != "step"]
    return {
        "PARAMETERS": num_bytes(parameters),
        "GRADIENTS": num_bytes([p.grad for p in parameters if p.grad is not None]),
        "OPTIMIZER_STATE": num_bytes(states),
    }


for kind in kinds.split(","):
    optimizer = train_stages() if kind == "pipeline" else train_whole(kind)
    if device == "cpu":
        with open(f"{out}.{kind}.{rank}", "w") as file:
            json.dump(held(optimizer), file)
dist.destroy_process_group()
