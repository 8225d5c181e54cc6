"""Plans for tests of what shows them: no workload is traced for these."""

import dataclasses

from tightfit.planner.plan import Alternative, Bound, Choice, ParetoPoint, Plan, Run
from tightfit.simulate.estimate import Peak
from tightfit.tape import Assumption

GIB = 1 << 30


def run(gib: float, seconds: float) -> Run:
    """A run that needs `gib` of GPU memory, with a range of an eighth of a GiB on both sides."""
    size, doubt = int(gib * GIB), GIB // 8
    peak = Peak(
        allocated_bytes=size - GIB,
        reserved_bytes=size - GIB // 2,
        device_bytes=size,
        device_low_bytes=size - doubt,
        device_high_bytes=size + doubt,
    )
    return Run(peak=peak, seconds_per_step=seconds)


def a_plan(**changes: object) -> Plan:
    """Four blocks checkpointed for 10 GiB, with a curve of three points."""
    plan = Plan(
        target="train.py",
        device="a card",
        capacity_bytes=24 * GIB,
        budget_bytes=10 * GIB,
        headroom_bytes=GIB // 8,
        fits=True,
        run=run(9.5, 0.12),
        baseline=run(15, 0.1),
        promised_bytes=int(9.4 * GIB),
        choices=tuple(
            Choice(
                technique="checkpointing",
                where=f"Net.h.{i}",
                settings={"keep": [i // 4], "outputs": ["mlp.up"]},
                saves_bytes=GIB,
                adds_seconds=0.005,
                exact=True,
            )
            for i in range(4)
        ),
        bound=Bound(seconds_per_step=0.119, is_proven=True),
        alternatives=(
            Alternative(
                name="no changes",
                device_bytes=15 * GIB,
                seconds_per_step=0.1,
                fits=False,
                exact=True,
                why="5 GiB over the budget",
            ),
            Alternative(
                name="by hand",
                device_bytes=None,
                seconds_per_step=None,
                fits=None,
                exact=False,
                why="predicted, not verified",
            ),
        ),
        frontier=(
            ParetoPoint(device_bytes=13 * GIB, seconds_per_step=0.104),
            ParetoPoint(device_bytes=9 * GIB, seconds_per_step=0.13),
            ParetoPoint(device_bytes=11 * GIB, seconds_per_step=0.11),
        ),
        advice=("half the batch size would need about 8 GiB",),
        model={"roots": [{"class": "Net", "num_parameters": 3, "inputs": {"0": [2, 3]}}]},
        host_bytes=0,
        disk_bytes=0,
        versions={"torch": "2.13.0"},
        assumptions=(
            Assumption(where="train.py:3", what="a value is assumed to be 1.0"),
            Assumption(where="train.py:9", what="a value is assumed to be 1.0"),
        ),
    )
    return dataclasses.replace(plan, **changes)
