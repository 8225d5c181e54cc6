"""`with tightfit.leaks():` names what grows and what keeps it, says nothing of what does not grow, and changes nothing."""

import collections
import contextvars
import functools
import gc
import sys
import weakref

import numpy as np
import pytest
import torch
from benchmarks.leaks import clean_loops, clean_state, containers, cycles, fragmentation, graphs, outside
from benchmarks.leaks.judge import SILENT, judged

import tightfit
from tightfit.errors import UsageError
from tightfit.runtime.leaks.found_leaks import CONTAINER, GRAPH, UNKNOWN
from tightfit.runtime.leaks.holder_search import bound_of
from tightfit.runtime.leaks.leak_watch import LeakWatch
from tightfit.runtime.leaks.live_storages import LiveStorages
from tightfit.runtime.leaks.step_samples import StepEnd, StepEnds
from tightfit.runtime.leaks.verdict import leaks_of
from tightfit.units import MIB

SCRIPTS = (containers, cycles, fragmentation, graphs, outside, clean_loops, clean_state)


# One for each kind of growth; all of them: TIGHTFIT_SLOW_TESTS=1, or `python -m benchmarks.leaks`. A search goes over all objects of this process.
LEAKING = [
    "outputs_of_validation_steps",
    "cache_without_bound",
    "output_on_the_context",
    "gradient_with_a_graph",
    "error_that_is_kept",
    "native_buffers",
    "each_request_larger_than_the_last",
]
MORE_LEAKING = [
    "predictions_concatenated",
    "models_that_were_prepared",
    "running_loss_of_an_evaluation",
    "gradients_that_are_never_zeroed",
    "log_probabilities_of_all_episodes",
    "decoded_samples",
]


@pytest.fixture(autouse=True)
def no_other_tests_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search begins at the globals of the program's modules. Those of all other tests, with what they keep from test to test, would be gone through too."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests" and name != __name__]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", [*LEAKING, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LEAKING)])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_class_line_and_holder_of_a_leak(name: str) -> None:
    assert SCRIPTS
    found = judged(name)
    assert found.is_right, found.said


@pytest.mark.parametrize(
    "name",
    [
        "replay_buffer_that_is_not_full_yet",
        "lru_cache_with_a_bound",
        "cycles_that_are_collected",
        "lazily_made_modules",
        "exponential_moving_average",
        "generations_of_other_lengths",
        "variable_lengths",
        "virtual_side_stream",
    ],
)
def test_a_run_that_does_not_leak_is_clean(name: str) -> None:
    assert judged(name).said == SILENT


def train(num_steps: int, kept: list[torch.Tensor]) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8), torch.nn.Dropout())
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(num_steps):
        output = model(torch.randn(32, 64))
        loss = output.pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(output.detach() + 1)
        losses.append(loss.item())
    return losses


def test_steps_of_an_optimizer_need_no_mark_and_results_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(8, [])
    kept: list[torch.Tensor] = []
    with tightfit.leaks() as found:
        watched = train(8, kept)
    assert watched == plain
    (leak,) = found.leaks
    assert (leak.cause, leak.bytes_per_step) == (CONTAINER, 32 * 8 * 4)
    assert leak.holder.path.endswith("kept[-1]")
    assert capsys.readouterr().err == f"tightfit: {found.explain()}\n"


def test_a_loop_of_forward_passes_has_its_steps_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    model, outputs = torch.nn.Linear(64, 64), []
    with tightfit.leaks() as found:
        for _ in range(9):
            outputs.append(model(torch.ones(64, 64)))
    (leak,) = found.leaks
    assert leak.cause == GRAPH
    assert leak.holder.path.endswith("outputs[-1]")
    assert "detach" in capsys.readouterr().err


def test_what_holds_is_found_behind_arrays_and_sparse_tensors_and_sized_as_it_grows() -> None:
    """A list in a deque that is full grows, a settings dict around a list does not, and a freed graph retains nothing of an output that is kept."""
    weight = torch.ones(64, 64, requires_grad=True)
    variable = contextvars.ContextVar[list[torch.Tensor]]("steps")
    variable.set([])
    arrays, parts, outputs, emptied = [], [], [], []
    objects, full = [], collections.deque([[]], maxlen=1)
    settings = {"history": [], **dict.fromkeys(range(100))}
    with tightfit.leaks(quiet=True) as found:
        for _ in range(8):
            arrays.append(torch.ones(64, 64).numpy())
            objects.append(np.array([torch.ones(64, 64), None], dtype=object))
            parts.append(torch.ones(64, 64).to_sparse())
            variable.get().append(torch.ones(64, 64))
            full[0].append(torch.ones(64, 64))
            settings["history"].append(torch.ones(64, 64))
            outputs.append(weight * 2)
            outputs[-1].sum().backward()
            emptied.append(torch.ones(64, 64))
            emptied[-1].untyped_storage().resize_(0)
            found.step()
    said = {
        leak.holder.path.rpartition("arrays_and_sparse_tensors_and_sized_as_it_grows.")[2]: (
            leak.cause,
            leak.holder.what,
        )
        for leak in found.leaks
    }
    expected = ["arrays[-1].base", "full[-1][-1]", "objects[-1][...][-2]", "outputs[-1]", "settings['history'][-1]"]
    expected += ["parts[-1]._indices()", "steps[-1]"]
    assert said == dict.fromkeys(expected, (CONTAINER, "a list of 8; one more with each step"))


def test_batches_that_are_larger_in_each_step_are_no_leak() -> None:
    """A buffer that each step makes anew out of its last one is."""
    weight, buffer = torch.ones(64, 64, requires_grad=True), torch.zeros(0, 64)
    with tightfit.leaks(quiet=True) as found:
        for step in range(8):
            batch = torch.from_numpy(np.ones((64 * step, 64), dtype=np.float32)) + 1
            output = batch @ weight
            output.sum().backward()
            padded = torch.nn.functional.pad(buffer, (0, 0, 0, 64))
            buffer = padded.relu()
            found.step()
    assert len(output) == 7 * 64
    assert {leak.holder.path.rpartition(".")[2] for leak in found.leaks} == {"buffer", "padded"}


def test_what_bounds_a_container_bounds_not_what_it_holds() -> None:
    full, filling, inner = collections.deque([[]], maxlen=1), collections.deque([[]], maxlen=9), [1]
    assert bound_of((inner, full), inner) == ""
    assert bound_of((inner, filling), inner) == "bounded: deque(maxlen=9)"
    assert bound_of((full, inner), inner) == ""
    assert bound_of((full,), full) == "bounded: deque(maxlen=1)"


def test_growth_that_no_operator_of_this_thread_has_made_is_said() -> None:
    ends = StepEnds()
    for step in range(8):
        ends.add(
            functools.partial(
                StepEnd,
                bytes_by_site={},
                bytes_by_device={"cuda": 100 * MIB},
                card_allocated=(100 + 2 * step) * MIB,
                card_reserved=(100 + 2 * step) * MIB,
                card_outside=0,
                resident=None,
                malloc=None,
            )
        )
    (leak,) = leaks_of(ends, LiveStorages(), {}, 8)
    assert (leak.cause, leak.bytes_per_step) == (UNKNOWN, 2 * MIB)
    assert "other threads" in leak.explain()


def test_nothing_is_kept_alive() -> None:
    """Neither by the watch, nor by the frames whose local variables it has looked at."""
    history: list[torch.Tensor] = []
    with tightfit.leaks(quiet=True) as found:
        for _ in range(8):
            local = torch.ones(64, 64) * 2
            history.append(local.clone())
            found.step()
    assert found.leaks
    dead = [weakref.ref(tensor.untyped_storage()) for tensor in (local, *history)]
    history.clear()
    del local
    gc.collect()
    assert not any(reference() is not None for reference in dead)


def test_garbage_of_before_is_left_to_the_program() -> None:
    flags, before = gc.get_debug(), list(gc.garbage)
    judged("output_on_the_context")
    assert (gc.get_debug(), gc.garbage) == (flags, before)


def test_an_error_passes_and_what_grew_until_then_is_named() -> None:
    history = []

    def train(found: LeakWatch) -> None:
        for step in range(20):
            history.append(torch.ones(64, 64) * step)
            found.step()
            if step == 9:
                raise torch.OutOfMemoryError("too much")

    with pytest.raises(torch.OutOfMemoryError), tightfit.leaks(quiet=True) as found:
        train(found)
    assert [leak.holder.path.rpartition(".")[2] for leak in found.leaks] == ["history[-1]"]


def test_too_few_steps_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with tightfit.leaks() as found:
        torch.ones(4).sum()
    assert found.leaks == ()
    assert capsys.readouterr().err == "tightfit: leaks: needs 6 steps; this block has 0 (call step() where one ends)\n"
    with pytest.raises(UsageError, match="outside of the block"):
        found.step()
    with pytest.raises(UsageError, match="entered once"):
        found.__enter__()


class Proxy:
    """As lazy proxies of libraries are: whoever reads its class, or any attribute, makes it load what it stands for."""

    loaded = 0

    def __getattribute__(self, name: str) -> object:
        Proxy.loaded += 1
        return object.__getattribute__(self, name)


def test_the_search_runs_no_code_of_the_program() -> None:
    others, history = [Proxy()], []
    with tightfit.leaks(quiet=True) as found:
        for _ in range(8):
            history.append(torch.ones(64, 64) * 2)
            found.step()
    assert [leak.holder.path.rpartition(".")[2] for leak in found.leaks] == ["history[-1]"]
    assert (len(others), Proxy.loaded) == (1, 0)
