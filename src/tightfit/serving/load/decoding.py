"""The requests of an engine that decode: all get a token in each step, so that sums over them follow from the number of the step."""

import heapq

from tightfit.serving.load.load_costs import CachePages, LoadCosts


class Decoding:
    """The requests that decode, in the order that they began: each has a token more after every step.

    What depends on their contexts is kept as sums: `reading` is the time of their attention in the next step, and `slope` by how much it grows with each; `growth[p]` are the bytes
    of new pages in steps whose number is p modulo the size of a page.
    """

    def __init__(self, costs: LoadCosts, pages: CachePages) -> None:
        self.step = 0
        self.reading = self.slope = 0
        self.block = pages.block_tokens
        self.growth = [0] * self.block
        self.per_cycle = 0
        self.members: dict[int, tuple[int, int, int, int]] = {}
        self._epochs: dict[int, int] = {}
        self._epoch = 0
        self._attention = [(each.window, each.cached_token) for each in costs.attention if each.cached_token]
        self._growth_of_pages = pages.growth
        # Where a request changes what it adds to the sums: windows that are full, and pages that are the last of one.
        windows = {window for window, _ in self._attention if window is not None}
        self._bends = sorted(windows | {begin * self.block for begin, _ in pages.growth[1:]})
        self.events: list[tuple[int, int, int, bool]] = []

    def begin(self, request: int, num_tokens: int, steps_left: int) -> None:
        """A request has computed `num_tokens`, and ends after `steps_left` more steps."""
        self._epoch += 1
        self._epochs[request] = self._epoch
        heapq.heappush(self.events, (self.step + steps_left, self._epoch, request, True))
        self._add(request, num_tokens)

    def leave(self, request: int) -> int:
        """A request decodes no longer; returns how many tokens of it were computed."""
        num_tokens = self._remove(request)
        del self._epochs[request]
        return num_tokens

    def advance(self, num_steps: int) -> None:
        """So many steps have been done, up to the next event at most."""
        self.reading += num_steps * self.slope
        self.step += num_steps

    def next_event(self) -> int | None:
        """The number of the step before which the next request ends or changes; None without requests."""
        events = self.events
        while events and self._epochs.get(events[0][2]) != events[0][1]:
            heapq.heappop(events)
        return events[0][0] if events else None

    def ended(self) -> list[int]:
        """The requests that have ended by now, in the order that they began; those that have come to a bend add other amounts from now on."""
        found = []
        while self.next_event() == self.step:
            _, epoch, request, is_end = heapq.heappop(self.events)
            if is_end:
                found.append((epoch, request))
            else:
                self._add(request, self._remove(request))
        return [request for _, request in sorted(found)]

    def grown(self, num_steps: int) -> int:
        """Bytes of new pages in the next steps."""
        cycles, rest = divmod(num_steps, self.block)
        total = cycles * self.per_cycle
        at, growth, block = self.step % self.block, self.growth, self.block
        for phase in range(at, at + rest):
            total += growth[phase % block]
        return total

    def steps_within(self, free: int, most: int) -> int:
        """How many of the next `most` steps find their pages in `free` bytes."""
        if not self.per_cycle or free >= self.per_cycle * (most // self.block + 1):
            return most
        steps, left = divmod(free, self.per_cycle)
        steps *= self.block
        while steps < most:
            left -= self.growth[(self.step + steps) % self.block]
            if left < 0:
                break
            steps += 1
        return min(steps, most)

    def num_tokens(self, request: int) -> int:
        """Tokens of a request that were computed."""
        return self.members[request][0] + self.step

    def _add(self, request: int, num_tokens: int) -> None:
        reading = slope = 0
        for window, cached_token in self._attention:
            if window is None or num_tokens < window:
                reading += cached_token * num_tokens
                slope += cached_token
            else:
                reading += cached_token * window
        # The next page is needed in the step that follows a full one.
        phase = (self.step - num_tokens) % self.block
        pages = -(-num_tokens // self.block)
        growth = 0
        for begin, each in self._growth_of_pages:
            if pages >= begin:
                growth = each
        self.reading += reading
        self.slope += slope
        self.growth[phase] += growth
        self.per_cycle += growth
        # Tokens follow from the step: this much less than its number.
        self.members[request] = (num_tokens - self.step, slope, phase, growth)
        for bend in self._bends:
            if bend > num_tokens:
                heapq.heappush(self.events, (self.step + bend - num_tokens, self._epochs[request], request, False))
                break

    def _remove(self, request: int) -> int:
        less, slope, phase, growth = self.members.pop(request)
        num_tokens = less + self.step
        self.slope -= slope
        for window, cached_token in self._attention:
            self.reading -= cached_token * (num_tokens if window is None else min(num_tokens, window))
        self.growth[phase] -= growth
        self.per_cycle -= growth
        return num_tokens
