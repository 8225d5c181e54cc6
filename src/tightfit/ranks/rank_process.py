"""One rank of a run: the user's script in this process, each batch of its models divided over the ranks."""

import atexit
import contextlib
import datetime
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.capture.processes.containment import linux
from tightfit.capture.targets.target_kinds import Script, run_script
from tightfit.errors import ApplyError, TightfitError, UsageError
from tightfit.ranks.rank_input import refuse_input
from tightfit.ranks.rank_launch import ENDED, FOLDER, SEED, TAKEN
from tightfit.ranks.rank_plan import RankPlan
from tightfit.torch_hooks import manifest

if TYPE_CHECKING:
    from tightfit.ranks.rank_group import RankGroup

# What torchrun sets: with it libraries would take this for a distributed run of theirs.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_WAIT = datetime.timedelta(minutes=5)
_SIGTERM = 15


def _card_of(local: int) -> str:
    """What `CUDA_VISIBLE_DEVICES` is to name for the rank with this number on its machine.

    Raises:
        UsageError: it names fewer.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return str(local)
    visible = [word.strip() for word in named.split(",") if word.strip()]
    if local >= len(visible):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={named} leaves {len(visible)} GPUs, and rank {local} of this machine needs one more: name one for each, or give a smaller --gpus"
        )
    return visible[local]


def run_rank(
    script: Script,
    num_ranks: int,
    say: Callable[[str], None],
    *,
    asked: RankPlan,
    on_cards: bool,
    allows_randomness: bool,
    check_steps: int,
) -> None:
    """Runs `script` to its end as the rank that the environment says. `say` is called with what was done, on the first rank.

    Raises:
        TightfitError: the script cannot be divided, or the ranks do not do the same.
        RankLost: another rank has ended.
    """
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) != num_ranks:
        raise UsageError(f"--gpus {num_ranks}, and the launcher has started {os.environ['WORLD_SIZE']} processes")
    if on_cards:
        # Before torch is imported: the script's "cuda" is this rank's card.
        os.environ["CUDA_VISIBLE_DEVICES"] = _card_of(int(os.environ.get("LOCAL_RANK", rank)))
    if FOLDER in os.environ and sys.platform == "linux":
        # With whoever started it: a rank alone would wait for ever.
        linux.signal_at_parents_end(_SIGTERM)
    manifest.check()
    import torch.distributed as dist

    from tightfit.ranks.rank_attachment import RankAttachment
    from tightfit.ranks.rank_group import RankGroup

    store, rank, size = next(iter(dist.rendezvous("env://", timeout=_WAIT)))
    group = RankGroup(store, rank, size, on_cards=on_cards)
    attachment = RankAttachment(
        group,
        allows_randomness=allows_randomness,
        check_steps=check_steps,
        asked=asked,
        tell=say if rank == 0 else lambda _: None,
    )
    _seed(group.links.bytes_from(0, os.environ.get(SEED, str(random.getrandbits(32))).encode()))
    for name in _OF_LAUNCHERS:
        os.environ.pop(name, None)
    folder = Path(os.environ.get(FOLDER, ""))
    if rank:
        # The first one's run is the one that is tracked.
        os.environ["WANDB_MODE"] = "disabled"
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if FOLDER in os.environ:
        # The first that is registered is the last that is called: what the script has for its end comes before.
        atexit.register(_note_end, group, os.open(folder / ENDED.format(rank), os.O_CREAT | os.O_WRONLY))
        _of_files(folder, rank)
        if rank == 0:
            group.signals.taken = lambda number: (folder / TAKEN.format(number)).touch()
        refuse_input(attachment.refuse)
    attachment.begin()
    try:
        with _names_distribution():
            run_script(script)
    except SystemExit as error:
        if error.code not in (None, 0) or attachment.failure is not None:
            raise attachment.failure or error from None
        attachment.end()
        raise
    except TightfitError:
        raise
    except Exception:
        if attachment.failure is not None:
            raise attachment.failure from None
        raise
    attachment.end()


def _note_end(group: "RankGroup", opened: int) -> None:
    if group.has_left:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(opened, b"1")


def _seed(seed: bytes) -> None:
    """Generators that each process seeds for itself (Python's, numpy's, torch's at the host) have one seed on all ranks."""
    import numpy as np
    import torch

    number = int(seed)
    random.seed(number)
    np.random.seed(number % 2**32)
    # Not by torch.manual_seed: those of cards have a seed of their own, the same in each process.
    torch.default_generator.manual_seed(number)


def _of_files(folder: Path, rank: int) -> None:
    from tightfit.ranks.rank_files import drop_writes, note_made

    sys.dont_write_bytecode = True
    if rank == 0:
        note_made(folder)
    else:
        drop_writes(folder, rank)


@contextlib.contextmanager
def _names_distribution() -> Iterator[None]:
    """Says of a script that makes a process group from the launcher's variables that it is distributed itself."""
    try:
        yield
    except (ValueError, KeyError) as error:
        if "RANK" in str(error) or "WORLD_SIZE" in str(error) or "MASTER_" in str(error):
            raise ApplyError(
                "the script is distributed itself (it reads what torchrun sets): start it with torchrun, without tightfit run"
            ) from error
        raise
