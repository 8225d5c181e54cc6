"""`measure.py FUNCTION`: runs three steps of a workload on the real card and prints the peaks of torch's allocator as JSON."""

import json
import sys

import torch

import workloads

steps = getattr(workloads, sys.argv[1])()
for _ in range(3):
    next(steps)
torch.cuda.synchronize()
print(json.dumps({"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))
