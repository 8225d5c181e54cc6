"""The cache emptied at a border of phases: offered where a replay shows that it helps, and the applied run holds what the replay said."""

import torch
from tests.cpu import empty_cache_models as models
from tests.cpu.module_training import DEVICE, choice, traced

from tightfit.allocator.settings import AllocatorSettings
from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.runtime.apply import apply_choices
from tightfit.simulate.timeline_bytes import replay_timeline
from tightfit.simulate.with_empty_cache import with_emptied_cache
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import EventKind, Tape
from tightfit.techniques.lifetimes.empty_cache import EmptyCache


def _reserved(tape: Tape) -> int:
    return int(replay_timeline(with_workspaces_of(find(DEVICE), tape), AllocatorSettings()).reserved.max())


def test_the_applied_run_reserves_what_the_replay_said() -> None:
    plain = traced(models.__file__, "uneven")
    options = list(EmptyCache().options(Profile(plain, find(DEVICE))))
    assert options
    best = min(options, key=lambda o: _reserved(with_emptied_cache(plain, o.empties_at)))
    promised = _reserved(with_emptied_cache(plain, best.empties_at))
    assert promised < 0.98 * _reserved(plain)
    assert best.seconds > 0
    applied = traced(models.__file__, "uneven", [best])
    assert int((applied.events.kind == EventKind.EMPTY_CACHE).sum()) == len(best.empties_at)
    assert abs(_reserved(applied) - promised) <= 0.02 * promised


def test_each_border_is_put_on_and_taken_off(monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    borders = {"before the forward": 1, "after the forward": 1, "before the optimizer": 2, "after the optimizer": 2}
    for border, num_calls in borders.items():
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters())
        calls.clear()
        with apply_choices([choice("empty_cache", "allocator", border=border)], model, [optimizer]):
            with torch.no_grad():
                model(torch.ones(1, 3))
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            if num_calls == 2:
                optimizer.step()
        assert len(calls) == num_calls
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert len(calls) == num_calls
