"""How the room for requests falls with their length, and how the times of an engine grow with the load: the points of two curves."""

from collections.abc import Callable, Sequence

from tightfit.errors import UsageError
from tightfit.serving.load.arrivals import drawn_arrivals
from tightfit.serving.load.load_summary import ServiceLevel
from tightfit.serving.serving_estimate import ServingEstimate, held_tokens
from tightfit.serving.serving_points import LoadPoint, ServingCurves
from tightfit.serving.traced_server import Server

# Of the throughput where requests never run out, at which the load is simulated.
_SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.97)
_REQUESTS = 400
_SHORTEST = 128


def doubled_lengths(longest: int) -> list[int]:
    """Tokens of requests: doubled from a short one to the longest, which is among them."""
    found = []
    length = min(_SHORTEST, longest)
    while length < longest:
        found.append(length)
        length *= 2
    return [*found, longest]


def serving_curves(server: Server, found: ServingEstimate, lengths: Sequence[tuple[int, int]]) -> ServingCurves:
    """The curves of an engine that starts."""
    size, limit = server.cache, found.settings.max_num_seqs
    facts = server.model.facts

    def room(tokens: int) -> float:
        each = size.request_bytes(*held_tokens(facts, tokens, 0))
        return min(float(limit), found.kv_bytes / each) if each else float(limit)

    points = room_by_length(room, found.settings.max_model_len)
    if not lengths or found.speed is None:
        return ServingCurves(room=points, loads=(), no_loads="give --lengths to have the load simulated")
    try:
        loads = _loads(server, found, lengths)
    except UsageError as error:
        return ServingCurves(room=points, loads=(), no_loads=str(error))
    return ServingCurves(room=points, loads=loads)


def room_by_length(room: Callable[[int], float], longest: int) -> tuple[tuple[int, float], ...]:
    """How many requests there is room for at each length."""
    return tuple((tokens, room(tokens)) for tokens in doubled_lengths(longest))


def _loads(server: Server, found: ServingEstimate, lengths: Sequence[tuple[int, int]]) -> tuple[LoadPoint, ...]:
    speed = found.speed
    assert speed is not None
    engine = server.loaded_engine(server.costs(), found.kv_bytes)
    mean_answer = sum(answer for _, answer in lengths) / len(lengths)
    most = sum(speed.tokens_per_second) / 2 / max(1.0, mean_answer)
    points = []
    for share in _SHARES:
        arrivals = drawn_arrivals(lengths, share * most, _REQUESTS, seed=0)
        load = engine.simulate(arrivals, ServiceLevel(first_token=None, each_token=None), finds_rate=False)
        points.append(
            LoadPoint(
                rate=share * most,
                first_token=(load.first_token.p50, load.first_token.p99),
                each_token=(load.each_token.p50, load.each_token.p99),
            )
        )
    return tuple(points)
