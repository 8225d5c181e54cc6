"""Seconds of programs that load batches: on the kernels' stream, and ahead on a stream of their own."""

import pytest

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.cost.copies import copy_seconds
from tightfit.devices.catalogue import find
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import StepTimeline, step_timeline
from tightfit.tape import CopyDirection

PROGRAM = """\
import torch

WIDTH = 4096


def train(way):
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.empty(8192, WIDTH).pin_memory() for _ in range(2)]
    side = torch.cuda.Stream()
    following = None

    def load(turn):
        if way == "pageable":
            return torch.empty(8192, WIDTH).cuda()
        if way == "pinned":
            return batches[turn % 2].cuda(non_blocking=True)
        with torch.cuda.stream(side):
            return batches[turn % 2].cuda(non_blocking=True)

    for turn in range(100):
        if way == "ahead":
            # As NVIDIA's DataPrefetcher: the batch of the next step is copied beside this one's kernels.
            following = load(0) if following is None else following
            torch.cuda.current_stream().wait_stream(side)
            batch, following = following, load(turn + 1)
        else:
            batch = load(turn)
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""


@pytest.fixture(scope="module")
def timelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StepTimeline]:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    card = find("RTX 4090")
    found = {}
    for way in ("pageable", "pinned", "ahead"):
        target = GeneratorFunction(location=str(path), function="train", parameters={"way": way})
        found[way] = step_timeline(priced(trace(target, label=way, device=card.name).tape, card))
    return found


def test_a_batch_that_is_loaded_ahead_costs_nothing(timelines: dict[str, StepTimeline]) -> None:
    pinned, pageable, ahead = (timelines[way] for way in ("pinned", "pageable", "ahead"))
    num_bytes = 8192 * 4096 * 4
    copying = copy_seconds(num_bytes, find("RTX 4090"))
    assert [copy.num_bytes for copy in ahead.copies] == [num_bytes]
    assert ahead.hidden_seconds(CopyDirection.TO_CARD) == pytest.approx(copying)
    assert pinned.hidden_seconds(CopyDirection.TO_CARD) == pytest.approx(0.0)
    assert pinned.seconds == pytest.approx(ahead.seconds + copying)
    # Pageable memory takes longer, and lets the GPU wait for the host besides.
    slower = copy_seconds(num_bytes, find("RTX 4090"), is_pinned=False)
    assert pageable.seconds > ahead.seconds + slower
    assert pageable.seconds == pytest.approx(ahead.seconds + slower, rel=1e-3)
