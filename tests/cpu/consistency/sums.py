"""Counts the gradients that autograd adds in place and out of place: `sums.py real` by the profiler, `sums.py virtual` from a tape."""

import json
import os
import sys

import torch
from torch import nn
from torch.nn import functional


def graphs(device):
    first, second, third = (nn.Linear(8, 8, device=device) for _ in range(3))
    norm = nn.LayerNorm(8, device=device)
    convolution = nn.Conv2d(3, 3, 3, padding=1, device=device)
    weight = nn.Parameter(torch.randn(8, 8, device=device))
    x = torch.randn(4, 8, device=device).requires_grad_()
    images = torch.randn(2, 3, 8, 8, device=device)

    def residual():
        hidden = first(x)
        hidden = hidden + second(hidden)
        (hidden + third(hidden).tanh()).exp().sum().backward()

    def shared_weight():
        hidden = first(x)
        (second(hidden) + first(hidden)).exp().sum().backward()

    def three_uses():
        hidden = first(x)
        (hidden * 2 + hidden.exp() + hidden.tanh()).exp().sum().backward()

    def same_gradient_twice():
        hidden = first(x)
        (hidden + hidden).exp().sum().backward()

    def views():
        hidden = first(x)
        (hidden.view(2, 16).exp().sum() + hidden.t().tanh().sum()).backward()

    def slices():
        hidden = first(x)
        (hidden.chunk(2, -1)[0] * hidden[:, 4:] + hidden[:, :4]).exp().sum().backward()

    def transposed_weight():
        ((x @ weight) @ weight.t()).exp().sum().backward()

    def convolutions():
        hidden = convolution(images)
        (torch.relu(convolution(hidden) + hidden) + hidden).exp().sum().backward()

    def transformer():
        hidden = first(x)
        for _ in range(3):
            hidden = hidden + second(functional.gelu(third(norm(hidden))))
        hidden.square().mean().backward()

    leaves = [x, weight, *(p for module in (first, second, third, norm, convolution) for p in module.parameters())]

    def without_gradients(run):
        def fresh():
            for leaf in leaves:
                leaf.grad = None
            run()

        fresh.__name__ = run.__name__
        return fresh

    runs = (
        residual,
        shared_weight,
        three_uses,
        same_gradient_twice,
        views,
        slices,
        transposed_weight,
        convolutions,
        transformer,
    )
    return [without_gradients(run) for run in runs]


def real():
    from torch.profiler import ProfilerActivity, profile

    counts = {}
    for run in graphs("cpu"):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        events = profiler.events()
        begin = min(e.time_range.start for e in events if "evaluate_function" in e.name)
        sums = [e.name for e in events if e.time_range.start >= begin]
        counts[run.__name__] = [sums.count("aten::add_"), sums.count("aten::add")]
    return counts


def virtual():
    from tightfit.capture.child_process.capture_session import CaptureSession
    from tightfit.tape import Phase

    session = CaptureSession("RTX 4090", 1, by_yield=True)
    recorder = session.recorder
    counts = {}
    with session.gpu:
        for run in graphs("cuda"):
            begin = recorder.num_operators
            run()
            names = list(recorder.strings.texts)
            rows = zip(recorder.operators["name"][begin:], recorder.operators["phase"][begin:], strict=True)
            sums = [names[name] for name, phase in rows if phase == Phase.BACKWARD]
            counts[run.__name__] = [sums.count("aten.add_.Tensor"), sums.count("aten.add.Tensor")]
    return counts


if __name__ == "__main__":
    print(json.dumps(virtual() if sys.argv[1] == "virtual" else real()), flush=True)
    os._exit(0)
