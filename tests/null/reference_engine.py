"""Continuous batching step by step, slow and obvious: what `tightfit.serving.load.scheduler` must agree with.

Each step looks at every running request, as vLLM's scheduler does: pages are taken one request after the other, the youngest is ended where one is
missing, and a request that was ended begins again with its prompt and its answer so far.
"""

import dataclasses
from collections.abc import Sequence

from tightfit.serving.load.load_costs import CachePages, LoadCosts
from tightfit.serving.load.scheduler import SchedulerLimits


@dataclasses.dataclass(eq=False)
class Request:
    """`computed` tokens are in the cache, of `prompt` and `answered` so far of `answer`; it `decodes` once all are computed, until it is preempted."""

    number: int
    arrival: int
    prompt: int
    answer: int
    computed: int = 0
    answered: int = 0
    first: int = -1
    end: int = -1
    preemptions: int = 0
    decodes: bool = False

    @property
    def known(self) -> int:
        return self.prompt + self.answered


class ReferenceEngine:
    def __init__(self, costs: LoadCosts, pages: CachePages, limits: SchedulerLimits) -> None:
        self.costs, self.pages, self.limits = costs, pages, limits
        self.free = pages.capacity
        self.now = 0
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def serve(self, arrivals: Sequence[int], prompts: Sequence[int], answers: Sequence[int]) -> list[Request]:
        everyone = [Request(number, *each) for number, each in enumerate(zip(arrivals, prompts, answers, strict=True))]
        coming = list(everyone)
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival <= self.now:
                self.waiting.append(coming.pop(0))
            if not (self.waiting or self.running):
                self.now = coming[0].arrival
                continue
            self.step()
        return everyone

    def step(self) -> None:
        scheduled: dict[Request, int] = {}
        budget = self.limits.max_tokens
        has_preempted = False
        at = 0
        while at < len(self.running):
            request = self.running[at]
            chunk = min(request.known - request.computed, budget)
            while not self.takes_pages(request, chunk):
                last = self.running.pop()
                self.free += self.pages.num_bytes(last.computed)
                last.computed, last.decodes = 0, False
                last.preemptions += 1
                self.waiting.insert(0, last)
                has_preempted = True
                if last is request:
                    break
            else:
                scheduled[request] = chunk
                budget -= chunk
                at += 1
                continue
            break
        while self.waiting and not has_preempted and budget > 0 and len(self.running) < self.limits.max_requests:
            request = self.waiting[0]
            chunk = min(request.known - request.computed, budget)
            if self.limits.admits_whole and self.pages.num_bytes(request.known) > self.free:
                break
            if not self.takes_pages(request, chunk):
                break
            self.running.append(self.waiting.pop(0))
            scheduled[request] = chunk
            budget -= chunk
        self.now += self.duration(scheduled)
        for request, chunk in scheduled.items():
            request.computed += chunk
            if request.computed < request.known:
                continue
            request.answered += 1
            request.decodes = True
            if request.first < 0:
                request.first = self.now
            if request.answered == request.answer:
                request.end = self.now
                self.running.remove(request)
                self.free += self.pages.num_bytes(request.computed)

    def takes_pages(self, request: Request, chunk: int) -> bool:
        more = self.pages.num_bytes(request.computed + chunk) - (
            self.pages.num_bytes(request.computed) if request.computed else 0
        )
        if more > self.free:
            return False
        self.free -= more
        return True

    def duration(self, scheduled: dict[Request, int]) -> int:
        decoding = [r for r in scheduled if r.decodes]
        prompts = [r for r in scheduled if r not in decoding]
        tokens = sum(scheduled.values())
        total = self.costs.mixed[tokens] if prompts else self.costs.decode[len(decoding)]
        for attention in self.costs.attention:
            for request in decoding:
                kept = request.computed if attention.window is None else min(request.computed, attention.window)
                total += attention.cached_token * kept
            for request in prompts:
                total += attention.chunk
                for token in range(scheduled[request]):
                    seen = request.computed + token + 1
                    total += attention.pair * (seen if attention.window is None else min(seen, attention.window))
        return total
