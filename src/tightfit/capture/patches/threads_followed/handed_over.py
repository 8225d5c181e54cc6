"""Follows what threads hand over to one another: items of queues, events, and the results of futures."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tightfit.capture.patches.threads_followed.thread_order import ThreadOrder
from tightfit.capture.replace import replace
from tightfit.errors import faults

_KNOWN = "tightfit_known"
_ITEMS = "tightfit_items"


def install(order: ThreadOrder) -> None:
    """Tells `order` of it; a process that has done this is not used for anything else."""
    _watch_queues(order)
    _watch_events(order)
    _watch_futures(order)


def _watch_queues(order: ThreadOrder) -> None:
    put, get = queue.Queue.put, queue.Queue.get

    @faults.hands_over
    def put_with_clock(to: Any, item: Any, *args: Any, **kwargs: Any) -> None:
        clocks = vars(to).setdefault(_ITEMS, {}).setdefault(id(item), deque())
        clocks.append(order.sent())
        try:
            put(to, item, *args, **kwargs)
        except BaseException:
            clocks.pop()
            raise

    @faults.hands_over
    def got_with_clock(of: Any, *args: Any, **kwargs: Any) -> Any:
        item = get(of, *args, **kwargs)
        clocks = vars(of).get(_ITEMS, {}).get(id(item))
        order.got(clocks.popleft() if clocks else None)
        return item

    replace(queue.Queue, put=put_with_clock, get=got_with_clock)


def _watch_events(order: ThreadOrder) -> None:
    begin, is_set, wait = threading.Event.set, threading.Event.is_set, threading.Event.wait

    @faults.hands_over
    def set_with_clock(event: Any) -> None:
        known = vars(event).setdefault(_KNOWN, {})
        for member, row in order.sent().items():
            known[member] = max(row, known.get(member, 0))
        begin(event)

    @faults.hands_over
    def seen(event: Any, *args: Any, **kwargs: Any) -> bool:
        is_there = wait(event, *args, **kwargs)
        if is_there:
            order.got(vars(event).get(_KNOWN))
        return is_there

    @faults.hands_over
    def asked(event: Any) -> bool:
        is_there = is_set(event)
        if is_there:
            order.got(vars(event).get(_KNOWN))
        return is_there

    replace(threading.Event, set=set_with_clock, wait=seen, is_set=asked, isSet=asked)


def _watch_futures(order: ThreadOrder) -> None:
    def handing_over(name: str) -> Callable[..., Any]:
        hand_over = getattr(Future, name)

        @faults.hands_over
        def handed_over(future: Any, value: Any) -> None:
            vars(future)[_KNOWN] = order.sent()
            hand_over(future, value)

        return handed_over

    def getting(name: str) -> Callable[..., Any]:
        get = getattr(Future, name)

        @faults.hands_over
        def got(future: Any, timeout: float | None = None) -> Any:
            try:
                return get(future, timeout)
            finally:
                order.got(vars(future).get(_KNOWN) if future.done() else None)

        return got

    replace(Future, **{name: handing_over(name) for name in ("set_result", "set_exception")})
    replace(Future, **{name: getting(name) for name in ("result", "exception")})
