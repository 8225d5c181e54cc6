"""Why techniques are left out of a plan that does not fit: they have no place in the program, or need memory of the host that was not given."""

from collections.abc import Iterator, Sequence

from tightfit.analysis.profile import Profile
from tightfit.errors.faults import answering
from tightfit.fit.searching.offers import Offers
from tightfit.tape import Phase
from tightfit.techniques.registry import techniques


def not_offered(
    offers: Offers, profiles: Sequence[Profile], *, host_bytes: int, disk_bytes: int
) -> list[tuple[str, str]]:
    """The exact techniques that cannot be chosen, those with the same reason together; those that were refused are not among them.

    `profiles` are those of the steps and, where there is one, of the whole run.
    """
    names: dict[str, list[str]] = {}
    for name, reason in _each(offers, profiles, host_bytes, disk_bytes):
        names.setdefault(reason, []).append(name)
    return [(", ".join(found), reason) for reason, found in names.items()]


def _each(offers: Offers, profiles: Sequence[Profile], host_bytes: int, disk_bytes: int) -> Iterator[tuple[str, str]]:
    profile = profiles[0]
    is_trained = bool((profile.tape.operators.phase == Phase.BACKWARD).any())
    refused = {row[0].partition("@")[0] for row in offers.refusals.rows()}
    for name, technique in techniques().items():
        if not technique.exact or name in refused:
            continue
        options = next(filter(None, (offers.of(name, each) for each in profiles)), [])
        if not options:
            with answering(f"technique {name}", technique=name):
                reason = technique.reason(profile)
            if reason:
                yield name, reason if is_trained else "the program computes no gradients"
        elif all(option.host_bytes > host_bytes for option in options):
            yield name, "keeps memory at the host: give it some (--host 32GiB)"
        elif all(option.disk_bytes > disk_bytes for option in options):
            yield name, "keeps memory on disk: give it some (--disk 100GiB)"
