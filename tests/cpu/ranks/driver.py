"""Runs programs plainly and on several ranks, each in processes that are forked from this one, and says how they compare. `python -m tests.cpu.ranks.driver OUT [NAME ...]`"""

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.cpu.ranks import (  # noqa: F401 - enter their programs
    accumulated,
    by_hand,
    handed_over,
    left_behind,
    other_arguments,
    other_weights,
    recomputed,
    refused,
    returned,
    sharded,
    streamed,
)
from tests.cpu.ranks.programs import PROGRAMS

from tightfit.ranks.rank_attachment import RankAttachment
from tightfit.ranks.rank_group import RankGroup
from tightfit.ranks.rank_plan import RankPlan

_BOUND = 2e-6


def main(out: str, names: list[str]) -> None:
    """Writes a verdict for each program: `same`, or what was said instead."""
    torch.set_num_threads(1)
    # What each child would import by itself, and what of a proof's tables is the same for all.
    _run_plain(PROGRAMS["perceptron"][0], os.devnull)
    verdicts = {}
    os.environ["TEST_FOLDER"] = os.path.dirname(os.path.abspath(out))
    for name, (program, options) in PROGRAMS.items():
        if names and name not in names:
            continue
        began = time.monotonic()
        verdicts[name] = verdict_of(program, options)
        # Of a program that is one of several: seen as it goes, where somebody looks.
        print(f"{time.monotonic() - began:.1f} {name} | {verdicts[name]}", flush=True)
    Path(out).write_text(json.dumps(verdicts))


def verdict_of(program: Callable[[], Any], options: dict[str, Any]) -> str:
    """How a run on ranks compares with the plain one."""
    options = dict(options)
    num_ranks, compares, is_as_saved = (
        options.pop("ranks", 2),
        options.pop("compares", True),
        options.pop("is_as_saved", False),
    )
    with tempfile.TemporaryDirectory() as folder:
        found = _on_ranks(program, num_ranks, folder, options)
        plain = _results([_forked(lambda: _run_plain(program, f"{folder}/plain"))], [f"{folder}/plain"])[0]
    if is_as_saved and not any("error" in each for each in found):
        # Bit for bit what the same ranks give that save everything.
        with tempfile.TemporaryDirectory() as folder:
            found += _on_ranks(program, num_ranks, folder, {**options, "recomputes": ()})[:1]
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        return " / ".join(dict.fromkeys(errors))
    if "error" in plain:
        return f"plain: {plain['error']}"
    for other in found[1:]:
        for key, value in found[0]["result"].items():
            if not torch.equal(torch.as_tensor(value), torch.as_tensor(other["result"][key])):
                return f"ranks have another {key}"
    if compares:
        for key, value in plain["result"].items():
            one, other = torch.as_tensor(value).double(), torch.as_tensor(found[0]["result"][key]).double()
            bound = options.get("bound", _BOUND)
            if one.shape != other.shape or not torch.allclose(one, other, rtol=bound, atol=bound, equal_nan=True):
                return f"{key} differs by {(one - other).abs().max().item():.2e}"
    return "same"


def _on_ranks(program: Callable[[], Any], num_ranks: int, folder: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    pids = [
        _forked(lambda rank=rank: _run_rank(program, rank, num_ranks, folder, options)) for rank in range(num_ranks)
    ]
    return _results(pids, [f"{folder}/{rank}" for rank in range(num_ranks)])


def _forked(run: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001 - it is the child's end
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def _results(pids: list[int], paths: list[str]) -> list[dict[str, Any]]:
    for pid in pids:
        os.waitpid(pid, 0)
    return [torch.load(path, weights_only=False) if os.path.exists(path) else {"error": "ended"} for path in paths]


def _run_plain(program: Callable[[], Any], path: str) -> None:
    _seeded()
    try:
        torch.save({"result": program()}, path)
    except Exception as error:  # noqa: BLE001 - it is the verdict
        torch.save({"error": f"{type(error).__name__}: {error}"}, path)


def _run_rank(program: Callable[[], Any], rank: int, num_ranks: int, folder: str, options: dict[str, Any]) -> None:
    group = RankGroup(dist.FileStore(f"{folder}/store", num_ranks), rank, num_ranks, on_cards=False)
    attachment = RankAttachment(
        group,
        allows_randomness=options.get("allows_randomness", False),
        check_steps=options.get("check_steps", 2),
        asked=RankPlan(
            shards_states=options.get("shards_states", False),
            recomputed=options.get("recomputes", ()),
            micro_batch=options.get("micro_batch"),
            streamed=options.get("streamed"),
        ),
        tell=lambda _: None,
    )
    attachment.begin()
    os.environ["TEST_RANK"] = str(rank)
    _seeded()
    try:
        result = program()
        attachment.end()
        torch.save({"result": result}, f"{folder}/{rank}")
    except Exception as error:  # noqa: BLE001 - it is the verdict
        if os.environ.get("TEST_TRACES"):
            traceback.print_exc()
        torch.save({"error": f"{type(error).__name__}: {attachment.failure or error}"}, f"{folder}/{rank}")


def _seeded() -> None:
    import random

    import numpy as np

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
