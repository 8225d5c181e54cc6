"""A script that shards itself, DistributedDataParallel or FSDP2 by its first argument, on cards with NCCL or on the host with gloo; the second argument is a file for what a rank holds."""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

kind, out = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
# 257 rows are not divisible by 2: the shards are uneven.
model = torch.nn.Sequential(torch.nn.Linear(64, 257), torch.nn.ReLU(), torch.nn.Linear(257, 64)).to(device)
if kind == "fsdp2":
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 64, device=device)).square().mean().backward()
    optimizer.step()


def num_bytes(tensors: list[torch.Tensor]) -> int:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


if device == "cpu":
    parameters = list(model.parameters())
    # Its step counters are on the host on a card too.
    states = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    held = {
        "PARAMETERS": num_bytes(parameters),
        "GRADIENTS": num_bytes([p.grad for p in parameters]),
        "OPTIMIZER_STATE": num_bytes(states),
    }
    with open(f"{out}.{dist.get_rank()}", "w") as file:
        json.dump(held, file)
dist.destroy_process_group()
