"""What the ends of steps show: which sites grow, who holds them, whether reserved memory or the process grows beside them."""

import collections
from collections.abc import Callable, Container, Sequence

import torch

from tightfit.runtime.leaks.found_leaks import (
    OUTSIDE,
    UNKNOWN,
    Leak,
    LeakHolder,
    LeakSite,
    family_of,
    fragmentation,
    is_bounded,
)
from tightfit.runtime.leaks.growing_containers import grown_since
from tightfit.runtime.leaks.holder_paths import Reachable
from tightfit.runtime.leaks.holder_search import holders_of_storages
from tightfit.runtime.leaks.live_storages import BEFORE, LiveStorages, StorageRow
from tightfit.runtime.leaks.named_roots import NamedRoots
from tightfit.runtime.leaks.robust_growth import NUM_WARM_UP, growth_per_step
from tightfit.runtime.leaks.step_samples import StepEnd, StepEnds
from tightfit.units import KIB, MIB

MIN_BYTES = 1024
"""Per step; less is a number for a log."""
# Of memory outside of torch only a trend that stands out of the C library's own ups and downs counts.
_MIN_OUTSIDE = 64 * KIB
_MIN_OUTSIDE_IN_ALL = MIB
_MIN_MAPPED = 256 * KIB
_MIN_RESERVED = MIB
_MAX_SHARE_ALLOCATED = 0.25
_MIN_SHARE_OF_A_CONTAINER = 0.2
_MIN_SHARE_UNSEEN = 0.25
_UNSEEN = LeakHolder(
    cause=UNKNOWN,
    path="",
    root="",
    what="allocated memory of the GPU grows by tensors that no operator of this thread has made",
    fix="look at other threads of the program, and at native extensions",
)
# Of a site that leaks in thousands of steps, these are looked for.
_MAX_STORAGES_OF_A_SITE = 64


def leaks_of(stepped: StepEnds, storages: LiveStorages, before: dict[int, int], num_steps: int) -> tuple[Leak, ...]:
    """The leaks, fastest first. `before` are lengths of containers `num_steps` ago."""
    found = [*_of_sites(stepped, storages), *_of_card(stepped), *_outside(stepped, storages, before, num_steps)]
    return tuple(sorted(found, key=lambda leak: -leak.bytes_per_step))


def _of_sites(stepped: StepEnds, storages: LiveStorages) -> list[Leak]:
    slopes = {}
    for site in {site for end in stepped.ends for site in end.bytes_by_site} - {BEFORE}:
        slope = growth_per_step([end.bytes_by_site.get(site, 0) for end in stepped.ends], per_value=stepped.stride)
        if slope >= MIN_BYTES:
            slopes[site] = slope
    if not slopes:
        return []
    by_site = collections.defaultdict(list)
    rows = storages.rows()
    newest_of: dict[int, int] = {}
    for row in rows:
        newest_of[row.site] = max(row.step, newest_of.get(row.site, row.step))
    for site, share in _shares_left(rows, slopes).items():
        slopes[site] *= share
    # What each step makes anew, and of nothing that an earlier one has left, is larger because the program's sizes are.
    held = {row.site for row in rows if row.is_carried or row.step < newest_of[row.site]}
    slopes = {site: slope for site, slope in slopes.items() if slope >= MIN_BYTES and site in held}
    for row in sorted(rows, key=lambda row: -row.step):
        if row.site in slopes and row.step >= NUM_WARM_UP and len(by_site[row.site]) < _MAX_STORAGES_OF_A_SITE:
            by_site[row.site].append(row.cdata)
    steps = {row.cdata: row.step for row in rows}
    wanted_steps = {storage: steps[storage] for wanted in by_site.values() for storage in wanted}
    holders = holders_of_storages(wanted_steps, storages.storage_id)
    groups: dict[tuple[str, str], list[tuple[float, int, LeakHolder]]] = collections.defaultdict(list)
    for site, wanted in by_site.items():
        votes = collections.Counter(holders[storage] for storage in wanted if storage in holders)
        if votes:
            holder = votes.most_common(1)[0][0]
            if not is_bounded(holder):
                groups[holder.cause, family_of(holder.path)].append((slopes[site], site, holder))
    return [_leak(members, storages) for members in groups.values()]


def _shares_left(rows: Sequence[StorageRow], sites: Container[int]) -> dict[int, float]:
    """The share of the bytes of each site that its live storages still have: a program may have taken them by hand (`resize_(0)`)."""
    seen: collections.Counter[int] = collections.Counter()
    left: collections.Counter[int] = collections.Counter()
    for row in rows:
        if row.site in sites:
            seen[row.site] += row.num_bytes
            storage = row()
            left[row.site] += 0 if storage is None else min(row.num_bytes, storage.nbytes())
    return {site: left[site] / num_bytes for site, num_bytes in seen.items() if num_bytes}


def _leak(members: list[tuple[float, int, LeakHolder]], storages: LiveStorages) -> Leak:
    members.sort(key=lambda member: -member[0])
    return Leak(
        holder=members[0][2],
        sites=tuple(_site(site, slope, storages) for slope, site, _ in members),
        bytes_per_step=round(sum(slope for slope, _, _ in members)),
    )


def _site(site: int, slope: float, storages: LiveStorages) -> LeakSite:
    frames = storages.frames_of(site) or [("", "")]
    return LeakSite(
        where=frames[0][0],
        function=frames[0][1],
        callers=tuple(line for line, _ in frames[1:]),
        bytes_per_step=round(slope),
    )


def _series(stepped: StepEnds, value: Callable[[StepEnd], float]) -> Sequence[float]:
    return [value(end) for end in stepped.ends]


def _of_card(stepped: StepEnds) -> list[Leak]:
    reserved = growth_per_step(_series(stepped, lambda end: end.card_reserved), per_value=stepped.stride)
    allocated = growth_per_step(_series(stepped, lambda end: end.card_allocated), per_value=stepped.stride)
    found = []
    if reserved >= _MIN_RESERVED and allocated <= _MAX_SHARE_ALLOCATED * reserved:
        found.append(fragmentation((), round(reserved)))
    unseen = growth_per_step(
        _series(stepped, lambda end: end.card_allocated - end.bytes_by_device.get("cuda", 0)), per_value=stepped.stride
    )
    # Of what is seen, blocks are a little larger than tensors.
    if unseen >= _MIN_RESERVED and unseen >= _MIN_SHARE_UNSEEN * allocated:
        found.append(Leak(holder=_UNSEEN, sites=(), bytes_per_step=round(unseen)))
    outside = growth_per_step(_series(stepped, lambda end: end.card_outside), per_value=stepped.stride)
    if outside >= _MIN_RESERVED:
        holder = LeakHolder(
            cause=OUTSIDE,
            path="",
            root="",
            what="used memory of the GPU grows beside torch's own: a library or another process",
            fix="look at other processes on this GPU (nvidia-smi) and at libraries that allocate by themselves",
        )
        found.append(Leak(holder=holder, sites=(), bytes_per_step=round(outside)))
    return found


def _outside(stepped: StepEnds, storages: LiveStorages, before: dict[int, int], num_steps: int) -> list[Leak]:
    """Memory of the process that grows while torch's tensors do not: handed out by malloc, or mapped beside it.

    What malloc keeps of freed memory is neither: it is used again.
    """
    native = _beside_torch(stepped, lambda end: None if end.malloc is None else end.malloc.handed_out)
    mapped = _mapped(stepped)
    resident = max(native, mapped)
    if resident < _MIN_OUTSIDE or resident * len(stepped.ends) * stepped.stride < _MIN_OUTSIDE_IN_ALL:
        return []
    is_native = native >= mapped
    grown = grown_since(before, num_steps, storages.is_unseen_on_host)
    largest = [one for one in grown if one.bytes_per_step >= _MIN_SHARE_OF_A_CONTAINER * resident]
    if largest:
        path, root = _path_to(largest[0].container)
        what = f"{largest[0].elements_per_step:.3g} more {largest[0].newest} per step in a {type(largest[0].container).__name__}"
        fix = "clear it, bound it, or keep less of each"
    else:
        path = root = ""
        what = (
            "malloc has handed it out, and no Python container grows with it: native code keeps it"
            if is_native
            else "malloc has not handed it out: pages that something has mapped"
        )
        fix = "look at native extensions and caches by shape (ONEDNN_PRIMITIVE_CACHE_CAPACITY)"
    holder = LeakHolder(cause=OUTSIDE, path=path, root=root, what=what, fix=fix)
    return [Leak(holder=holder, sites=(), bytes_per_step=round(resident))]


def _beside_torch(stepped: StepEnds, value: Callable[[StepEnd], int | None]) -> float:
    if any(value(end) is None for end in stepped.ends):
        return 0.0
    series = _series(stepped, lambda end: (value(end) or 0) - end.bytes_by_device.get("cpu", 0))
    return growth_per_step(series, per_value=stepped.stride)


def _mapped(stepped: StepEnds) -> float:
    """Growth of resident memory that is not malloc's; Python's own heap, which grows by a MiB now and then, is below the limit."""
    values = [(end.resident, end.malloc) for end in stepped.ends]
    series = [resident - malloc.of_system for resident, malloc in values if resident is not None and malloc is not None]
    growth = growth_per_step(series, per_value=stepped.stride) if len(series) == len(values) else 0.0
    return growth if growth >= _MIN_MAPPED else 0.0


def _path_to(container: object) -> tuple[str, str]:
    roots, reachable = NamedRoots(), Reachable()
    try:
        with torch._C.DisableTorchFunctionSubclass():
            reachable.add(roots.of_users_code())
            place = reachable.place_of(container)
            if place is None:
                reachable.add(roots.of_libraries())
                place = reachable.place_of(container)
        if place is None:
            return "", ""
        kept = reachable.kept(place)
        return kept.path + ("[-1]" if isinstance(container, list) else ""), kept.root
    finally:
        reachable.drop()
        roots.forget()
