"""`tightfit place`: assigns an offset to each buffer of a CSV file, so that all of them fit the capacity, or says why they do not."""

import json as json_module
import sys
from typing import Annotated

from cyclopts import Parameter

from tightfit.cli.arguments.sizes import Size
from tightfit.errors import UsageError
from tightfit.output_files import check_outputs
from tightfit.placement.buffers import read_problem, write_solution
from tightfit.placement.offsets import PlacementSolution
from tightfit.placement.strategies import solve
from tightfit.units import format_bytes, parse_bytes

_MAX_NAMES = 8


def place(
    file: str,
    /,
    *,
    capacity: Size,
    alignment: Size = "1",
    seconds: float = 60.0,
    output: Annotated[str | None, Parameter(name=["--output", "-o"])] = None,
    json: bool = False,
) -> int:
    """Assign an offset to each buffer of FILE (a CSV with the columns id,lower,upper,size). Exit code 1: they do not fit.

    Args:
        file: the problem; a buffer lives from `lower` until just before `upper`.
        capacity: size of the arena, such as 22GiB; a number without a unit is in bytes, as the sizes of the file are.
        alignment: every offset is a multiple of this.
        seconds: time limit of the search.
        output: write the buffers with their offsets to this CSV file.
        json: print one JSON object instead of text.
    """
    if not seconds > 0:
        raise UsageError(f"--seconds {seconds:g} is not a valid search time; give a number above 0")
    # The problem itself may be the output: it gets the column `offset` then.
    check_outputs({"--output": output})
    capacity_bytes = _bytes_of("--capacity", capacity)
    problem = read_problem(file, capacity=capacity_bytes, alignment=_bytes_of("--alignment", alignment))
    solution = solve(problem, seconds=seconds)
    try:
        if output is not None:
            write_solution(output, problem, solution.offsets)
    finally:
        # Also where the file could not be written: the search may have taken a minute.
        sys.stdout.write(
            json_module.dumps(_as_json(solution, capacity_bytes)) + "\n" if json else _text(solution, capacity_bytes)
        )
    return 0 if solution.fits else 1


def _bytes_of(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def _as_json(solution: PlacementSolution, capacity: int) -> dict[str, object]:
    return {
        "schema": 1,
        "offsets": dict(solution.offsets),
        "height": solution.height,
        "lower_bound": solution.lower_bound,
        "seconds": solution.seconds,
        "fits": solution.fits,
        "proven": solution.fits or solution.is_proven_infeasible,
        "reason": _why(solution, capacity),
        "strategy": solution.strategy,
    }


def _text(solution: PlacementSolution, capacity: int) -> str:
    crowd = solution.crowd
    facts = (
        f"height       {solution.height} ({format_bytes(solution.height)}), found by {solution.strategy} in {solution.seconds:.2f} s\n"
        f"lower bound  {crowd.num_bytes} ({format_bytes(crowd.num_bytes)}), live at moment {crowd.moment}\n"
    )
    if solution.fits:
        return f"fits: {capacity - solution.height} bytes to spare\n{facts}"
    return f"does not fit: {_why(solution, capacity)}\n{facts}"


def _why(solution: PlacementSolution, capacity: int) -> str:
    """Why it does not fit; empty where it does."""
    crowd = solution.crowd
    if solution.fits:
        return ""
    # The lower bound alone rules the capacity out: these buffers are live at once.
    if crowd.num_bytes > capacity:
        # Thousands of buffers can be live at the peak.
        names = ", ".join(crowd.names[:_MAX_NAMES])
        more = len(crowd.names) - _MAX_NAMES
        who = f"{names} and {more} more" if more > 0 else names
        return f"{crowd.num_bytes} bytes live at moment {crowd.moment}, {crowd.num_bytes - capacity} too many: {who}"
    # A search that ended by itself is a proof; one that ran out of time is not.
    if solution.is_proven_infeasible:
        return "no placement exists at this capacity; the search was exhaustive"
    return f"none found within the time limit; the best is {solution.height - capacity} bytes too high (more --seconds may help)"
