"""A trace that repeats the rows of micro-batches that are alike has the tape of one that runs them all, and runs those that are not."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from tests.cpu.alike_tapes import both_tapes, is_repeated, tape_differences
from tests.cpu.module_training import choice

from tightfit.capture.targets.target_kinds import Script
from tightfit.capture.trace import trace
from tightfit.tape import Phase

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

_HEAD = """
import random
import torch
from torch import nn
from torch.nn import functional as F

random.seed(0)
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.calls = 0
    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64)
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def batch(length=16):
    return torch.randint(0, 64, (2, length)).cuda()

def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
"""

_LOOP = """
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    for number in range(5):
        {body}
    optimizer.step()
    optimizer.zero_grad()
"""


def _loop(*body: str, before: str = "") -> str:
    return _HEAD + before + _LOOP.format(body="\n        ".join(body))


_PLAIN = ("ids = batch()", "loss = loss_of(model, ids)", "loss.backward()")

ALIKE = {
    "a loss that the program computes": _loop(*_PLAIN),
    "nothing held": _loop("(loss_of(model, batch()) / 5).backward()"),
    "losses that are logged": _loop(*_PLAIN, "total = loss.item()"),
    "a result that is kept for a while": _loop(
        "ids = batch()", "logits = model(ids)", "F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()"
    ),
    "results that are kept": _loop(
        "ids = batch()",
        "logits = model(ids)",
        "seen.append(logits.detach())",
        "F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()",
        before="seen = []\n",
    ),
    "autocast with a scaler": _loop(
        "ids = batch()",
        "with torch.autocast('cuda', torch.float16):",
        "    loss = loss_of(model, ids)",
        "scaler.scale(loss).backward()",
        before="scaler = torch.amp.GradScaler('cuda')\n",
    ),
    "checkpointed blocks": _loop(
        *_PLAIN,
        before="""
from torch.utils.checkpoint import checkpoint
class Model(Model):
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)
""",
    ),
    "reentrant checkpoints behind a leaf": _loop(
        *_PLAIN,
        before="""
from torch.utils.checkpoint import checkpoint
class Model(Model):
    def forward(self, ids):
        x = self.embedding(ids).detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)
""",
    ),
    "a mask of ones that is read": _loop(
        "ids, mask = batch(), torch.ones(2, 16).cuda().bool()",
        "loss = F.cross_entropy(model(ids, mask).flatten(0, 1), ids.flatten())",
        "loss.backward()",
        before="""
class Model(Model):
    def forward(self, ids, mask):
        x = super().forward(ids)
        return x if mask.all() else x * mask[..., None]
""",
    ),
    "a dictionary with a loss in it": _loop(
        "ids = batch()",
        "out = model(ids)",
        "out['loss'].backward()",
        before="""
class Model(Model):
    def forward(self, ids):
        logits = super().forward(ids)
        return {'loss': F.cross_entropy(logits.flatten(0, 1), ids.flatten()), 'logits': logits, 'note': 'text'}
""",
    ),
    "an object with keys and values": _loop(
        "ids = batch()",
        "logits, cache = model(ids)",
        "F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()",
        before="""
class Cache:
    def __init__(self):
        self.layers, self.kind = [], Cache
class Model(Model):
    def forward(self, ids):
        cache, x = Cache(), self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            cache.layers.append({'keys': x * 2, 'length': 16})
        return self.head(x), cache
""",
    ),
    "zeros for gradients": _loop(*_PLAIN).replace("zero_grad()", "zero_grad(set_to_none=False)"),
    "a teacher beside": _loop(
        "ids = batch()",
        "with torch.no_grad():",
        "    wanted = teacher(ids)",
        "F.mse_loss(model(ids), wanted).backward()",
        before="teacher = Model().cuda()\n",
    ),
    "a layer that is frozen": _loop(*_PLAIN, before="").replace(
        "optimizer = ", "model.embedding.requires_grad_(False)\noptimizer = "
    ),
    "a setting in the last one": _loop(
        "torch.backends.cuda.enable_flash_sdp(number < 4)",
        *_PLAIN,
        before="""
class Block(Block):
    def forward(self, x):
        return super().forward(F.scaled_dot_product_attention(x[None], x[None], x[None])[0])
""",
    ),
    "a part that is replaced between steps": _loop(*_PLAIN)
    .replace("optimizer = ", "model.blocks[0].requires_grad_(False)\noptimizer = ")
    .replace("AdamW(model.parameters())", "AdamW([p for p in model.parameters() if p.requires_grad])")
    .replace(
        "    for number", "    if step == 2: model.blocks[0] = Block().cuda().requires_grad_(False)\n    for number"
    ),
    "two models in turns": _loop(
        "for each in (model, other):",
        "    ids = batch()",
        "    loss = loss_of(each, ids)",
        "    loss.backward()",
        before="other = Model().cuda()\n",
    ),
    "a hook of a result in the last one": _loop(
        "ids = batch()",
        "logits = model(ids)",
        "logits.register_hook(lambda g: g * 2 if number == 4 else None)",
        "F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()",
    ),
    "clipping and a scheduler": _loop(*_PLAIN).replace(
        "    optimizer.step()", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()"
    ),
}

OTHERS = {
    "lengths that differ": _loop("ids = batch(16 + number)", *_PLAIN[1:]),
    "masks that differ": ALIKE["a mask of ones that is read"].replace(
        "torch.ones(2, 16).cuda().bool()", "(torch.arange(32).reshape(2, 16) < 32 - number).cuda()"
    ),
    "a counter that decides": _loop(
        *_PLAIN,
        before="""
class Model(Model):
    calls = 0
    def forward(self, ids):
        self.calls += 1
        x = super().forward(ids)
        return x * 2 if self.calls % 4 == 0 else x
""",
    ),
    "a global that decides": _loop(
        "phase = number",
        *_PLAIN,
        before="""
class Model(Model):
    def forward(self, ids):
        x = super().forward(ids)
        return x * 2 if phase == 4 else x
""",
    ),
    "layers that are dropped by torch's generator": _loop(
        *_PLAIN,
        before="""
class Block(Block):
    def forward(self, x):
        return x if torch.rand([]) < 0.1 else super().forward(x)
""",
    ),
    "layers that are dropped by Python's": _loop(
        *_PLAIN,
        before="""
class Block(Block):
    def forward(self, x):
        return x if random.random() < 0.1 else super().forward(x)
""",
    ),
    "a model that keeps something of each call": _loop(
        *_PLAIN,
        before="""
class Model(Model):
    def forward(self, ids):
        x = super().forward(ids)
        self.last = x.detach().mean()
        return x
""",
    ),
    "a hook that collects": _loop(*_PLAIN).replace(
        "for step in",
        "seen = []\nmodel.blocks[0].register_forward_hook(lambda m, i, o: seen.append(o.detach()))\nfor step in",
    ),
    "a backward pass under autocast": _loop(
        "with torch.autocast('cuda', torch.bfloat16):",
        "    loss = loss_of(model, batch())",
        "    loss.backward()",
    ),
    "saved tensors that are packed": _loop(
        "with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):",
        "    loss = loss_of(model, batch())",
        "loss.backward()",
    ),
    "arguments that the model takes out of a list": _loop(
        "ids = batch()",
        "loss = F.cross_entropy(model([ids.float()]).flatten(0, 1), ids.flatten())",
        "loss.backward()",
        before="""
class Model(Model):
    def forward(self, given):
        x = given.pop().long()
        return super().forward(x)
""",
    ),
    "a hook of a weight": _loop(*_PLAIN).replace(
        "for step in",
        "seen = []\nmodel.head.weight.register_hook(lambda g: seen.append(g) if number == 4 else None)\nfor step in",
    ),
    "two calls for one backward pass": _loop(
        "(loss_of(model, batch()) + loss_of(model, batch())).backward()",
    ),
    "a penalty on the weights": _loop(
        *_PLAIN[:2],
        "(loss + 0.1 * model.head.weight.square().sum()).backward()",
    ),
    "a graph that is kept": _loop(*_PLAIN[:2], "loss.backward(retain_graph=True)"),
    "statistics of batch norms": _loop(
        *_PLAIN,
        before="""
class Block(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
""",
    ),
    "data at the host": _loop(
        "ids = torch.randint(0, 64, (2, 16))",
        "loss = loss_of(model, ids)",
        "loss.backward()",
        before="""
def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.cuda().flatten())
class Model(Model):
    def forward(self, ids):
        return super().forward(ids.cuda())
""",
    ),
}

CHANGED_LATER = {
    "a result that is changed in place": _loop(
        "ids = batch()",
        "logits = model(ids)",
        "(F.relu(logits, inplace=True) if number == 4 else logits).square().mean().backward()",
    ),
    "a result that has a gradient with other strides": _loop(
        "ids = batch()",
        "logits = model(ids)",
        "(F.relu(logits, inplace=True) if number == 4 else logits).sum().backward()",
    ),
    "a call that is not run backwards": _loop(*_PLAIN[:2], "if step < 2 or number < 4: loss.backward()"),
    "a result with another part in the loss": _loop(
        "ids = batch()",
        "one, other = model(ids)",
        "(one if number < 4 else one + other).sum().backward()",
        before="""
class Model(Model):
    def forward(self, ids):
        x = super().forward(ids)
        return x, x * 2
""",
    ),
    "a penalty in the last one": _loop(
        *_PLAIN[:2],
        "if number == 4: loss = loss + 0.1 * model.head.weight.square().sum()",
        "loss.backward()",
    ),
    "a graph that is kept once": _loop(*_PLAIN[:2], "loss.backward(retain_graph=number == 4)"),
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", ALIKE)
def test_the_tape_of_alike_micro_batches_is_that_of_a_trace_that_runs_them_all(name: str, tmp_path: Path) -> None:
    every, alike = both_tapes(tmp_path, ALIKE[name], with_effects=len(name) % 2 == 0)
    assert is_repeated(alike)
    assert not is_repeated(every)
    assert not tape_differences(every, alike)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", OTHERS)
def test_micro_batches_that_may_differ_are_run(name: str, tmp_path: Path) -> None:
    every, alike = both_tapes(tmp_path, OTHERS[name], with_effects=False)
    assert not is_repeated(alike)
    assert not tape_differences(every, alike)


@pytest.mark.parametrize("name", CHANGED_LATER)
def test_a_trace_is_begun_again_where_a_micro_batch_that_was_answered_goes_on_otherwise(
    name: str, tmp_path: Path
) -> None:
    every, alike = both_tapes(tmp_path, CHANGED_LATER[name], with_effects=False)
    assert not is_repeated(alike)
    assert not tape_differences(every, alike)


def test_operators_of_a_backward_pass_have_the_places_of_their_forward_beside_recomputed_ones(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(ALIKE["checkpointed blocks"].replace("range(2)", "range(6)"))
    script = Script(path=str(path), arguments=())
    operators = trace(script, label="train.py", device="RTX 4090", runs_all_batches=True).tape.operators

    at = np.flatnonzero(operators.phase == Phase.BACKWARD)
    passes = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    places = [tuple(zip(operators.name[p], operators.module[p], operators.line[p], strict=True)) for p in passes]
    # The first of a step makes gradients, the others add to them.
    assert len(places) == 15
    assert len(set(places)) == 2


# What a plan puts on each of the programs; what they do in one micro-batch does not depend on others.
PLANS = {
    "nothing": [],
    "checkpoints": [choice("checkpointing", f"Model.blocks.{number}") for number in range(2)],
    "products kept": [
        choice("selective_checkpointing", f"Model.blocks.{number}", keep=[0], outputs=["up"]) for number in range(2)
    ],
    "another kernel and states of 8 bits": [choice("low_bit_states", "optimizer", bits=8, kernel="fused")],
    "factored states": [choice("factored_states", "optimizer")],
    "the fused kernel": [choice("optimizer_kernel", "optimizer", kernel="fused")],
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("name", "plan"), list(zip(ALIKE, itertools.cycle(PLANS), strict=False)))
def test_the_tape_with_techniques_is_that_of_a_trace_that_runs_all_micro_batches(
    name: str, plan: str, tmp_path: Path
) -> None:
    every, alike = both_tapes(tmp_path, ALIKE[name], PLANS[plan])
    assert is_repeated(alike)
    assert not is_repeated(every)
    assert not tape_differences(every, alike)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", [*OTHERS, *CHANGED_LATER])
def test_with_techniques_micro_batches_that_differ_are_run(name: str, tmp_path: Path) -> None:
    every, alike = both_tapes(tmp_path, {**OTHERS, **CHANGED_LATER}[name], PLANS["checkpoints"])
    # A block that is run twice saves no cast weight, which the next micro-batch would find.
    assert is_repeated(alike) == (name == "a backward pass under autocast")
    assert not tape_differences(every, alike)


_HEAD_WITH_LOSS = """
class WithLoss(Model):
    def forward(self, ids):
        logits = super().forward(ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids.flatten()), "logits": logits}
"""
_CHUNKS = [choice("chunked_loss", "WithLoss.head", num_chunks=4, gradients_in="forward")]
_LOSS_AND_LOGITS = ("out = model(batch())", "loss, logits = out['loss'], out['logits']")


@pytest.mark.parametrize(
    ("body", "is_alike"),
    [
        (("model(batch())['loss'].backward()",), True),
        ((*_LOSS_AND_LOGITS, "seen = logits if number == 4 else None", "del out, logits", "loss.backward()"), False),
        (
            (*_LOSS_AND_LOGITS, "found = logits.argmax() if number == 4 else 0", "del out, logits", "loss.backward()"),
            False,
        ),
        ((*_LOSS_AND_LOGITS, "loss.backward()"), False),
    ],
    ids=["dropped", "kept in the last one", "read in the last one", "kept beyond the backward pass"],
)
def test_logits_that_are_not_computed_are_returned_and_no_obstacle(
    body: tuple[str, ...], *, is_alike: bool, tmp_path: Path
) -> None:
    program = _loop(*body, before=_HEAD_WITH_LOSS).replace("model = Model()", "model = WithLoss()")
    every, alike = both_tapes(tmp_path, program, _CHUNKS)
    assert is_repeated(alike) == is_alike
    assert not tape_differences(every, alike)


def test_a_program_with_a_technique_that_tells_batches_apart_has_all_micro_batches_run(tmp_path: Path) -> None:
    program = _loop("model(batch())['loss'].backward()", before=_HEAD_WITH_LOSS)
    halves = choice("micro_batches", "batch", num_parts=2, draws_anew=True)
    every, alike = both_tapes(tmp_path, program.replace("model = Model()", "model = WithLoss()"), [halves])
    assert not is_repeated(alike)
    assert not tape_differences(every, alike)
