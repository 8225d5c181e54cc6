"""Continuous batching as vLLM schedules it, from event to event: exact, and as fast for a step as for the thousand like it that follow.

In a step each running request that decodes gets a token; what is left of the batch's tokens goes to the prompt that is under way, then to waiting requests in the order of
their arrival, as long as there are places and pages for their first chunk, or for the whole of them. A request whose next page does not exist ends the youngest running one, whose cache is dropped
and which waits at the head of the queue to be computed again, its answer so far included (vllm/v1/core/sched/scheduler.py).

Between two events - a request ends, a prompt begins or goes on, a page is missing, one arrives that can begin - all steps are alike: the batch is the same, each context is a
token longer. The duration of such a run is a sum of an arithmetic series, and when the next event comes follows from it. Requests are told by phase: the step, modulo the
size of a page, in which they need their next page.

All times are whole femtoseconds (`tightfit.serving.load.load_costs`), so that it does not matter in what order they are added up.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from tightfit.serving.load.decoding import Decoding
from tightfit.serving.load.load_costs import CachePages, LoadCosts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How many requests run at once at most, and how many tokens a step has. `admits_whole`: a request begins only if there are pages for all of its prompt, not for the first chunk alone."""

    max_requests: int
    max_tokens: int
    admits_whole: bool = False

    def admitted(self, prompt: int, chunk: int) -> int:
        """For how many tokens there must be pages for a prompt to begin, of which `chunk` would be computed first."""
        return prompt if self.admits_whole else min(prompt, chunk)


@dataclasses.dataclass(slots=True, kw_only=True)
class Served:
    """What became of n requests: femtoseconds of their first tokens and of their ends, and how often each was preempted, all in lists of length n; the steps that it took, the
    most requests at once, the most bytes of cache, and femtoseconds x requests that ran."""

    first: list[int]
    end: list[int]
    preemptions: list[int]
    num_steps: int = 0
    most_requests: int = 0
    most_bytes: int = 0
    running_time: int = 0


def serve_requests(
    arrivals: Sequence[int],
    prompts: Sequence[int],
    answers: Sequence[int],
    *,
    costs: LoadCosts,
    pages: CachePages,
    limits: SchedulerLimits,
) -> Served:
    """Serves requests that arrive in that order (femtoseconds, not falling), with prompts and answers of so many tokens, at least one each.

    Each must fit in the cache alone.
    """
    return _Engine(arrivals, prompts, answers, costs, pages, limits).run()


@dataclasses.dataclass(slots=True)
class _Prompt:
    """A request whose prompt is computed in chunks: `computed` of `total` tokens, in `held` bytes of cache."""

    request: int
    total: int
    computed: int = 0
    held: int = 0


class _Engine:
    """`running` has the requests that decode in the order that they began; the `prompt` that is under way is younger than all of them."""

    def __init__(
        self,
        arrivals: Sequence[int],
        prompts: Sequence[int],
        answers: Sequence[int],
        costs: LoadCosts,
        pages: CachePages,
        limits: SchedulerLimits,
    ) -> None:
        self.arrivals, self.prompts, self.answers = arrivals, prompts, answers
        self.costs, self.pages, self.limits = costs, pages, limits
        self.now = 0
        self.free = pages.capacity
        self.num_arrived = 0
        self.waiting: deque[_Prompt] = deque()
        self.prompt: _Prompt | None = None
        self.running: dict[int, None] = {}
        self.decoding = Decoding(costs, pages)
        number = len(arrivals)
        self.served = Served(first=[-1] * number, end=[-1] * number, preemptions=[0] * number)

    def run(self) -> Served:
        """Serves all requests."""
        arrivals, number = self.arrivals, len(self.arrivals)
        while True:
            while self.num_arrived < number and arrivals[self.num_arrived] <= self.now:
                self.waiting.append(_Prompt(self.num_arrived, self.prompts[self.num_arrived]))
                self.num_arrived += 1
            if not (self.running or self.prompt or self.waiting):
                if self.num_arrived == number:
                    return self.served
                self.now = arrivals[self.num_arrived]
                continue
            steps = 0 if self.prompt or not self.running else self._alike_steps()
            if steps:
                self._decode(steps)
            else:
                self._step()

    def _alike_steps(self) -> int:
        """How many of the next steps only decode, and are alike; 0 where a prompt begins, or a page is missing."""
        decoding, limits = self.decoding, self.limits
        has_place = len(self.running) < limits.max_requests
        if self.waiting and has_place:
            head = self.waiting[0]
            room = self.free - decoding.grown(1)
            if self.pages.num_bytes(limits.admitted(head.total, limits.max_tokens - len(self.running))) <= room:
                return 0
        event = decoding.next_event()
        assert event is not None
        steps = decoding.steps_within(self.free, event - decoding.step)
        if steps > 1 and has_place and not self.waiting and self.num_arrived < len(self.arrivals):
            steps = min(steps, self._steps_until(self.arrivals[self.num_arrived]))
        return steps

    def _steps_until(self, arrival: int) -> int:
        """After how many steps that only decode it is `arrival` or later."""
        left = arrival - self.now
        first, slope = self.costs.decode[len(self.running)] + self.decoding.reading, self.decoding.slope
        if not slope:
            return max(1, -(-left // first)) if first else 1
        linear = 2 * first - slope
        steps = max(1, (math.isqrt(linear * linear + 8 * slope * left) - linear) // (2 * slope))
        while steps * first + slope * (steps * (steps - 1) // 2) < left:
            steps += 1
        return steps

    def _decode(self, steps: int) -> None:
        """Steps that are alike."""
        decoding, number = self.decoding, len(self.running)
        each = self.costs.decode[number] + decoding.reading
        duration = steps * each + decoding.slope * (steps * (steps - 1) // 2)
        self.free -= decoding.grown(steps)
        self._pass(duration, number, steps)
        decoding.advance(steps)
        self._end_those_done()

    def _step(self) -> None:
        """One step with prompts, or in which pages are missing."""
        decoding, limits, costs = self.decoding, self.limits, self.costs
        is_short = self._make_room()
        number = len(self.running)
        self.free -= decoding.grown(1)
        budget = limits.max_tokens - number
        begun = [] if self.prompt is None else [self.prompt]
        chunks = [] if self.prompt is None else [self._compute(self.prompt, budget)]
        while self.waiting and not is_short and number + len(begun) < limits.max_requests:
            left = budget - sum(chunk for _, chunk in chunks)
            head = self.waiting[0]
            if left <= 0 or self.pages.num_bytes(limits.admitted(head.total, left)) > self.free:
                break
            begun.append(self.waiting.popleft())
            chunks.append(self._compute(head, left))
        if chunks:
            duration = costs.mixed[number + sum(chunk for _, chunk in chunks)]
            duration += sum(each.of_chunk(chunk, context) for context, chunk in chunks for each in costs.attention)
        else:
            duration = costs.decode[number]
        self._pass(duration + decoding.reading, number + len(begun), 1)
        decoding.advance(1)
        self._end_those_done()
        self.prompt = None
        for prompt in begun:
            if prompt.computed < prompt.total:
                self.prompt = prompt
            else:
                self._begin_answer(prompt)

    def _make_room(self) -> bool:
        """Ends the youngest requests until the others find their pages for this step; whether there were any."""
        is_short = False
        while True:
            needed = self.decoding.grown(1)
            prompt = self.prompt
            if prompt is not None:
                chunk = min(prompt.total - prompt.computed, self.limits.max_tokens - len(self.running))
                needed += self.pages.num_bytes(prompt.computed + chunk) - prompt.held
            if needed <= self.free:
                return is_short
            is_short = True
            if prompt is not None:
                self.free += prompt.held
                again = _Prompt(prompt.request, prompt.total)
                self.prompt = None
            else:
                request, _ = self.running.popitem()
                num_tokens = self.decoding.leave(request)
                self.free += self.pages.num_bytes(num_tokens)
                # Its last token was chosen, and not computed yet.
                again = _Prompt(request, num_tokens + 1)
            self.served.preemptions[again.request] += 1
            self.waiting.appendleft(again)

    def _compute(self, prompt: _Prompt, budget: int) -> tuple[int, int]:
        """Takes the pages for the next chunk of a prompt; returns how many tokens were computed before, and are now."""
        context = prompt.computed
        chunk = min(prompt.total - context, budget)
        prompt.computed += chunk
        held = self.pages.num_bytes(prompt.computed)
        self.free -= held - prompt.held
        prompt.held = held
        return context, chunk

    def _begin_answer(self, prompt: _Prompt) -> None:
        """A prompt is computed, and a token of the answer chosen."""
        request, served = prompt.request, self.served
        if served.first[request] < 0:
            served.first[request] = self.now
        left = self.answers[request] - (prompt.total - self.prompts[request] + 1)
        if left:
            self.running[request] = None
            self.decoding.begin(request, prompt.total, left)
        else:
            served.end[request] = self.now
            self.free += prompt.held

    def _end_those_done(self) -> None:
        for request in self.decoding.ended():
            del self.running[request]
            self.free += self.pages.num_bytes(self.decoding.leave(request))
            self.served.end[request] = self.now

    def _pass(self, duration: int, number: int, steps: int) -> None:
        """Time passes in which so many requests run; the pages of these steps are taken already."""
        served = self.served
        self.now += duration
        served.num_steps += steps
        served.running_time += duration * number
        served.most_requests = max(served.most_requests, number)
        served.most_bytes = max(served.most_bytes, self.pages.capacity - self.free)
