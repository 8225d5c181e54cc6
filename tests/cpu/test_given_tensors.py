"""What a model was called with is held while the graph of the call is, and known to the end of the step while the program has it."""

import gc
import weakref

import torch

from tightfit.techniques.optimizer.updates.given_tensors import GivenTensors


def called(given: GivenTensors, *, returns_graph: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch, the result of a call with it, and a loss whose graph leads past the result where that is detached."""
    batch, weight = torch.ones(2, 3), torch.ones(3, requires_grad=True)
    out = batch * weight
    result = out if returns_graph else out.detach()
    given.add(((batch,), {"flag": True}), (result, None))
    return batch, result, out.sum()


def is_one(found: list[torch.Tensor], batch: torch.Tensor) -> bool:
    return len(found) == 1 and found[0] is batch


def test_a_batch_that_the_program_has_is_known_whatever_the_model_returns() -> None:
    for returns_graph in (True, False):
        given = GivenTensors()
        batch, *_ = called(given, returns_graph=returns_graph)
        assert is_one(given.take(), batch)
        assert not given.take()


def test_a_result_that_is_dropped_does_not_make_its_batch_unknown() -> None:
    given = GivenTensors()
    batch, weight = torch.ones(2, 3), torch.ones((), requires_grad=True)
    beside = batch.sum() * weight
    given.add((batch,), {"beside": beside, "detached": batch * 2})
    del beside
    other, *_ = called(given, returns_graph=False)
    assert {id(tensor) for tensor in given.take()} == {id(batch), id(other)}


def test_a_batch_is_held_as_long_as_the_graph_and_no_longer() -> None:
    given = GivenTensors()
    batch, result, loss = called(given, returns_graph=True)
    reference = weakref.ref(batch)
    del batch, result
    assert reference() is not None
    del loss
    given.end_step()
    gc.collect()
    assert reference() is None


def test_after_a_step_only_graphs_are_left() -> None:
    given = GivenTensors()
    first, result, _ = called(given, returns_graph=True)
    second, *_ = called(given, returns_graph=False)
    given.end_step()
    assert result.grad_fn is not None and second is not first
    assert is_one(given.take(), first)


def test_many_calls_before_one_pass_are_let_go_in_any_order() -> None:
    given = GivenTensors()
    calls = [called(given, returns_graph=True) for _ in range(200)]
    batches = [batch for batch, *_ in calls]
    calls[::2] = [None] * 100
    given.end_step()
    # Those without a graph are known to the end of the step.
    assert {id(tensor) for tensor in given.take()} == {id(batch) for batch in batches[1::2]}
    assert not given.take()
