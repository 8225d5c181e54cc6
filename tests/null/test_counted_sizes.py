"""Sizes that grow with the number of a loop's turn are found by their looks, and places in data are none."""

import ast

import pytest

from tightfit.capture.after_steps.changing_sizes import CountedSizes


def found(program: str) -> list[str]:
    tree = ast.parse(program)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
    return [what for _, what in CountedSizes([tree]).growing_in(loops[0])]


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (
            "for epoch in range(9):\n  n = min(32 + 8 * epoch, 512)\n  x = torch.randn(4, n)",
            "n = min(32 + 8 * epoch, 512)",
        ),
        ("for i in range(9):\n  k = 1 + i // 50\n  for _ in range(k): x = model(x)", "k = 1 + i // 50"),
        ("for i in range(9):\n  for _ in range(1 + i // 50): x = model(x)", "a size of 1 + i // 50"),
        ("for i, x in enumerate(data):\n  x = F.interpolate(x, size=64 + i)", "a size of 64 + i"),
        ("for e in tqdm(range(9)):\n  loader = DataLoader(data, batch_size=2 ** e)", "a size of 2 ** e"),
        ("while True:\n  step += 1\n  x = torch.randint(0, 9, (8, 16 * step))", "a size of 16 * step"),
        (
            "def curriculum(epoch):\n  return 64 + 32 * epoch\nfor e in range(9):\n  n = curriculum(e)\n  x = torch.rand(n)",
            "n = curriculum(e)",
        ),
        ("def batch(n):\n  return torch.rand(n, 4)\nfor i in range(9):\n  train(batch(i * 8))", "a size of i * 8"),
    ],
)
def test_a_size_that_grows_with_the_turn_is_found(program: str, what: str) -> None:
    assert what in found(program)


@pytest.mark.parametrize(
    "program",
    [
        "for i in range(9):\n  start = i * 8\n  x = data[start : start + 8]\n  y = torch.randn(8)",
        "for i in range(9):\n  x = data[torch.arange(i * 8, i * 8 + 8)]",
        "for i in range(9):\n  x = data.narrow(0, i * 8, 8)",
        "for i in range(9):\n  x = torch.full((8,), i)",
        "for i in range(9):\n  x = torch.randint(0, i + 1, (8,))",
        "for i in range(9):\n  x = torch.randn(8 + i % 3)",
        "for i in range(9):\n  x = torch.randn(64 - i)",
        "for i in range(9):\n  log(num=i, batch=i + 1, step_size=0.1 * i)",
        "for x in data:\n  y = torch.randn(len(x))",
        "def left(done):\n  return 8 - done\nfor i in range(9):\n  x = torch.rand(left(i))",
        "for i in range(9):\n  lr = 0.1 * (i + 1)\n  step(lr)",
    ],
)
def test_places_values_and_what_does_not_grow_are_no_sizes(program: str) -> None:
    assert found(program) == []
