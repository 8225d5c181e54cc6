"""`tightfit run --gpus`: a user's unmodified script of one card on several, each batch divided over them."""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from tightfit.capture.targets.target_kinds import Script
from tightfit.cli.arguments.programs import exit_code_of
from tightfit.cli.shared.local_cards import seen_cards
from tightfit.errors import UsageError
from tightfit.layouts.exports.own_ranks import ranks_refusal
from tightfit.layouts.layout import Layout
from tightfit.ranks.rank_errors import RankLost
from tightfit.ranks.rank_launch import LOST, is_rank, run_ranks
from tightfit.ranks.rank_plan import RankPlan

_DRAWS = "micro_batches"


@Parameter(name="*", group=Group("Many GPUs", sort_key=1))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How many cards a script of one card is run on.

    Parameters
    ----------
    gpus
        Run the script as this many processes, one per GPU, and divide each of its batches among them. --plan is then a file that tightfit plan --gpus --export tightfit wrote; by default all states are on each GPU.
    on
        gpu, or cpu for processes on this machine without GPUs, to try it.
    """

    gpus: int | None = None
    on: Annotated[Literal["gpu", "cpu"], Parameter(name="--on")] = "gpu"


ONE_CARD = Ranks()


def run_on_ranks(
    script: Script,
    ranks: Ranks,
    plan: Path | None,
    allow: tuple[str, ...],
    others: Mapping[str, Any],
    check_steps: int,
) -> int:
    """Starts the ranks, or is one of them. Returns the exit code.

    Raises:
        UsageError: options that do not go together, or fewer GPUs than asked for.
    """
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(f"--gpus runs the script without a plan of techniques, and takes no {given[0]}")
    assert ranks.gpus is not None
    if ranks.gpus < 2:
        raise UsageError(f"--gpus {ranks.gpus}: give 2 or more; on one GPU it is tightfit run without it")
    if any(each not in (_DRAWS, "lossy") for each in allow):
        raise UsageError(
            f"with --gpus only --allow {_DRAWS} has a meaning: random numbers (dropout) are then drawn by each GPU for its own part"
        )
    on_cards = ranks.on == "gpu"
    asked = RankPlan() if plan is None else _layout_of(plan, ranks, is_said=not is_rank())
    if is_rank():
        return _run_rank(script, ranks.gpus, allow, check_steps, asked, on_cards=on_cards)
    if on_cards and len(seen_cards()) < ranks.gpus:
        raise UsageError(
            f"--gpus {ranks.gpus}, and this machine has {len(seen_cards()) or 'no'} GPUs: for several machines start it with torchrun on each "
            "(torchrun --nnodes ... -m tightfit run --gpus N train.py), or try it here with --on cpu"
        )
    if plan is None:
        say(
            f"data parallel on {ranks.gpus} {'GPUs' if on_cards else 'processes'}, as there is no plan: each has all weights and states"
        )
    # The same command: each process finds its rank in the environment.
    command = [sys.executable, "-m", "tightfit", *sys.argv[1:]]
    return run_ranks(command, ranks.gpus, say, on_cards=on_cards)


def _layout_of(plan: Path, ranks: Ranks, *, is_said: bool) -> RankPlan:
    """What the layout in a file asks of the ranks.

    Raises:
        UsageError: the file has no layout, or one that is not run here, or it is for others than these GPUs.
    """
    try:
        found = json.loads(plan.read_text())
    except OSError as error:
        raise UsageError(f"--plan {plan}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--plan {plan} is no JSON file: {error}") from error
    layout = _layout_in(found)
    if layout is None:
        raise UsageError(
            f"--plan {plan} has no layout: with --gpus, give a file that tightfit plan --gpus N --export tightfit wrote; a plan of techniques is for one GPU"
        )
    reason = ranks_refusal(layout)
    if layout.dp != ranks.gpus and not reason.startswith("it is for"):
        reason = f"it is for dp{layout.dp}, and --gpus is {ranks.gpus}"
    if reason:
        raise UsageError(
            f"--plan {plan} cannot be run by tightfit: {reason}; tightfit plan --gpus {ranks.gpus} --export tightfit finds one that can, and other tools of --export run others"
        )
    recomputed = found.get("recomputed") or []
    if len(recomputed) != layout.num_recomputed or not all(isinstance(each, str) for each in recomputed):
        raise UsageError(
            f"--plan {plan} does not say which {layout.num_recomputed} blocks are recomputed: make it anew with tightfit plan --gpus {ranks.gpus} --export tightfit"
        )
    cards = {card.known_as for card in seen_cards()} if ranks.on == "gpu" else set()
    if cards and found.get("device") not in cards:
        raise UsageError(
            f"--plan {plan} is for {found.get('device')}, and this machine has {', '.join(sorted(map(str, cards)))}"
        )
    streamed = found.get("streamed")
    if layout.streams_weights != _are_settings(streamed):
        raise UsageError(
            f"--plan {plan} does not say which weights are streamed: make it anew with tightfit plan --gpus {ranks.gpus} --export tightfit"
        )
    shards = layout.zero_stage == 1 and layout.sharded_over > 1
    if is_said:
        blocks = f", {len(recomputed)} blocks recomputed" if recomputed else ""
        blocks += ", weights streamed from the host" if streamed else ""
        blocks += f", micro-batches of {layout.micro_batch}" if layout.accumulation > 1 else ""
        say(
            f"{'data parallel, optimizer states sharded (ZeRO-1)' if shards else 'data parallel'}{blocks} on {ranks.gpus}, as {plan} says"
        )
    micro_batch = layout.micro_batch if layout.accumulation > 1 else None
    return RankPlan(shards_states=shards, recomputed=tuple(recomputed), micro_batch=micro_batch, streamed=streamed)


def _are_settings(streamed: Any) -> bool:
    """Whether this is what a layout says of streamed weights."""
    types = {"where": str, "blocks": list, "smallest_bytes": int, "host_bytes": int}
    return isinstance(streamed, dict) and all(type(streamed.get(name)) is kind for name, kind in types.items())


def _layout_in(found: Any) -> Layout | None:
    """The layout in a file's JSON; None where there is none."""
    layout = found.get("layout") if isinstance(found, dict) else None
    fields = {field.name: field.type for field in dataclasses.fields(Layout)}
    if not isinstance(layout, dict) or not layout.keys() >= {"dp", "zero_stage"} or not layout.keys() <= fields.keys():
        return None
    if any((fields[name] is int) != (type(value) is int) for name, value in layout.items()):
        return None
    return Layout(**layout)


def _run_rank(
    script: Script, num_ranks: int, allow: tuple[str, ...], check_steps: int, asked: RankPlan, *, on_cards: bool
) -> int:
    from tightfit.ranks.rank_process import run_rank

    try:
        return exit_code_of(
            lambda: run_rank(
                script,
                num_ranks,
                say,
                on_cards=on_cards,
                asked=asked,
                allows_randomness=bool(allow),
                check_steps=check_steps,
            ),
            script.path,
        )
    except RankLost:
        # Whoever started the ranks says which one, and why. At once: what is left of the connections aborts a process that tidies up.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST)


def say(line: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"tightfit: {line}\n")
