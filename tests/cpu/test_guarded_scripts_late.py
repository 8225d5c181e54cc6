"""`tightfit run --guard` and what steps begin to do late, or write past torch's count of versions: the plain run's result, or one line why not."""

import textwrap
from pathlib import Path

import pytest
from tests.cpu.guarded_scripts import Scripts
from tests.cpu.test_guarded_scripts_attacks import text

HEAD = """
import functools, itertools
def batches():
    return DataLoader(data, batch_size=4, shuffle=True)
def train(x, y, factor=1):
    optimizer.zero_grad()
    update(mean_square(x, y) * factor)
"""
TAKEN_BACK = {
    "an average that is written by its data": """
        shadow = [p.detach().clone() for p in model.parameters()]
        for k, (x, y) in enumerate(batches()):
            if k > 1:
                for s, p in zip(shadow, model.parameters()):
                    s.data.mul_(0.9).add_(p.data, alpha=0.1)
            train(x, y)
        losses += shadow
        """,
    "a state that is written by its data": """
        state = torch.zeros(4, 16)
        for k, (x, y) in enumerate(batches()):
            if k > 1:
                state.data.add_(1.0)
            train(x, y, 1 + state.mean())
            losses.append(state.sum().item())
        """,
    "arrays of objects": """
        held = np.empty(2, dtype=object)
        held[0] = []
        for k, (x, y) in enumerate(batches()):
            held[0].append(k)
            held[1] = k
            train(x, y)
        losses += [*held[0], held[1]]
        """,
    "sets that grow": """
        seen, order = set(), set()
        for k, (x, y) in enumerate(batches()):
            seen.update(random.sample(range(1000), 7), [f"name {k}"])
            train(x, y)
            losses.append(len(seen))
            order.update(random.sample(range(1000), 7))
            losses.append(list(order))
        """,
    "sparse tensors": """
        graph = torch.eye(4).to_sparse()
        for k, (x, y) in enumerate(batches()):
            graph.mul_(0.9)
            train(graph @ x, y)
        losses.append(graph.to_dense())
        """,
    "turns before the first batch": """
        buffer = []
        for k, batch in enumerate(batches()):
            buffer.append(batch)
            if k < 3:
                continue
            train(*random.choice(buffer))
        """,
    "a cache of masks": """
        @functools.lru_cache(maxsize=None)
        def mask(n):
            return torch.ones(n, n).tril_() / n
        for k, (x, y) in enumerate(batches()):
            n = 2 + k % 3
            train(mask(n) @ x[:n], y[:n])
        """,
}
REFUSED = {
    "pool{...} was changed": """
        pool = {f"n{k}" for k in range(40)}
        for x, y in batches():
            losses.append(pool.pop())
            train(x, y)
        """,
    "noise has remembered a result": """
        @functools.lru_cache(maxsize=None)
        def noise(n):
            return torch.rand(8)
        for k, (x, y) in enumerate(batches()):
            train(x * noise(k), y)
        """,
    "it changed the states of an optimizer": """
        for k, (x, y) in enumerate(batches()):
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)
            train(x, y)
        """,
    "a state of an optimizer was written to by its `data`": """
        for k, (x, y) in enumerate(batches()):
            for state in optimizer.state.values():
                state["momentum_buffer"].data.mul_(0.5)
            train(x, y)
        """,
    "a tensor was given another shape": """
        kept = [torch.zeros(2)]
        for k, (x, y) in enumerate(batches()):
            kept[0].resize_(k + 3)
            train(x, y)
        """,
    "large was written to by its `data`": """
        large = torch.zeros(200, 200)
        def touch(tensor):
            tensor.data.add_(1)
        for k, (x, y) in enumerate(batches()):
            if k == 3:
                touch(large)
            train(x, y)
        """,
}


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return Scripts(tmp_path, capsys, monkeypatch)


def program(body: str, fails: set[int]) -> str:
    return text(HEAD, fails) + textwrap.dedent(body)


# Of three calls in each step: the fourth step before its backward pass, the fifth behind it.
@pytest.mark.parametrize("kind", TAKEN_BACK)
def test_what_steps_begin_to_do_late_is_taken_back(kind: str, scripts: Scripts) -> None:
    plain = scripts.run(scripts.write(program(TAKEN_BACK[kind], set())), guard=False)
    found = scripts.run(scripts.write(program(TAKEN_BACK[kind], {2 if "before" in kind else 10, 15})))
    assert plain.error is None
    assert found.error is None, found.notes
    assert found.is_same(plain)
    assert found.statistics["replays"] >= 1


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_taken_back_late_is_refused_with_the_reason(reason: str, scripts: Scripts) -> None:
    found = scripts.run(scripts.write(program(REFUSED[reason], {10})))
    assert isinstance(found.error, RuntimeError)
    assert reason in found.notes, found.notes


def test_what_a_script_does_at_a_signal_to_end_waits_for_the_end_of_the_turn(scripts: Scripts) -> None:
    body = """
        import os, signal
        def save(number, frame):
            losses.append((len(losses), model[0].weight.sum().item()))
        signal.signal(signal.SIGTERM, save)
        for k, (x, y) in enumerate(batches()):
            if k == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            train(x, y)
            losses.append(model[0].weight.sum().item())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        """
    for fails in (set[int](), {10}):
        found = scripts.run(scripts.write(program(body, fails)))
        assert found.error is None, found.notes
        losses = found.values["losses"]
        # Behind the turn in which it came, with the weights of that turn.
        assert losses[4] == (4, losses[3])
