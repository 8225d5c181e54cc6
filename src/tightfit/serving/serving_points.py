"""The points of the curves that a server is shown with."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """Simulated arrivals at `rate` per second: seconds to the first token and per further token, of half and of 99 % of the requests."""

    rate: float
    first_token: tuple[float, float]
    each_token: tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingCurves:
    """`room` is tokens of a request and how many of those there is room for; `loads` is empty, and `no_loads` says why, where load is not simulated."""

    room: tuple[tuple[int, float], ...]
    loads: tuple[LoadPoint, ...]
    no_loads: str = ""
