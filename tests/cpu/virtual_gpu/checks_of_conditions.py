"""Conditions on values that only a real run computes."""

import torch

from tightfit.capture.dispatch.values.data_dependent_conditions import DataDependentConditions
from tightfit.capture.dispatch.values.data_reads import NUM_PASSED_CHECKS, ReadPolicy


def unknown():
    return torch.randn(1000, 1000, device="cuda")


def assertions_on_unknown_values_pass():
    x = unknown()
    assert (x > 0).any()
    assert not (x > 0).any()
    assert 0 <= x.min() <= 1, f"{x.shape}"
    assert x.min() >= 0
    assert x.max() <= 1
    assert (x > 0).any().item()
    assert bool(x.sum() > 1)
    assert all(value > 0 for value in x[0, :4])
    assert torch.equal(x, x.clone())
    torch._assert(x.sum() > 0, "positive")


def a_condition_that_would_raise_reads_as_the_other_answer():
    x = unknown()
    if not (x.abs() < 10).any() or (x > 10).any():
        message = f"{x.shape} is out of range"
        raise ValueError(message)
    if not torch.equal(x, x.clone()):
        raise ValueError
    assert _first_positive(x) is x


def _first_positive(x):
    if (x > 0).any():
        return x
    raise ValueError


def a_condition_that_leads_to_no_error_reads_as_false():
    x, num_rounds = unknown(), 0
    while not (x > 0).any():
        num_rounds += 1
        if num_rounds > 3:
            break
    assert num_rounds == 4


def a_check_that_goes_on_passing_fails_once_so_that_a_loop_may_end_by_it():
    assumed = []
    policy = ReadPolicy(lambda: "train.py:3", lambda where, what: assumed.append(what))
    answers = [policy.passes(True) for _ in range(NUM_PASSED_CHECKS + 1)]
    assert answers.index(False) == NUM_PASSED_CHECKS - 1
    assert answers.count(False) == 1
    assert len(set(assumed)) == 2


def infinities_are_counted_as_none():
    x = unknown()
    assert torch.isnan(x).sum().item() == 0
    assert (x == float("inf")).float().sum().item() == 0
    assert (x != x).any(dim=None).item() == 0
    found = torch.isnan(x).sum() + torch.isinf(x).sum()
    assert found.item() == 0
    # What is asked of the counts is another matter, and so is a mask that was written to.
    assert (torch.isnan(x).sum(1) == 0).sum().item() != 0
    mask = torch.isnan(x)
    mask.logical_not_()
    assert mask.sum().item() != 0


def counts_in_bins_have_the_sum_of_what_is_counted():
    experts = torch.randn(999, 10, device="cuda").argmax(1)
    counts = torch.bincount(experts, minlength=10)
    assert counts.sum().item() == 999
    assert torch.histc(experts.float(), bins=10, min=0, max=9).sum().item() == 999


def what_is_known_of_a_tensor_that_is_gone_is_not_known_of_another_one_at_its_place():
    x = unknown()
    for _ in range(50):
        empty = torch.zeros(0, device="cuda") * 2
        del empty
        assert (x[0, 0] * 3).item() == 1.0
        at_host = torch.arange(2, device="cuda")[1].cpu() * 7
        del at_host
        assert x.sum().item() == 1.0
        assert x.sum().cpu().item() == 1.0


def a_look_for_infinite_values_asks_no_tensor_without_a_storage_for_one():
    class MadeWhenAsked(torch.Tensor):
        def untyped_storage(self):
            raise AssertionError("would be made")

    x = torch.rand(64, 64, device="cuda")
    sparse = torch.eye(64).to_sparse().cuda()
    assert torch.isfinite(x.sum())
    sparse.mul_(2)
    conditions = DataDependentConditions()
    assert conditions.counts_nothing(torch.ops.aten.isinf.default, (x,), torch.isinf(x))
    conditions.written([sparse, torch.zeros(2).as_subclass(MadeWhenAsked)])
    assert not conditions.holds(sparse)
