"""Seconds of llama.cpp's server with some of the layers at the host.

A batch of 32 tokens or more is computed on the GPU as a whole: for each micro-batch the weights at the host are copied there first (ggml/src/ggml-cuda/ggml-cuda.cu, ggml_backend_cuda_device_offload_op:
`get_op_batch_size(op) >= op_offload_min_batch_size`, GGML_OP_OFFLOAD_MIN_BATCH, 32; ggml/src/ggml-backend.cpp, ggml_backend_sched_backend_id_from_cur), from the file's pages, which are not pinned, and before anything is computed
with them. With fewer tokens the host computes its layers, bound by its memory or by its arithmetic. The output has one token of each request, so it is the host's below 32 of them.
"""

import dataclasses

from tightfit.cost.copies import copy_seconds
from tightfit.cost.host_bandwidth import HOST_BYTES_PER_SECOND
from tightfit.devices.device import Device
from tightfit.serving.batches.split_layers import SplitModel
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.costs.serving_speed import ServingSpeed, speed_at
from tightfit.serving.costs.step_costs import StepCosts

_LEAST_COPIED = 32
# What llama.cpp's own products reached on a desktop's processor (q4_k_m, `llama-bench -ngl 0 -nopo 1 -p 512`: 37.4 tokens per second of 8 billion weights).
_HOST_FLOPS_PER_SECOND = 0.6e12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitClock:
    """Prices batches of a model of which `on_card` layers are on the card; `parameters` are elements of its layers' weights, `slots` the requests that there is a cache for."""

    costs: StepCosts
    device: Device
    split: SplitModel
    on_card: int
    parameters: int
    slots: int
    micro_batch: int

    def speed(self, prompt: int, answer: int) -> ServingSpeed:
        """Of as many requests as there are slots."""
        found = speed_at(self.costs, prompt, answer, self.slots, chunk=self.micro_batch)
        first = SecondsRange(low=0.0, high=0.0)
        for context in range(0, prompt, self.micro_batch):
            tokens = min(self.micro_batch, prompt - context)
            share = (context + tokens) / (prompt + answer) / self.slots
            first = first + self._step(self.costs.of_prompt(tokens, context), tokens, share)
        # The last micro-batch alone has a next token.
        first = first + self._output(1)
        each = self._step(found.each_token, self.slots, 1.0) + self._output(self.slots)
        return dataclasses.replace(found, first_token=first, each_token=each)

    def _step(self, whole: SecondsRange, tokens: int, cached: float) -> SecondsRange:
        """Seconds of all layers for so many tokens, where all on the card take `whole`; `cached` is the part of the cache that is read."""
        split = self.split
        layers, caches = split.layers_at_host(self.on_card)
        read = layers + round(caches * cached)
        if tokens >= _LEAST_COPIED:
            copied = copy_seconds(read, self.device, is_pinned=False, to_card=True) if read else 0.0
            return whole + SecondsRange(low=copied, high=copied)
        part = layers / max(1, sum(split.layers))
        flops = 2 * self.parameters * part * tokens
        at_host = max(read / HOST_BYTES_PER_SECOND, flops / _HOST_FLOPS_PER_SECOND)
        here = whole.times(1 - part)
        # No layer is faster at the host than on the card that it was moved from.
        return here + SecondsRange(low=max(at_host, whole.low * part), high=max(at_host, whole.high * part))

    def _output(self, tokens: int) -> SecondsRange:
        """Seconds of the output's weights at the host."""
        num_bytes = self.split.output_at_host(self.on_card)
        if not num_bytes:
            found = 0.0
        elif tokens >= _LEAST_COPIED:
            found = copy_seconds(num_bytes, self.device, is_pinned=False, to_card=True)
        else:
            found = num_bytes / HOST_BYTES_PER_SECOND
        return SecondsRange(low=found, high=found)
