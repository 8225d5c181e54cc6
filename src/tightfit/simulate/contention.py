"""Kernels beside collectives: NCCL's channels occupy multiprocessors and memory bandwidth, so that what runs meanwhile takes longer."""

import dataclasses

import numpy as np

from tightfit.cost.steps import step_operators
from tightfit.simulate.step_work import PricedTape
from tightfit.simulate.timeline import seconds_of_steps

CONTENTION = 0.15
"""How much slower kernels are while NCCL runs beside them. It takes 16 to 32 of a card's 108 to 132 multiprocessors, 12 to 25 %, and part of the bandwidth."""


def with_contention(prices: PricedTape) -> PricedTape:
    """`prices` with the kernels of each step slowed down by the collectives that run beside them: all that the step does not wait for."""
    collectives = prices.tape.collectives.operator
    steps = step_operators(prices.tape)
    if not len(collectives) or not steps or not prices.seconds[collectives].any():
        return prices
    without = prices.seconds.copy()
    without[collectives] = 0.0
    alone = seconds_of_steps(dataclasses.replace(prices, seconds=without))
    together = seconds_of_steps(prices)
    seconds = prices.seconds.copy()
    is_kernel = np.ones(len(seconds), dtype=bool)
    is_kernel[collectives] = is_kernel[prices.tape.copies.operator] = False
    for (begin, end), plain, whole in zip(steps, alone, together, strict=True):
        of_step = slice(begin, end)
        communicating = float((seconds - without)[of_step].sum())
        kernels = is_kernel[of_step]
        computing = float(seconds[of_step][kernels].sum())
        hidden = min(max(0.0, communicating - (whole - plain)), computing)
        if computing:
            seconds[of_step][kernels] *= 1.0 + CONTENTION * hidden / computing
    return dataclasses.replace(prices, seconds=seconds)
