"""The walk through what a forward reaches is as deep as the program's objects are linked."""

import torch

from tightfit.effects.reachable.reach import reach_of


class Node:
    def __init__(self, following):
        self.following = following
        self.count = 0


class Block(torch.nn.Module):
    def __init__(self, first):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.first = first

    def forward(self, given):
        return self.linear(given) * self.first.count


def chain(length, last):
    for _ in range(length):
        last = Node(last)
    return last


def test_state_at_the_end_of_a_long_chain_is_found():
    last = torch.ones(1)
    assert any(tensor is last for tensor in reach_of(Block(chain(1_500, last))).tensors)


def test_a_ring_ends():
    first = Node(None)
    first.following = chain(1_500, first)
    assert len(reach_of(Block(first)).holders) > 1_500


def test_lists_within_lists_are_walked_to_the_end():
    last = torch.ones(1)
    nested = [last]
    for _ in range(1_500):
        nested = [nested]
    assert any(tensor is last for tensor in reach_of(Block(nested)).tensors)
