"""Plans that the command line names: read, and looked through for techniques that there are not, before a script is started."""

from pathlib import Path

from tightfit.errors import PlanError, UsageError
from tightfit.errors.missing_files import no_file
from tightfit.planner.plan import Plan
from tightfit.techniques.registry import technique


def plan_in(file: Path) -> Plan:
    """The plan in `file`.

    Raises:
        UsageError: there is no such file.
        PlanError: it cannot be read, or names a technique that is not there: it was changed by hand, or comes from a version or a plug-in that this one lacks.
    """
    if not file.exists():
        raise UsageError(no_file(str(file)))
    plan = Plan.load(file)
    for choice in plan.choices:
        try:
            technique(choice.technique)
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from None
    return plan
