"""A plan as lines to paste into one's own program, which then needs no `tightfit run`: `tightfit.apply` with the plan in it or in a file.

Where the program's source makes one optimizer of one model, the lines have their names and say after which line they go.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence

from tightfit.errors import PlanError
from tightfit.planner.explain import groups, verdict
from tightfit.planner.plan import Plan
from tightfit.units import format_bytes

_OPTIMIZER = re.compile(r"(?i)(adam|sgd|adagrad|adadelta|adafactor|rmsprop|rprop|lbfgs|lion|muon|lamb|optimizer|optim)")
_CONF = "PYTORCH_CUDA_ALLOC_CONF"
# What only explains a plan, and is left out of the pasted one.
_EMPTIED = ("alternatives", "frontier", "advice", "assumptions")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PastePoint:
    """Where a program has made its optimizer: the last line of the statement, its indentation, and the names of model and optimizer."""

    line: int
    indent: str
    model: str
    optimizer: str


def plan_code(plan: Plan, *, source: str, path: str, saved: str | None) -> str:
    """The lines for `plan`, which fits. `source` is the text of the program at `path`, both empty if there is none; `saved` is the plan's file.

    Raises:
        PlanError: a part of the plan is applied to a framework's loop, which lines in a program cannot do.
    """
    loops = {str(choice.settings["loop"]) for choice in plan.choices if "loop" in choice.settings}
    if loops:
        raise PlanError(
            f"the plan splits batches in the loop of {' and '.join(sorted(loops))}, which no pasted line can do: "
            "write it with -o plan.json and train with tightfit run --plan plan.json"
        )
    if not plan.choices:
        return f"# {_head(plan)}: it fits as it is, there is nothing to paste.\n"
    points = paste_points(source)
    point = points[0] if len(points) == 1 and len(_roots(plan)) < 2 else None
    return (
        "\n".join([f"# {_head(plan)}:", *_techniques(plan), *_settings(plan, path), *_lines(plan, point, path, saved)])
        + "\n"
    )


def paste_points(source: str) -> list[PastePoint]:
    """The statements `NAME = SomeOptimizer(... MODEL.parameters() ...)` of a program; none if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    found = [_point(node) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return sorted((point for point in found if point is not None), key=lambda point: point.line)


def _point(statement: ast.Assign) -> PastePoint | None:
    call = statement.value
    if not isinstance(call, ast.Call) or not _OPTIMIZER.search(ast.unparse(call.func).rpartition(".")[2]):
        return None
    models = {
        ast.unparse(node.func.value)
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        for node in ast.walk(argument)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters")
    }
    if len(models) != 1 or len(statement.targets) != 1 or isinstance(statement.targets[0], ast.Tuple):
        return None
    return PastePoint(
        line=statement.end_lineno or statement.lineno,
        indent=" " * statement.col_offset,
        model=models.pop(),
        optimizer=ast.unparse(statement.targets[0]),
    )


def _head(plan: Plan) -> str:
    if plan.is_changed:
        return f"The plan of tightfit for {plan.target} on {plan.device}, {verdict(plan)}"
    peaks = [format_bytes(run.peak.device_bytes) for run in (plan.run, plan.baseline)]
    instead = f" instead of {peaks[1]}" if plan.choices else ""
    return f"The plan of tightfit for {plan.target} on {plan.device}, {peaks[0]}{instead}"


def _techniques(plan: Plan) -> Iterator[str]:
    for group in groups(plan.choices):
        yield f"#   {group.technique}: {group.where}"


def _settings(plan: Plan, path: str) -> Iterator[str]:
    conf = ",".join(str(c.settings["alloc_conf"]) for c in plan.choices if "alloc_conf" in c.settings)
    if not conf:
        return
    yield f"# At the top of {path or 'the program'}, before torch is imported:"
    yield "import os"
    yield ""
    yield f'os.environ["{_CONF}"] = ",".join(filter(None, [os.environ.get("{_CONF}"), "{conf}"]))'
    yield ""


def _lines(plan: Plan, point: PastePoint | None, path: str, saved: str | None) -> Iterator[str]:
    indent = point.indent if point is not None else ""
    if point is not None:
        yield f"# After line {point.line} of {path}, where {point.optimizer} is made:"
    else:
        yield f"# In {path or 'the program'}, after the model and its optimizer were made and before the first step:"
    yield f"{indent}import tightfit"
    yield ""
    if saved is not None:
        yield f"{indent}plan = tightfit.Plan.load({saved!r})"
    else:
        yield from (f"{indent}{line}".rstrip() for line in _literal(plan))
    for model, optimizer in _names(plan, point):
        yield f"{indent}tightfit.apply(plan, {model}, {optimizer})"


def _names(plan: Plan, point: PastePoint | None) -> list[tuple[str, str]]:
    if point is not None:
        return [(point.model, point.optimizer)]
    roots = _roots(plan)
    if len(roots) < 2:
        return [("model", "optimizer")]
    # A plan for several models is applied to each, with the optimizers that train it.
    names = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in roots]
    return [(name, f"optimizer_of_{name}") for name in names]


def _roots(plan: Plan) -> list[str]:
    return [str(root["class"]) for root in plan.model.get("roots", ())]


def _literal(plan: Plan) -> Iterator[str]:
    """The plan as a Python literal, a line for each choice."""
    content = plan.to_json() | {name: [] for name in _EMPTIED}
    choices: Sequence[object] = content.pop("choices")
    yield "plan = tightfit.Plan.from_json("
    yield "    {"
    for name, value in content.items():
        yield f"        {name!r}: {value!r},"
    yield "        'choices': ["
    for choice in choices:
        yield f"            {choice!r},"
    yield "        ],"
    yield "    }"
    yield ")"
