"""The head of a cross-entropy is found under autocast, which casts what a softmax in half precision has made, where the program casts the logits itself, and
beside operators on other numbers."""

from pathlib import Path

import pytest

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.techniques.registry import technique

PROGRAM = """\
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    def __init__(self, bias, casts):
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(4096, 64), nn.Linear(64, 64), nn.Linear(64, 4096, bias=bias)
        self.casts = casts

    def forward(self, words):
        logits = self.head(torch.tanh(self.body(self.words(words))))
        logits = logits.float() if self.casts else logits
        return cross_entropy(logits.view(-1, 4096), words.view(-1), ignore_index=-1)


def words(bias, casts):
    model = Net(bias, casts).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randint(0, 4096, (8, 128)).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""


@pytest.mark.parametrize(("bias", "casts"), [(False, False), (True, False), (False, True)])
def test_the_head_is_found_and_offered(bias: bool, casts: bool, tmp_path: Path) -> None:
    file = tmp_path / "words.py"
    file.write_text(PROGRAM)
    target = GeneratorFunction(location=str(file), function="words", parameters={"bias": bias, "casts": casts})
    tape = trace(target, label="words", device="RTX 4090", num_steps=2).tape
    profile = Profile(tape, find("RTX 4090"))
    head = profile.loss_heads[-1]
    assert (head.path, head.num_counted, head.num_classes, head.width) == ("Net.head", 1024, 4096, 64)
    assert (head.head_item_bytes, head.loss_item_bytes) == (2, 4)
    largest = max(sum(-change.num_bytes for change in o.changes) for o in technique("chunked_loss").options(profile))
    assert largest > 1024 * 4096 * (2 + 4 + 4)


OTHER_NUMBERS = """

class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned, self.body, self.head = nn.Linear(64, 4096, dtype=torch.cfloat), nn.Linear(64, 64), nn.Linear(64, 96)

    def forward(self, rows):
        scores = torch.bmm(torch.complex(rows, rows), torch.complex(rows, rows).mT).abs()
        rows = torch.bmm(scores.softmax(-1), self.body(rows))
        if self.turns:
            return cross_entropy(self.turned(torch.complex(rows, rows)).abs().view(-1, 4096), self.labels)
        return cross_entropy(self.head(rows).view(-1, 96), self.labels)


def checked(turns, checks):
    model = Complex().cuda()
    model.turns, model.labels = turns, torch.zeros(512, dtype=torch.long, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autograd.set_detect_anomaly(checks):
        while True:
            model(torch.randn(4, 128, 64, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
"""


@pytest.mark.parametrize("turns", [False, True])
def test_what_anomaly_detection_compares_and_complex_products_are_no_head_and_no_attention(
    turns: bool, tmp_path: Path
) -> None:
    file = tmp_path / "checked.py"
    file.write_text(PROGRAM + OTHER_NUMBERS)
    found = []
    for checks in (False, True):
        target = GeneratorFunction(
            location=str(file), function="checked", parameters={"turns": turns, "checks": checks}
        )
        tape = trace(target, label="checked", device="RTX 4090", num_steps=2).tape
        profile = Profile(tape, find("RTX 4090"))
        assert not list(technique("attention").options(profile))
        found.append(
            [
                (h.path, h.num_classes, h.width, *tape.storages.num_bytes[[h.weight_gradient, h.hidden_gradient]])
                for h in profile.loss_heads
            ]
        )
    plain, checked = found
    assert bool(plain) is not turns
    assert checked == plain
