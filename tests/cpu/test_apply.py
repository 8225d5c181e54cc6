"""`apply`: a plan on a live model and its optimizer. The training stays the same, in all that scripts do, and the plan comes off without a trace."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cpu.applied import BATCH, CHOICES, WIDTH, Block, Net, batch_of, choice, made, plan_of, root, train
from torch import nn
from torch.nn import functional

import tightfit
from tightfit.errors import ApplyError
from tightfit.runtime.input_shapes import Inputs


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a plan could have left changed, but for values."""
    hooks = [name for name in vars(model) if name.endswith("_hooks")]
    return {
        "keys": list(model.state_dict()),
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "hooks": {name: [len(getattr(m, hook)) for hook in hooks] for name, m in model.named_modules()},
        "forwards": {name: m.forward for name, m in model.named_modules()},
        "signatures": {name: str(inspect.signature(m.forward)) for name, m in model.named_modules()},
        "optimizer": sorted(vars(optimizer)),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def saved_bytes(model: nn.Module) -> int:
    """What the forward pass leaves for the backward pass."""
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    # As if of torch's own offload to the host: blocks run as they are where a program has hooks of another kind.
    pack.__module__ = torch.autograd.graph.__name__
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch_of(0)[0])
    return sum(saved)


def test_the_names_are_functions_whatever_was_imported() -> None:
    import tightfit.fit.planning
    import tightfit.runtime.apply

    assert inspect.isfunction(tightfit.plan)
    assert inspect.isfunction(tightfit.apply)
    assert tightfit.plan.__module__ == "tightfit.fit.planning"
    assert isinstance(tightfit.apply(plan_of(), *made()), tightfit.Session)


def test_the_losses_are_the_same_with_less_held() -> None:
    plain, optimizer = made()
    expected, held = train(plain, optimizer), saved_bytes(plain)
    model, optimizer = made()
    session = tightfit.apply(plan_of(), model, optimizer)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert train(model, optimizer) == expected
    assert saved_bytes(model) < 0.6 * held
    assert optimizer.param_groups[0]["foreach"] is False
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    session.undo()
    assert saved_bytes(model) == held


def test_undo_leaves_no_trace() -> None:
    model, optimizer = made()
    before = everything(model, optimizer)
    with tightfit.apply(plan_of(), model, optimizer):
        assert everything(model, optimizer) != before
        train(model, optimizer)
    assert everything(model, optimizer) == before


def test_signatures_are_those_of_the_model() -> None:
    model, optimizer = made()
    before = everything(model, optimizer)["signatures"]
    tightfit.apply(plan_of(), model, optimizer)
    assert everything(model, optimizer)["signatures"] == before


def with_habits(model: Net, optimizer: torch.optim.Optimizer) -> list[float]:
    """A loop with a scheduler, clipping, a gradient scaler, accumulation and an average of the weights."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    losses = []
    for step in range(8):
        torch.manual_seed(step)
        rows, classes = batch_of(step)
        loss = functional.cross_entropy(model(rows), classes) / 2
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if step % 2:
            scaler.unscale_(optimizer)
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(new, 0.1)
            losses.append(average(rows).sum().item())
    return losses


def test_scheduler_clipping_scaler_accumulation_and_average_work_as_before() -> None:
    expected = with_habits(*made())
    model, optimizer = made()
    tightfit.apply(plan_of(), model, optimizer)
    assert with_habits(model, optimizer) == expected


def test_a_copy_computes_with_its_own_weights() -> None:
    model, optimizer = made()
    tightfit.apply(plan_of(), model, optimizer)
    other = copy.deepcopy(model).eval()
    rows = batch_of(0)[0]
    before = other(rows)
    train(model, optimizer)
    assert torch.equal(other(rows), before)
    assert not torch.equal(model.eval()(rows), before)


def test_training_is_saved_and_resumed_with_and_without_the_plan(tmp_path: Path) -> None:
    expected = train(*made(), steps=range(6))
    for first, second in ((True, False), (False, True), (True, True)):
        model, optimizer = made()
        if first:
            tightfit.apply(plan_of(), model, optimizer)
        losses = train(model, optimizer, steps=range(3))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
        model, optimizer = made(seed=1)
        if second:
            tightfit.apply(plan_of(), model, optimizer)
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert losses + train(model, optimizer, steps=range(3, 6)) == expected


def test_a_model_that_is_saved_whole_is_one_without_the_plan(tmp_path: Path) -> None:
    model, optimizer = made()
    tightfit.apply(plan_of(), model, optimizer)
    train(model, optimizer)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    rows = batch_of(0)[0]
    assert torch.equal(loaded.eval()(rows), model.eval()(rows))
    assert all("tightfit" not in type(loaded.get_submodule(name).forward).__module__ for name in ("", "layers.0"))
    tightfit.apply(plan_of(), loaded)


def compiled(model: Net, how: str) -> nn.Module:
    """The model, with its blocks or as a whole given to torch's compiler, up to where it would make machine code."""
    if how == "whole":
        return torch.compile(model, backend="eager")
    for index, layer in enumerate(model.layers):
        if how == "in place":
            layer.compile(backend="eager")
        else:
            model.layers[index] = torch.compile(layer, backend="eager")
    return model


# Torch's compiler looks at the gradient of whatever it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("in place", "compiled first"),
        ("in place", "applied first"),
        ("in place", "compiled and used first"),
        ("wrapped", "compiled and used first"),
        ("whole", "applied first"),
    ],
)
def test_compiled_blocks_train_the_same(how: str, when: str) -> None:
    torch.compiler.reset()
    expected = train(*made(), range(3))
    model, optimizer = made()
    losses = []
    if when == "applied first":
        tightfit.apply(plan_of(), model, optimizer)
        called = compiled(model, how)
    else:
        called = compiled(model, how)
        losses = train(called, optimizer, range(1)) if "used" in when else []
        tightfit.apply(plan_of(), called, optimizer)
    assert losses + train(called, optimizer, range(len(losses), 3)) == expected


def test_a_plan_for_another_model_is_refused_and_nothing_changed() -> None:
    model, optimizer = made()
    before = everything(model, optimizer)
    for plan, reason in (
        (plan_of(roots=[root(Block())]), r"the plan is for a Block, and this model is a Net; make a plan for it"),
        (plan_of(roots=[root(Net(4))]), r"the plan is for a Net of 2,722 parameters, and this one has 2,154"),
        (plan_of([*CHOICES, choice("checkpointing", "Net.layers.7")]), r"Net\.layers\.7, which this Net does not have"),
    ):
        with pytest.raises(ApplyError, match=reason):
            tightfit.apply(plan, model, optimizer)
        assert everything(model, optimizer) == before
    with pytest.raises(ApplyError, match="the AdamW holds no parameter of this Net"):
        tightfit.apply(plan_of(), model, made()[1])
    assert everything(model, optimizer) == before


def test_a_plan_that_lacks_a_setting_is_refused_and_nothing_changed() -> None:
    model, optimizer = made()
    with pytest.raises(
        ApplyError, match=r"tiled_tokens: Net\.layers\.0\.wide: the plan does not say what num_tiles is; make it anew"
    ):
        tightfit.apply(plan_of([choice("tiled_tokens", "Net.layers.0.wide")]), model, optimizer)
    assert "forward" not in vars(model)


def test_a_second_plan_is_refused_until_the_first_is_undone() -> None:
    model, optimizer = made()
    session = tightfit.apply(plan_of(), model, optimizer)
    with pytest.raises(ApplyError, match="there is a plan on this Net already; undo its session first"):
        tightfit.apply(plan_of(), model, optimizer)
    session.undo()
    tightfit.apply(plan_of(), model, optimizer)


def gradients(model: nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of one pass."""
    torch.manual_seed(1)
    model.zero_grad()
    model(rows).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("sizes", [[2 * BATCH], [BATCH, 2 * BATCH]])
def test_a_larger_batch_warns_once_and_has_the_gradients_of_the_plain_run(sizes: list[int]) -> None:
    plain, model = made()[0], made()[0]
    batches = [torch.randn(size, WIDTH) for size in sizes]
    expected = [gradients(plain, rows) for rows in batches]
    tightfit.apply(plan_of(), model)
    found = [gradients(model, rows) for rows in batches[:-1]]
    with pytest.warns(UserWarning, match=r"input 0 is 8 x 8, larger than the 4 x 8 .*make a plan for this batch"):
        found.append(gradients(model, batches[-1]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    model(torch.randn(3 * BATCH, WIDTH))


def test_a_smaller_batch_has_the_gradients_of_the_plain_run_and_says_nothing() -> None:
    plain, model = made()[0], made()[0]
    tightfit.apply(plan_of(), model)
    rows = torch.randn(BATCH - 1, WIDTH)
    torch.testing.assert_close(gradients(model, rows), gradients(plain, rows), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"ids": [16, 1024]}, ""),
        ({"ids": [2, 512], "mask": [99, 99]}, ""),
        ({"ids": [2, 4096]}, "input ids is 2 x 4096, longer in one dimension than the 16 x 1024"),
        ({"ids": [17, 1024]}, "input ids is 17 x 1024, larger than the 16 x 1024"),
        ({"ids": [1, 1, 16, 1024]}, ""),
        ({"padded": [2, 300]}, ""),
        ({"padded": [8, 300]}, "input padded is 8 x 300, larger than the 8 x 100"),
        ({"0": [2, 2]}, "the inputs are 0, and the plan was made for ids, padded"),
        ({}, ""),
    ],
)
def test_what_counts_as_larger(shapes: dict[str, list[int]], said: str) -> None:
    """A longer sequence may need more in a smaller batch, unless lengths varied while the plan was made."""
    planned = Inputs(largest={"ids": [16, 1024], "padded": [8, 100]}, varying={"padded"})
    assert planned.larger(shapes).startswith(said)
    assert bool(planned.larger(shapes)) is bool(said)


def test_sizes_that_varied_while_the_plan_was_made_may_vary() -> None:
    model, _ = made()
    tightfit.apply(plan_of(roots=[root(model, varying=["0"])]), model)
    with pytest.warns(UserWarning, match="from here on the run may hold more"):
        model(torch.randn(BATCH + 1, WIDTH))


def test_each_of_several_models_gets_what_is_inside_it() -> None:
    class Critic(Net):
        pass

    first, second = Net(), Critic()
    plan = plan_of([choice("checkpointing", "Critic.layers.1"), *CHOICES], roots=[root(first), root(second)])
    held = saved_bytes(first)
    tightfit.apply(plan, first)
    tightfit.apply(plan, second)
    assert saved_bytes(first) < saved_bytes(second) < held


def test_frameworks_optimizers_stand_for_the_one_inside() -> None:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    expected = train(*made())
    model, optimizer = made()
    wrapped = AcceleratedOptimizer(optimizer)
    tightfit.apply(plan_of(), model, wrapped)
    assert optimizer.param_groups[0]["foreach"] is False
    assert train(model, wrapped) == expected
