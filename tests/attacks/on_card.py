"""The attacks on the GPU of this machine, where copies and kernels run beside each other, in as many processes as it has processors.

    python -m tests.attacks.on_card [--minutes 4] [--out FOLDER] [--device cuda] [--backward-thread] [NAME ...]

Programs make their tensors on the device. First all programs are tried with the techniques that move something between GPU and host, then with
the others, in an order drawn by name. A process that loses the GPU (an assertion of a kernel) is replaced. A pair that is wrong is tried again
after two plain runs: where these differ, the program's own kernels do, and the pair is said to be so. Ends with 1 if a pair is wrong or crashed.
"""

import argparse
import collections
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

ON_THE_WAY = ("offload", "streaming", "host")
VERDICTS_OF_OTHERS = ("its own kernels differ", "plain run fails", "process lost")


def main(arguments: list[str]) -> int:
    """One line for each pair that is wrong or crashed, and the counts."""
    parser = argparse.ArgumentParser(prog="tests.attacks.on_card", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--out", type=Path, help="folder for pairs.jsonl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--techniques", default="", help="only those whose names contain one of these, by commas")
    parser.add_argument(
        "--backward-thread", action="store_true", help="backward passes run in a thread of their own, at the host too"
    )
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    given = parser.parse_args(arguments)
    os.environ["TIGHTFIT_ATTACKS_DEVICE"] = given.device
    os.environ["TIGHTFIT_ATTACKS_BACKWARD_THREAD"] = "1" if given.backward_thread else ""
    rows = _tried(
        _jobs(given.names, given.techniques.split(",")), given.processes, time.monotonic() + 60 * given.minutes
    )
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = collections.Counter(outcome for _, _, outcome, _ in rows)
    for name, variant, outcome, reason in rows:
        if outcome not in ("right", "refused", "no place"):
            print(f"{name:32} {variant:36} {outcome:8} {reason[:300]}")
    print(f"{len({row[0] for row in rows})} programs: {dict(counts)}")
    return int(bool(counts["wrong"] or counts["crashed"] or counts["process lost"]))


def _jobs(names: list[str], parts: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    from tests.attacks.places import VARIANTS
    from tests.attacks.registry import attacks

    wanted = sorted((n for n in attacks() if not names or n in names), key=lambda name: zlib.crc32(name.encode()))
    chosen = [name for name in VARIANTS if any(part in name for part in parts)]
    moving = tuple(name for name in chosen if any(word in name for word in ON_THE_WAY))
    others = tuple(name for name in chosen if name not in moving)
    return [(name, variants) for variants in (moving, others) if variants for name in wanted]


def _tried(jobs: list[tuple[str, tuple[str, ...]]], num_processes: int, end: float) -> list[list[str]]:
    """Rows of name, technique, outcome and reason; nothing is begun after `end`."""
    rows: list[list[str]] = []
    left = collections.deque(jobs)
    workers = {worker.pipe: worker for worker in (_Worker() for _ in range(num_processes))}
    while workers:
        for pipe in multiprocessing.connection.wait(list(workers), timeout=60):
            worker = workers[pipe]
            try:
                rows += worker.pipe.recv()
                worker.job = None
            except EOFError:
                if worker.job is not None:
                    rows.append([worker.job[0], "", "process lost", f"exit code {worker.exit_code()}"])
                del workers[pipe]
                worker = _Worker()
                workers[worker.pipe] = worker
                continue
            if left and time.monotonic() < end:
                worker.give(left.popleft())
            else:
                worker.give(None)
                del workers[pipe]
    return rows


class _Worker:
    """A process that tries one job after another; it asks for the first with an empty answer."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.job: tuple[str, tuple[str, ...]] | None = None
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, job: tuple[str, tuple[str, ...]] | None) -> None:
        self.job = job
        self.pipe.send(job)

    def exit_code(self) -> int | None:
        self._process.join(10)
        return self._process.exitcode


def _work(pipe: Any) -> None:
    import torch
    from tests.attacks.backward_thread import BackwardThread

    torch.set_num_threads(1)
    if os.environ["TIGHTFIT_ATTACKS_BACKWARD_THREAD"]:
        with BackwardThread().in_use():
            _work_on(pipe)
    else:
        _work_on(pipe)


def _work_on(pipe: Any) -> None:
    import torch

    pipe.send([])
    while (job := pipe.recv()) is not None:
        name, variants = job
        rows: list[list[str]] = []
        try:
            for variant in variants:
                rows.append([name, variant, *_verdict(name, variant)])
                if "device-side assert" in rows[-1][3] or "CUDA error" in rows[-1][3]:
                    break
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a kernel's assertion comes late, and the process is of no use after it
            rows.append(
                [name, "", "process lost", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"]
            )
            pipe.send(rows)
            pipe.close()
            os._exit(0)
        pipe.send(rows)


def _verdict(name: str, variant: str) -> tuple[str, str]:
    from tests.attacks.harness import Outcome, repeats, run
    from tests.attacks.registry import attacks

    attack = attacks()[name]
    try:
        verdict = run(attack, variant)
    except Exception as error:  # noqa: BLE001 - the program does not run on this device
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "plain run fails", f"{last.filename.rpartition('/')[2]}:{last.lineno} {type(error).__name__}: {error}"[
            :300
        ]
    if verdict.outcome is Outcome.WRONG and not repeats(attack, variant):
        return "its own kernels differ", verdict.reason
    return verdict.outcome.value, verdict.reason


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
