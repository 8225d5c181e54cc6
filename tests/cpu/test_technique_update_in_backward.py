"""Updates within the backward pass: the same training bit for bit, no gradient left, and errors where gradients would have been wanted."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from tests.cpu.optimizer_training import DEVICE, OPTIMIZERS, Tied, assert_same, choice, peak_bytes, traced, train
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import TraceSettings
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.fit import capture
from tightfit.techniques.lazy_tensors import retained_graphs
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.lazy_tensors.retained_graphs import _bits_and_key
from tightfit.techniques.optimizer.update_in_backward import UpdateInBackward
from tightfit.techniques.session import Session

NAME = "tightfit.techniques.optimizer.update_in_backward:UpdateInBackward"
PLAIN = {"kernel": "same", "clips": False}


def hooked(model, optimizer, **settings):
    session = Session(model=model, optimizers=[optimizer])
    UpdateInBackward().apply(session, [choice("update_in_backward", **(PLAIN | settings))])
    return session


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_bit_for_bit_alike(optimizer):
    plain = train(optimizer=optimizer, reload_at=2)
    run = train(UpdateInBackward(), PLAIN, optimizer=optimizer, reload_at=2, watches_gradients=False)
    assert_same(plain, run)
    torch.testing.assert_close(run.optimizer.state_dict(), plain.optimizer.state_dict(), rtol=0, atol=0)
    assert run.session.statistics["parameters updated in backward"] == 6 * len(plain.gradients[0])
    assert not run.session.notes


def test_gradients_that_a_hook_sees_are_kept_and_the_run_is_told():
    plain = train()
    run = train(UpdateInBackward(), PLAIN)
    assert_same(plain, run)
    assert run.gradients[0].keys() == plain.gradients[0].keys()
    assert run.session.statistics["backward passes with all gradients kept"] == 6
    assert "hook on its gradient" in run.session.notes[0]


def test_the_fused_kernel_differs_by_rounding_only():
    run = train(UpdateInBackward(), PLAIN | {"kernel": "fused"}, reload_at=2, watches_gradients=False)
    assert_same(train(reload_at=2), run, rtol=1e-4, atol=1e-5)


class _Holder:
    def __init__(self, logits):
        self.logits = logits


@pytest.mark.parametrize("returns", [lambda out: out, _Holder, lambda out: None])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_batches_are_let_go_where_torch_runs_the_passes(num_passes, returns):
    inner = torch.nn.Linear(8, 1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, given):
            self.loss = self.inner(given).sum()
            return returns(self.loss)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked(model, optimizer)
    if num_passes == 1:
        inner.weight.register_hook(lambda gradient: gradient)
    batches = []
    for _ in range(6):
        for _ in range(num_passes):
            batch = torch.randn(4, 8)
            batches.append(weakref.ref(batch))
            model(batch)
            model.loss.backward()
            del batch, model.loss
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert sum(batch() is not None for batch in batches) <= num_passes


@pytest.mark.parametrize("max_norm", [0.05, 1e9])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_clipping_by_norm_is_kept_by_a_second_pass(optimizer, max_norm):
    plain = train(optimizer=optimizer, max_norm=max_norm, reload_at=2)
    given = PLAIN | {"clips": True}
    run = train(UpdateInBackward(), given, optimizer=optimizer, max_norm=max_norm, reload_at=2, watches_gradients=False)
    assert_same(plain, run)
    assert run.session.statistics["parameters updated in backward"] == 6 * len(plain.gradients[0])


def test_the_norm_that_clipping_returns_is_that_of_all_gradients():
    model = Tied().eval()
    plain = copy.deepcopy(model)
    hooked(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), clips=True)
    tokens = torch.arange(8)[None]
    norms = []
    for each in (plain, model):
        each(tokens).square().sum().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0))
    torch.testing.assert_close(norms[1], norms[0])
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(isinstance(gradient, LazyTensor) and not gradient.source.held() for gradient in gradients)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_it_works_in_a_checkpointed_backward_pass(reentrant, clips):
    def steps(technique: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.2)) for _ in range(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if technique:
            hooked(model, optimizer, clips=clips)
        for _ in range(5):
            hidden = torch.randn(4, 6, requires_grad=True)
            for block in model:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            hidden.square().mean().backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(
        steps(technique=True), steps(technique=False), rtol=1e-5 if clips else 0, atol=1e-6 if clips else 0
    )


def stepped(model, optimizer):
    """One step, whose gradients are not cleared."""
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def test_gradients_that_are_used_up_are_not_read_or_used_again():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hooked(model, optimizer)
    stepped(model, optimizer)
    norms = [p.grad.norm() for p in model.parameters()]
    assert torch.equal(torch.stack(norms), torch.tensor([12.0, 12.0]).sqrt() * torch.tensor([3.0**0.5, 1.0]))
    with pytest.raises(ApplyError, match="a gradient is read after the update"):
        model.weight.grad.add_(1.0)
    with pytest.raises(ApplyError, match="a gradient is read after the update"):
        optimizer.step()  # a script that has swallowed the first error does not go on
    session.undo()
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


@pytest.mark.parametrize("older_plan", [True, False])
def test_nothing_is_updated_before_the_step(older_plan):
    """Nor where a plan of before asks for one pass."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    hooked(model, optimizer, **({"one_pass": True} if older_plan else {}))
    for _ in range(4):
        stepped(model, optimizer)
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    states = copy.deepcopy(optimizer.state_dict())
    model(torch.ones(2, 3)).sum().backward()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    torch.testing.assert_close(optimizer.state_dict(), states, rtol=0, atol=0)
    optimizer.step()
    assert not any(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


class Scaled(torch.autograd.Function):
    """Multiplies with a weight that autograd does not know of, in the backward pass with what it is then."""

    @staticmethod
    def forward(ctx, x, holder):
        ctx.holder = holder
        return x * holder[0].detach().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.holder[0].detach().sum(), None


class ScaledByCall(torch.autograd.Function):
    """Multiplies with what `weight()` gives, in the backward pass with what it gives then."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x * weight().detach().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.weight().detach().sum(), None


class Reading(torch.nn.Module):
    """An early layer that reads the last one's weight in one of several ways, from the step `begin` on."""

    def __init__(self, how: str, begin: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.how, self.begin, self.num_calls = how, begin, 0

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.num_calls += 1
        weight = self.last.weight
        if self.num_calls > self.begin:
            if self.how == "off the module":
                hidden = Scaled.apply(hidden, [self.last.weight])
            elif self.how == "by a call":
                hidden = ScaledByCall.apply(hidden, lambda: self.last.weight)
            elif self.how == "by data":
                hidden = hidden @ weight.data.T
            elif self.how == "by numpy":
                hidden = hidden @ torch.from_numpy(weight.detach().numpy()).T
            else:
                hidden = hidden @ weight.detach().T
        return self.last(hidden)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("how", ["off the module", "by a call", "by data", "by numpy", "by detach"])
def test_a_parameter_that_somebody_else_reads_after_its_gradient_is_updated_at_the_end(how, begin):
    def weights(technique: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = Reading(how, begin)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = hooked(model, optimizer) if technique else None
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        told = session.statistics["parameters updated in backward"] if session is not None else 0
        return [p.detach() for p in model.parameters()], told

    plain, run = weights(technique=False)[0], weights(technique=True)
    torch.testing.assert_close(run[0], plain, rtol=0, atol=0)
    # Where it is seen in the first steps, or a function of the program's own runs, no parameter is updated before all gradients are there;
    # where that function has code at hand, gradients are kept.
    num_later = {"off the module": 12, "by a call": 0}.get(how, 9)
    num_first = 0 if begin == 0 and how == "by a call" else 12
    assert run[1] == num_first + (12 if begin == 0 and how != "by a call" else num_later)


@pytest.mark.parametrize("is_written", ["in place", "by data", "by numpy"])
@pytest.mark.parametrize("what", ["batch", "weight", "frozen weight", "mask", "constant", "numpy's", "features"])
def test_what_is_overwritten_between_backward_pass_and_step_is_seen_before_anything_is_updated(what, is_written):
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    hooked(model, optimizer)
    batch = torch.randn(2, 3)
    written = {"batch": batch, "weight": model.last.weight, "frozen weight": model.frozen.weight, "mask": model.mask}
    written |= {"constant": model.constant, "numpy's": torch.from_numpy(model.numbers)}

    def step(writes: bool) -> None:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        written["features"] = model.features
        with torch.no_grad():
            if writes and is_written == "in place":
                written[what].mul_(3.0)
            elif writes and is_written == "by data":
                written[what].data.mul_(3.0)
            elif writes:
                written[what].detach().numpy()[:] *= 3.0
        before.clear()
        before.extend(p.detach().clone() for p in model.parameters())
        optimizer.step()

    before: list[torch.Tensor] = []
    for _ in range(3):
        step(writes=False)
    with pytest.raises(ApplyError, match=r"modified between|written to|other gradients|raised an error"):
        step(writes=True)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_small_decay_between_backward_pass_and_step_is_no_rounding_where_gradients_are_compared_roughly(monkeypatch):
    # As on a card, which says no more of a gradient than its norm and its form.
    monkeypatch.setattr(retained_graphs, "checksum_of", lambda gradient: None)
    monkeypatch.setattr(retained_graphs, "_share", lambda parameter: 1e-3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked(model, optimizer)

    def step(decay: float) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        for parameter in model.parameters():
            parameter.data.mul_(1 - decay)
        optimizer.step()

    step(0.0)
    with pytest.raises(ApplyError, match=r"written to|modified between"):
        step(1e-5)


class Masked(torch.nn.Module):
    """Layers that are trained around one that is not, with a mask, tensors that are no buffers, and features that the program holds on to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (torch.nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.ones(3))
        self.constant, self.numbers = torch.ones(3), np.ones(3, dtype=np.float32)

    def forward(self, x):
        features = torch.tanh(self.frozen(self.first(x) * self.mask * self.constant * torch.from_numpy(self.numbers)))
        self.features = features.detach()
        return self.last(features)


def test_what_is_written_between_backward_pass_and_step_and_has_no_part_in_it_is_no_reason_to_refuse():
    model = Masked()
    model.register_buffer("num_steps", torch.zeros(()))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    session = hooked(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        model.num_steps += 1
        optimizer.step()
    assert session.statistics["parameters updated in backward"] == 5 * 4


def test_trying_out_leaves_every_bit_of_parameters_and_their_versions():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        parameter = torch.randn(7, 5).to(dtype)
        parameter[0] = 0.0
        before = parameter.clone()
        bits, key = _bits_and_key(parameter)
        bits.bitwise_xor_(key)
        assert not torch.isfinite(parameter).all()
        assert not (parameter == before).any()
        bits.bitwise_xor_(key)
        assert torch.equal(parameter.view(torch.uint8), before.view(torch.uint8))


def test_a_parameter_that_is_frozen_before_the_step_is_stepped_all_the_same():
    def weights(technique: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if technique:
            hooked(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            model[0].requires_grad_(True)
            model(torch.ones(2, 3)).square().sum().backward()
            model[0].requires_grad_(step < 2)
            optimizer.step()
            assert model[0].weight.requires_grad == (step < 2)
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(weights(technique=True), weights(technique=False), rtol=0, atol=0)


def test_states_that_share_memory_are_updated_in_the_order_of_the_step():
    def weights(technique: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        session = hooked(model, optimizer) if technique else None
        for step in range(5):
            if step == 2:
                flat = torch.zeros(12)
                for at, layer in zip((0, 3), model, strict=True):
                    optimizer.state[layer.weight]["exp_avg"] = flat[at : at + 9].view(3, 3)
                del flat
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session is None or any("share memory" in note for note in session.notes)
        return [p.detach() for p in model.parameters()]

    torch.testing.assert_close(weights(technique=True), weights(technique=False), rtol=0, atol=0)


def test_undone_nothing_of_it_is_left():
    before = torch.autograd._engine_run_backward, torch.Tensor.register_hook, torch.Tensor.retain_grad
    run = train(UpdateInBackward(), PLAIN | {"clips": True}, max_norm=1.0, watches_gradients=False)
    assert torch.autograd._engine_run_backward is not before[0]
    run.session.undo()
    assert (torch.autograd._engine_run_backward, torch.Tensor.register_hook, torch.Tensor.retain_grad) == before
    assert not any(p._post_accumulate_grad_hooks for p in run.model.parameters())
    assert not run.optimizer._optimizer_step_pre_hooks
    assert run.model.state_dict().keys() == Tied().state_dict().keys()


def test_what_a_program_drops_is_freed_though_nothing_was_undone():
    model = Tied()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    hooked(model, optimizer)
    model(torch.arange(8)[None]).square().sum().backward()
    left = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_a_copy_of_the_model_has_no_hooks():
    model = Tied()
    hooked(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad]))
    twin = copy.deepcopy(model)
    twin(torch.arange(5)[None]).sum().backward()
    assert twin.table.weight.grad is not None


class Mine(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        return None


def test_gradients_of_parameters_that_are_made_of_other_tensors_are_kept():
    weights = []
    for is_planned in (False, True):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = hooked(model, optimizer) if is_planned else None
        for _ in range(3):
            model.weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach().a)
    assert torch.equal(*weights)
    assert session is not None and "wraps other tensors" in session.notes[0]


def test_optimizers_that_look_at_all_parameters_together_are_refused():
    model = torch.nn.Linear(2, 2)

    for optimizer in (torch.optim.LBFGS(model.parameters()), Mine(model.parameters())):
        with pytest.raises(ApplyError, match="not known to update each parameter independently"):
            hooked(model, optimizer)


@pytest.mark.parametrize(("max_norm", "kernel"), [(0.0, "same"), (1.0, "fused")])
def test_the_promised_saving_is_the_traced_one(max_norm, kernel):
    plain = traced(max_norm=max_norm)
    options = {option.settings["kernel"]: option for option in UpdateInBackward().options(Profile(plain, find(DEVICE)))}
    assert set(options) == {"same", "fused"}
    assert options["fused"].seconds < options["same"].seconds
    option = options[kernel]
    assert option.settings["clips"] is bool(max_norm)
    actual = traced(technique=NAME, settings=f"kernel:{kernel}+clips:{bool(max_norm)}", max_norm=max_norm)
    saved = peak_bytes(plain) - peak_bytes(actual)
    assert saved > 30e6
    assert peak_bytes(plain) - peak_bytes(plain, [option]) == pytest.approx(saved, rel=UpdateInBackward.tolerance)


SCALED = """\
import torch
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(64, 64), torch.nn.Parameter(torch.ones([]))

    def forward(self, x):
        return (self.scale.exp() * self.layer(x)).square().mean()


def workload():
    model = Scaled().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"kernel": "same", "clips": True}
    kept = Choice(technique="update_in_backward", where="", settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)
    apply_choices([kept], model, [optimizer])
    while True:
        model(torch.randn(8, 64, device="cuda")).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert not any(parameter.grad.source.held() for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        yield
"""


def test_clipping_on_the_virtual_gpu_makes_no_gradient_of_one_number(tmp_path):
    # Values of small tensors are followed there, and to ask for those of a gradient that is not kept would make it.
    (tmp_path / "program.py").write_text(SCALED)
    tape = capture(f"{tmp_path}/program.py:workload", device=DEVICE, tracing=TraceSettings(steps=2))
    assert "aten.mul_.Tensor" in [tape.strings[name] for name in tape.operators.name]


def test_clipping_on_the_virtual_gpu_makes_no_gradient_beside_memory_of_the_host_that_was_not_written(tmp_path):
    # Whether an operator reads such memory is asked by the storages of its arguments, and a gradient that is not kept has none.
    blank = SCALED.replace("    while True:", "    waiting = torch.empty(1 << 20)\n    while True:")
    (tmp_path / "program.py").write_text(blank)
    tape = capture(f"{tmp_path}/program.py:workload", device=DEVICE, tracing=TraceSettings(steps=2))
    assert len(tape.operators.name)


def test_nothing_is_offered_where_gradients_are_read_before_the_step():
    for averages, is_offered in ((0, True), (1, True), (8, False)):
        assert bool(list(UpdateInBackward().options(Profile(traced(averages=averages), find(DEVICE))))) == is_offered


def test_a_number_that_the_graph_has_saved_is_seen_through_a_dispatch_mode():
    """Autograd saves `2.5` as a tensor, which reaches a mode of torch's or ours (the virtual GPU) as the number."""

    class Passes(TorchDispatchMode):
        __module__ = "torch.utils.passing"

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hooked(model, optimizer)
    with Passes():
        (2.5 * model(torch.ones(2, 3)).tanh()).sum().backward()
        optimizer.step()
    assert session.statistics["parameters updated in backward"] == 2


def test_gradients_are_kept_where_a_mode_of_the_programs_sees_the_backward_pass():
    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = hooked(model, optimizer)
    loss = model(torch.ones(2, 3)).tanh().sum()
    with Passes():
        loss.backward()
    optimizer.step()
    assert session.statistics["parameters updated in backward"] == 0
    assert any("a mode of the program sees every operator" in note for note in session.notes)


def test_a_gradient_that_is_not_computed_and_is_given_to_compiled_code_is_read_in_python():
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    compiled = torch.compile(lambda gradient: gradient.abs().max(), backend="eager")
    # The sum over two rows of ones.
    assert compiled(model.weight.grad) == 2
    assert compiled(model.weight.grad.clone()) == 2
