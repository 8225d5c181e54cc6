"""What a step does, in tokens, samples and FLOPs: of programs whose batch is known."""

from pathlib import Path

import pytest

from tightfit import estimate
from tightfit.reports.results import Estimate

PRELUDE = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BATCH, LENGTH, WIDTH, VOCABULARY = 4, 64, 128, 512


class Decoder(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recomputes = recomputes

    def block(self, x):
        q, k, v = (t.view(*t.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))

    def forward(self, tokens):
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)
        return self.head(x)


def train(model, make, num_micro_batches=1):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        for _ in range(num_micro_batches):
            inputs, targets = make()
            functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def tokens():
    batch = torch.randint(VOCABULARY, (BATCH, LENGTH)).cuda()
    return batch, batch


def images(size=BATCH):
    return torch.randn(size, 3, 32, 32).cuda(), torch.zeros(size, dtype=torch.int64).cuda()
"""
NET = """
net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.AdaptiveAvgPool2d(1),
                    nn.Flatten(), nn.Linear(16, 10)).cuda()
"""


def estimated(folder: Path, program: str) -> Estimate:
    (folder / "train.py").write_text(PRELUDE + program)
    return estimate(str(folder / "train.py"), "RTX 4090")


@pytest.mark.parametrize(
    ("program", "tokens", "samples"),
    [
        ("train(Decoder().cuda(), tokens)", 4 * 64, None),
        ("train(Decoder().cuda(), tokens, num_micro_batches=3)", 3 * 4 * 64, None),
        (NET + "train(net, images)", None, 4),
        (NET + "train(net, images, num_micro_batches=2)", None, 8),
        # Rows of numbers are no tokens, and nothing says what a row is.
        (
            "train(nn.Linear(64, 10).cuda(), lambda: (torch.randn(8, 64).cuda(), torch.zeros(8, dtype=torch.int64).cuda()))",
            None,
            None,
        ),
    ],
)
def test_tokens_and_samples_are_those_of_the_batch_or_not_said(
    tmp_path: Path, program: str, tokens: int | None, samples: int | None
) -> None:
    found = estimated(tmp_path, program)
    assert found.counts is not None
    assert (found.counts.num_tokens, found.counts.num_samples) == (tokens, samples)
    told = found.to_json()
    for name, count in (("tokens", tokens), ("samples", samples)):
        assert told[f"{name}_per_second"] == (None if count is None else count / found.seconds_per_step)


LOADED = """
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 3, 32, 32), torch.rand(64, 10))


def loop(loader, num_micro_batches=1):
    optimizer = torch.optim.SGD(net.parameters())
    for turn, (inputs, targets) in enumerate(loader):
        functional.binary_cross_entropy_with_logits(net(inputs.cuda()), targets.cuda()).backward()
        if (turn + 1) % num_micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("program", "examples"),
    [
        ("loop(DataLoader(data, batch_size=4))", 4),
        ("loop(DataLoader(data, batch_size=4), num_micro_batches=4)", 16),
        # The last batch is of two, and who makes rows of the examples may pack them.
        ("loop(DataLoader(data, batch_size=31))", None),
        ("loop(DataLoader(data, batch_size=4, collate_fn=lambda rows: default_collate(rows[:2])))", None),
    ],
)
def test_examples_are_those_that_the_loader_gave(tmp_path: Path, program: str, examples: int | None) -> None:
    found = estimated(tmp_path, NET + LOADED + f"from torch.utils.data import default_collate\n{program}")
    assert found.counts is not None
    assert (found.counts.num_samples, found.counts.num_examples) == (None, examples)


def test_what_is_computed_again_is_no_part_of_the_models_flops(tmp_path: Path) -> None:
    plain, again = (
        estimated(tmp_path, f"train(Decoder(recomputes={recomputes}).cuda(), tokens)").counts
        for recomputes in (False, True)
    )
    assert plain is not None
    assert again is not None
    assert plain.flops == plain.model_flops == pytest.approx(again.model_flops, rel=1e-6)
    assert again.flops > 1.15 * plain.flops
    # Six for each weight and token of the products; attention's two products over all pairs, whose backward pass takes 2.5 times as many.
    products = 6 * 4 * 64 * (128 * 3 * 128 + 128 * 128 + 2 * 128 * 4 * 128 + 128 * 512)
    assert plain.model_flops == products + 3.5 * 4 * 4 * 64 * 64 * 128
