"""`with tightfit.leaks():` names what grows and what keeps it, says nothing of what does not grow, and changes nothing."""

import gc
import sys
import weakref

import pytest
import torch
from benchmarks.leaks import clean_loops, clean_state, containers, cycles, fragmentation, graphs, outside
from benchmarks.leaks.judge import SILENT, judged

import tightfit
from tightfit.errors import UsageError
from tightfit.runtime.leaks.found_leaks import CONTAINER, GRAPH
from tightfit.runtime.leaks.leak_watch import LeakWatch

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
