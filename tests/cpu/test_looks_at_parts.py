"""A look at the parts of a batch leaves the module of the loop as it was, with the objects that it had."""

import contextlib
from types import SimpleNamespace

import torch

from tightfit.techniques.micro_batches.split_step import _unseen

LOGGED = SimpleNamespace(muted=contextlib.nullcontext)


class Metrics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.prototypes = torch.zeros(3, 2)
        self.total = torch.zeros(())
        self.history = []
        self.count = 0


def test_tensors_stay_the_objects_that_others_hold():
    module = Metrics()
    shared, row = module.prototypes, module.prototypes[0]
    with _unseen(module, LOGGED):
        module.prototypes.add_(5)
        module.total = module.total + 1
        module.history.append(module.total)
        module.count += 1
    assert module.prototypes is shared
    assert shared.tolist() == [[0.0, 0.0]] * 3
    shared.add_(1)
    assert row.tolist() == module.prototypes[0].tolist() == [1.0, 1.0]
    assert (float(module.total), module.history, module.count) == (0.0, [], 0)


def test_tensors_that_grew_or_are_of_inference_get_their_content_back():
    module = Metrics()
    with torch.inference_mode():
        module.total = torch.ones(())
    kept = module.total
    with _unseen(module, LOGGED), torch.inference_mode():
        module.total.add_(1)
        module.prototypes.resize_(5, 2).fill_(1)
    assert module.total is kept
    assert float(kept) == 1.0
    assert module.prototypes.tolist() == [[0.0, 0.0]] * 3
