"""A layout of one card is the traced step: it takes the seconds and the bytes that an estimate of the same tape says, whatever its precision, its attention and its rounds."""

from pathlib import Path

import pytest

import tightfit
from tightfit.allocator.settings import AllocatorSettings
from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import TraceSettings
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.errors import UsageError
from tightfit.fit import capture
from tightfit.fit.layout_planning import plan_layouts
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.model_parts import model_parts
from tightfit.layouts.traced_step import layout_of_trace, with_traced_step
from tightfit.tape import Tape

VOCABULARY, BATCH, LENGTH = 8192, 4, 256
PROGRAM = f"""
import contextlib
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

class Block(nn.Module):
    def __init__(self, width, fused, causal):
        super().__init__()
        self.fused, self.causal = fused, causal
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=self.causal) if self.fused else (q @ k.mT).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self, width, fused, causal):
        super().__init__()
        self.embedding = nn.Embedding({VOCABULARY}, width)
        # A second, larger lookup, of positions: its indices are no tokens.
        self.bias = nn.Embedding(32, 4)
        self.blocks = nn.ModuleList(Block(width, fused, causal) for _ in range(3))
        self.head = nn.Linear(width, {VOCABULARY}, bias=False)

    def forward(self, tokens):
        places = torch.arange({LENGTH}, device=tokens.device)
        near = self.bias((places[:, None] - places).clamp(0, 31).repeat(1, 32)).sum()
        x = self.embedding(tokens) + near
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def train(width=256, amp=True, fused=True, causal=True, rounds=1, keeps=False, reads=False, foreach=True):
    model = Model(width, fused, causal).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach, fused=not foreach)
    while True:
        for _ in range(rounds):
            tokens = torch.randint(0, {VOCABULARY}, ({BATCH}, {LENGTH})).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16) if amp else contextlib.nullcontext():
                loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        if reads:
            loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps)
        yield loss
"""

RECURRENT = """
import torch
from torch import nn

def train():
    table, net, head = nn.Embedding(64, 64).cuda(), nn.GRU(64, 64).cuda(), nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD([*table.parameters(), *net.parameters(), *head.parameters()], 0.1)
    while True:
        head(net(table(torch.randint(0, 64, (16, 8), device="cuda")))[0]).sum().backward()
        optimizer.step()
        yield
"""


def traced(tmp_path: Path, *parameters: str) -> Tape:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return capture(f"{path}:train", device="h100", parameters=parameters, tracing=TraceSettings(steps=2))


def test_a_batch_that_nothing_shows_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "recurrent.py"
    path.write_text(RECURRENT)
    with pytest.raises(UsageError, match="give --global-batch"):
        plan_layouts(f"{path}:train", "h100", gpus=(8,))


@pytest.mark.parametrize(
    "parameters",
    [
        ("width=1024",),
        ("amp=False", "keeps=True"),
        ("fused=False", "foreach=False"),
        ("rounds=3", "reads=True"),
    ],
    ids=" ".join,
)
def test_it_takes_what_the_estimate_says(tmp_path: Path, parameters: tuple[str, ...]) -> None:
    tape = traced(tmp_path, *parameters)
    for name, settings in (("h100", None), ("a100", "expandable_segments:True"), ("4090", None)):
        device = find(name)
        estimate = tightfit.estimate(tape, device=name, alloc_conf=settings or "").to_json()
        model = model_parts(Profile(tape.of_steps(), device))
        model = with_traced_step(model, tape, device, AllocatorSettings.parse(settings or ""))
        node = node_of(device)
        search = LayoutSearch(model, device, node, budget_bytes=device.capacity_bytes)
        found = search.priced_layout(layout_of_trace(model))
        assert found.seconds.total == pytest.approx(estimate["seconds_per_step"], rel=1e-3)
        assert found.worst.total_bytes == pytest.approx(estimate["peak"]["device_bytes"], abs=16)
        # What the parts do not explain is small: they are most of the step, not a rest that is put on top.
        assert 0.97 < model.compute_scale <= 1.0 and model.outside_seconds < 0.1 * found.seconds.total
        cache = estimate["at_peak"]["cache"]
        assert abs(model.unused_bytes - cache) < 0.12 * estimate["peak"]["allocated_bytes"]


def test_a_plan_for_one_card_is_the_estimate(tmp_path: Path) -> None:
    tape = traced(tmp_path, "rounds=1")
    plan = plan_layouts(tape, "h100", gpus=(1,)).points[0]
    estimate = tightfit.estimate(tape, device="h100").to_json()
    assert plan.best is not None and plan.examples == BATCH
    assert plan.best.seconds.total <= estimate["seconds_per_step"] * 1.001
    assert plan.rate(plan.best) == pytest.approx(BATCH * LENGTH / plan.best.seconds.total)


def test_tokens_are_those_of_most_products_and_attention_of_any_kind_tells_their_sequences(
    tmp_path: Path,
) -> None:
    for parameters in (("fused=False",), ("causal=False",), ("causal=True",)):
        batch = model_parts(Profile(traced(tmp_path, *parameters).of_steps(), find("h100"))).batch
        assert (batch.num_tokens, batch.sequence_length, batch.num_examples) == (BATCH * LENGTH, LENGTH, BATCH)


def test_conversions_of_autocast_are_held_where_weights_are_not_gathered(tmp_path: Path) -> None:
    device = find("h100")
    model = model_parts(Profile(traced(tmp_path, "width=512").of_steps(), device))
    products = sum(part.converted_bytes for part in model.parts for _ in range(1 if part not in model.blocks else 3))
    assert products == pytest.approx(2 * (3 * 12 * 512**2 + VOCABULARY * 512), rel=0.01)
