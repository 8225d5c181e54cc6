"""A training script of the kind that users have, on the networks of the benchmark: what `benchmarks.gpu.applied` plans and runs.

PYTHONPATH=src:. python benchmarks/gpu/script.py --family decoder --model '{"depth": 4, "width": 256}' --data 128

Prints one line of JSON: losses, a sum over the bits of all parameters after the first steps, which run with deterministic kernels, peaks, and the
seconds of the later steps.
"""

import argparse
import json
import time

import torch

from benchmarks.gpu.workload import batch_of, network_of, optimizer_of

parser = argparse.ArgumentParser()
parser.add_argument("--family", required=True)
parser.add_argument("--model", type=json.loads, required=True)
parser.add_argument("--data", type=int, required=True)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--precision", default="fp32")
parser.add_argument("--optimizer", default="adamw-foreach")
parser.add_argument("--clips", action="store_true")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--compared-steps", type=int, default=4)
parser.add_argument("--device", default="cuda")
arguments = parser.parse_args()

torch.manual_seed(0)
torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute] - torch sets the class of the module
with torch.device(arguments.device):
    model = network_of(arguments.family, arguments.model, arguments.data, recompute=False)
if arguments.precision == "bf16":
    model.to(torch.bfloat16)
model.train()
optimizer = optimizer_of(arguments.optimizer, model)
dtype = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}.get(arguments.precision)
scaler = torch.amp.GradScaler(arguments.device, enabled=arguments.precision == "amp-fp16")
losses, seconds, bits = [], [], None
torch.use_deterministic_algorithms(True, warn_only=True)
for step in range(arguments.steps):
    if step == arguments.compared_steps:
        torch.use_deterministic_algorithms(False)
        integers = {2: torch.int16, 4: torch.int32}
        bits = sum(int(p.detach().view(integers[p.element_size()]).long().sum()) for p in model.parameters())
    values, labels = batch_of(arguments.family, arguments.data, arguments.batch_size, arguments.device)
    if arguments.precision == "bf16" and values.is_floating_point():
        values = values.to(torch.bfloat16)
    begin = time.perf_counter()
    with torch.autocast(arguments.device, dtype=dtype, enabled=dtype is not None):
        loss = model(values, labels)
    scaler.scale(loss).backward()
    if arguments.clips:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
found = {"losses": losses[: arguments.compared_steps], "bits": bits, "seconds": seconds[arguments.compared_steps + 1 :]}
if arguments.device == "cuda":
    found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
print(json.dumps(found))
