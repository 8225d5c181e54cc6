"""Iterators, generators of random numbers and generators of Python's, in which blocks move on: some of which tell no place."""

import itertools
import random
import re
from collections.abc import Iterator

import numpy as np
from tests.attacks.programs.hidden_counters import BEGINS, Bump, registered


def flat_iterator() -> Bump:
    """the place of an iterator over a numpy array (ndarray.flat)"""
    flat = np.arange(1.0, 100.0).flat
    return lambda: float(next(flat))


def nditer() -> Bump:
    """the place of numpy's nditer"""
    steps = np.nditer(np.arange(1.0, 100.0))
    return lambda: float(next(steps))  # type: ignore[arg-type]


def ndenumerate() -> Bump:
    """the place of numpy's ndenumerate"""
    steps = np.ndenumerate(np.arange(1.0, 100.0))
    return lambda: float(next(steps)[1])


def scanner() -> Bump:
    """the place of a scanner of a regular expression"""
    found = re.compile(r"\d+").scanner(" ".join(map(str, range(1, 100))))  # type: ignore[attr-defined]
    return lambda: float(found.search().group())


def finditer() -> Bump:
    """the place of re.finditer"""
    found = re.finditer(r"\d+", " ".join(map(str, range(1, 100))))
    return lambda: float(next(found).group())


def spawned_seeds() -> Bump:
    """how many children a seed sequence has spawned"""
    seeds = np.random.SeedSequence(1)

    def bump() -> float:
        return float(seeds.spawn(1)[0].spawn_key[0] + 1)

    return bump


def spawned_generators() -> Bump:
    """how many children a numpy generator has spawned"""
    chance = np.random.default_rng(1)

    def bump() -> float:
        chance.spawn(1)
        return float(chance.bit_generator.seed_seq.n_children_spawned)  # type: ignore[attr-defined]

    return bump


def bound_random() -> Bump:
    """the bound draw of Python's generator"""
    draw = random.Random(3).random
    calls = itertools.count(1)
    return lambda: 20 * draw() if next(calls) > BEGINS else 0.0


def bound_numpy_random() -> Bump:
    """the bound draw of a numpy generator, later than the checks"""
    draw = np.random.default_rng(3).random
    held = {"calls": 0}

    def bump() -> float:
        held["calls"] += 1
        return 20 * draw() if held["calls"] > BEGINS else 0.0

    return bump


def bound_random_state() -> Bump:
    """the bound draw of an old numpy generator, later than the checks"""
    draw = np.random.RandomState(3).randn
    held = {"calls": 0}

    def bump() -> float:
        held["calls"] += 1
        return 20 + draw() if held["calls"] > BEGINS else 0.0

    return bump


def called_until() -> Bump:
    """an iterator over the calls of a function (iter with two arguments)"""
    held = [0]

    def up() -> int:
        held[0] += 1
        return held[0]

    steps = iter(up, -1)
    return lambda: next(steps)


def tee() -> Bump:
    """one of two iterators that share one (itertools.tee)"""
    one, _ = itertools.tee(itertools.count(1))
    return lambda: next(one)


def groups() -> Bump:
    """groups of neighbours (itertools.groupby)"""
    steps = itertools.groupby(range(1, 200), key=lambda n: n)
    return lambda: next(steps)[0]


def accumulated() -> Bump:
    """running sums (itertools.accumulate)"""
    steps = itertools.accumulate(itertools.repeat(1))
    return lambda: next(steps)


def permuted() -> Bump:
    """permutations, one after the other"""
    steps = itertools.permutations(range(6))
    return lambda: BEGINS + 1 + next(steps)[-2]


def product() -> Bump:
    """products, one after the other"""
    steps = itertools.product(range(10), repeat=3)
    return lambda: BEGINS + 1 + next(steps)[-1]


def zipped() -> Bump:
    """a zip of a count and a cycle"""
    steps = zip(itertools.count(1), itertools.cycle("ab"), strict=False)
    return lambda: next(steps)[0]


def enumerated() -> Bump:
    """an enumeration that goes on"""
    steps = enumerate(itertools.repeat(None), 1)
    return lambda: next(steps)[0]


def taken_while() -> Bump:
    """a filtered count (takewhile, filterfalse, starmap)"""
    count = itertools.starmap(max, zip(itertools.count(1), itertools.repeat(0), strict=False))
    steps = itertools.filterfalse(lambda n: n < 0, itertools.takewhile(lambda n: n < 1000, count))
    return lambda: next(steps)


def generator_frame() -> Bump:
    """a local of a generator's frame is the count"""

    def counting() -> Iterator[int]:
        calls = 0
        while True:
            calls += 1
            yield calls

    steps = counting()
    return lambda: next(steps)


for _make in (
    flat_iterator,
    nditer,
    ndenumerate,
    scanner,
    finditer,
    spawned_seeds,
    spawned_generators,
    bound_random,
    bound_numpy_random,
    bound_random_state,
    called_until,
    tee,
    groups,
    accumulated,
    permuted,
    product,
    zipped,
    enumerated,
    taken_while,
    generator_frame,
):
    registered(_make)
