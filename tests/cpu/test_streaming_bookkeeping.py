"""What the engine does in Python for the use of one block does not depend on how many other blocks there are."""

from collections import Counter

import torch

from tightfit.engine.saved.block_call import Selection
from tightfit.engine.saved.known_storages import KnownStorages
from tightfit.engine.saved.saved_tensors import SavedTensors
from tightfit.engine.weights.streamed_weight import StreamedWeight
from tightfit.engine.weights.streamed_weights import StreamedWeights
from tightfit.engine.weights.use_order import Pass

HOST = torch.device("cpu")


def looks_of_a_pass(num_blocks, monkeypatch):
    """How many weights are looked at in one forward pass over streamed blocks of three weights, and in a backward pass, which each of them says that it is over."""
    streamed = StreamedWeights(HOST, num_blocks * 3 * 512 + 4096, statistics=Counter())
    blocks = [
        streamed.add([torch.nn.Parameter(torch.ones(4), requires_grad=False) for _ in range(3)])
        for _ in range(num_blocks)
    ]
    looks = Counter()
    is_ours = StreamedWeight.is_ours
    with monkeypatch.context() as patched:
        patched.setattr(StreamedWeight, "is_ours", lambda self: looks.update(["look"]) or is_ours(self))
        for block in blocks:
            with streamed.call(block, Pass.ALONE):
                assert all(weight.parameter.device == HOST for weight in block.weights)
        for block in reversed(blocks):
            streamed.use(block, Pass.BACKWARD)
        for _ in blocks:
            streamed.end_pass()
    streamed.end()
    return looks["look"]


def test_a_use_of_a_streamed_block_looks_at_the_weights_that_are_on_the_card(monkeypatch):
    few, many = looks_of_a_pass(8, monkeypatch), looks_of_a_pass(32, monkeypatch)
    assert 0 < many <= 4.5 * few


def test_weights_of_a_block_whose_data_the_program_sets_while_it_is_away_are_its_own():
    streamed = StreamedWeights(HOST, 1 << 16, statistics=Counter())
    parameters = [torch.nn.Parameter(torch.full((4,), float(n)), requires_grad=False) for n in range(3)]
    blocks = [streamed.add([parameter]) for parameter in parameters]
    for _ in range(2):
        for block in blocks:
            with streamed.call(block, Pass.ALONE):
                pass
    parameters[1].data = torch.full((4,), 7.0)
    seen = []
    for block, parameter in zip(blocks, parameters, strict=True):
        with streamed.call(block, Pass.ALONE):
            seen.append(parameter.data.clone())
    streamed.end()
    assert torch.equal(torch.stack(seen), torch.tensor([[0.0] * 4, [7.0] * 4, [2.0] * 4]))


def test_storages_of_earlier_calls_are_forgotten_without_looking_at_all_of_them_each_time():
    saved = SavedTensors(HOST, 1 << 20, statistics=Counter())
    # A share of nothing: what is saved is known, and stays.
    selection = Selection(smallest_bytes=1, counts=((123456789, 1),), share=0.0)
    known = saved._known
    assert isinstance(known, KnownStorages)
    start = torch.ones(8, requires_grad=True)
    for _ in range(20):
        with saved.call(selection):
            result = (start * 1.01).sin()
        del result
    assert len(known._storages) <= 4
    assert len(saved._calls) <= 12
