"""While a plan waits for its models, calls are watched: per thread, through exceptions, for several who wait; and nothing is different after that."""

import copy
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from tests.cpu.applied import Net, batch_of, choice, made, root, train
from torch import nn

from tightfit.runtime.attach import Attachment
from tightfit.techniques.wrappers.forwards import WrappedForward
from tightfit.torch_hooks.calls import on_outermost_call

CALL, INIT = nn.Module.__call__, torch.optim.Optimizer.__init__
BLOCK = choice("checkpointing", "Net.layers.1")


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Iterator[None]:
    yield
    gc.collect()
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__) == (CALL, INIT)


class Told:
    """Notes the outermost calls."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.modules: list[nn.Module] = []
        self.error = error

    def before_outermost_call(self, module: nn.Module, _args: object, _kwargs: object) -> None:
        self.modules.append(module)
        if self.error is not None:
            raise self.error


def test_only_outermost_calls_are_told_also_after_an_exception_in_a_forward() -> None:
    model, told = Net(), Told()
    leave = on_outermost_call(told)
    model(batch_of(0)[0])
    handle = model.layers[2].narrow.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(batch_of(0)[0])
    handle.remove()
    model(batch_of(0)[0])
    leave()
    assert told.modules == [model] * 4


def test_another_thread_that_evaluates_meanwhile_is_told_of_its_own_calls() -> None:
    model, other, told = Net(), Net(), Told()

    def evaluate(*_: object) -> None:
        thread = threading.Thread(target=lambda: other.eval()(batch_of(0)[0]))
        thread.start()
        thread.join()

    model.layers[1].register_forward_pre_hook(evaluate)
    leave = on_outermost_call(told)
    model(batch_of(0)[0])
    leave()
    assert told.modules == [model, other]


def test_what_is_called_in_a_backward_pass_is_not_told() -> None:
    model, told = Net(), Told()
    leave = on_outermost_call(told)
    rows = torch.ones(4, 8, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, rows, use_reentrant=False).sum().backward()
    leave()
    assert told.modules == [model]


def test_an_exception_of_who_is_told_ends_the_call_and_the_next_one_is_told_again() -> None:
    model, told = Net(), Told(KeyboardInterrupt())
    leave = on_outermost_call(told)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(batch_of(0)[0])
    leave()
    assert told.modules == [model] * 2
    assert len(model(batch_of(0)[0])) == 4


def test_two_attachments_each_put_on_what_is_theirs() -> None:
    expected = train(*made())
    attachments = [Attachment([BLOCK]), Attachment([choice("checkpointing", "Net.layers.2")])]
    ends = [attachment.install() for attachment in attachments]
    model, optimizer = made()
    losses = train(model, optimizer)
    assert losses == expected
    assert [isinstance(layer.forward, WrappedForward) for layer in model.layers] == [False, True, True]
    assert [len(attachment.roots) for attachment in attachments] == [1, 1]
    for end in ends:
        end()


def test_an_attachment_that_nobody_keeps_has_ended() -> None:
    Attachment([BLOCK]).install()
    gc.collect()
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__) == (CALL, INIT)


def test_an_exception_while_it_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = Attachment([BLOCK])

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attachment._calls, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attachment.install()
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__) == (CALL, INIT)


def test_a_module_is_called_with_arguments_of_any_name() -> None:
    class Named(nn.Module):
        def forward(self, module: int, optimizer: int) -> int:
            return module + optimizer

    leave = on_outermost_call(told := Told())
    assert Named()(module=1, optimizer=2) == 3
    leave()
    assert len(told.modules) == 1


def test_a_parametrization_that_torch_calls_while_it_makes_it_is_no_model() -> None:
    # What concerns optimizers would go to it, and be refused, since it has none.
    attachment = Attachment([choice("update_in_backward", "optimizer", kernel="same", clips=False)])
    end = attachment.install()
    model, optimizer = made()
    nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    train(model, optimizer)
    assert [root.name for root in attachment.roots] == ["Net"]
    end()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_that_the_plan_knows_and_changes_nothing_of_runs_as_it_is() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    roots = [
        root(Net()),
        {"class": type(scripted).__name__, "num_parameters": 12, "inputs": {"0": [2, 3]}, "varying": []},
    ]
    attachment = Attachment([BLOCK], planned=roots)
    leave = attachment.install()
    model, optimizer = made()
    train(model, optimizer, range(1))
    assert scripted(torch.zeros(2, 3)).shape == (2, 3)
    train(model, optimizer, range(1, 2))
    leave()


@pytest.mark.parametrize(("is_copied", "num_searches"), [(False, 0), (True, 1)])
def test_an_optimizer_of_a_live_model_starts_no_search_through_all_objects(
    is_copied: bool, num_searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    end = Attachment([BLOCK]).install()
    train(model, optimizer)
    searches: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: searches.append(None))
    other = copy.deepcopy(model) if is_copied else model
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    train(other, optimizer)
    assert len(searches) == num_searches
    end()


class Wrapping(nn.Module):
    """Makes its projector at its first call (vit-pytorch's Dino, byol-pytorch)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.projector: nn.Module | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.net(rows)
        if self.projector is None:
            self.projector = nn.Sequential(nn.Linear(rows.shape[-1], 8), nn.ReLU(), nn.Linear(8, 4))
        return self.projector(rows)


class Learner(nn.Module):
    """Calls what it wraps in its constructor, for the projector's sake."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Wrapping()
        self.student(batch_of(0)[0])
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            self.teacher(batch_of(0)[0])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.student(rows).square().mean()


def test_a_call_in_a_constructor_is_not_the_first_one_of_a_model() -> None:
    chosen = [choice("checkpointing", "Wrapping.projector"), choice("optimizer_kernel", "optimizer", kernel="fused")]
    attachment = Attachment(chosen)
    end = attachment.install()
    learner = Learner()
    assert not attachment.roots
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    learner(batch_of(0)[0]).backward()
    optimizer.step()
    end()
    assert [each.name for each in attachment.roots] == ["Learner", "Wrapping", "Wrapping"]
    attachment.report()
    assert isinstance(learner.student.projector, nn.Sequential)
    assert isinstance(vars(learner.student.projector).get("forward"), WrappedForward)
