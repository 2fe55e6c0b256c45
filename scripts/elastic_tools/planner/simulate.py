"""A discrete-event simulation of continuous batching with chunked prefill, preemption and a KV pool that changes size.

It schedules as vLLM's V1 scheduler does: first the requests that run, one token each for those that decode; then those
whose prompt is not through, then waiting ones, as far as the token budget, the number of sequences and the blocks
reach. A waiting request is let in only where its whole prompt fits. Where blocks run out, the request that came last
is preempted and computed again later, and nobody is let in in that step. Steps in which requests only decode are taken
in one go up to the next event. Times are seconds here, and the same seed gives the same result.
"""

import heapq
from collections import deque

import numpy as np

from elastic_tools.planner.cache import IN_FLIGHT
from elastic_tools.planner.traffic import Counters, Engine, Loan, Outcome, Request, outcome
from elastic_tools.planner.workload import Workload

LONGEST_JUMP = 256  # decode steps taken in one go


class Simulation:
    """One run over a list of requests; ``concurrency`` of them are in the system at a time, or they come as they
    arrive. ``skipped`` of them at the start and at the end are not measured.
    """

    def __init__(
        self, engine: Engine, requests: list[Request], concurrency: int | None, skipped: int | None = None
    ) -> None:
        self.engine, self.concurrency = engine, concurrency
        self.skipped = (concurrency or 0) if skipped is None else skipped
        self.coming = deque(requests)
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []  # prompts under way, in order
        self.decoding: list[tuple[int, int, Request]] = []  # heap by the step at which they end
        self.order = 0
        self.now = 0.0
        self.decode_step = 0
        self.context = 0  # sum over decoding requests of context minus the number of the decode step
        self.pool = engine.blocks
        self.resizes = deque(engine.resizes)
        self.lent = engine.loan is not None
        self.counters = Counters()
        self.refused = 0

    # --- blocks ---

    def used(self, ahead: int = 0) -> float:
        """Blocks in use; ``ahead`` decode steps from now."""
        count = len(self.decoding)
        total = 0.0
        if count:
            mean = self.context / count + self.decode_step + ahead
            total = count * self._blocks(mean)
        return total + sum(self.engine.request_blocks(r.done) for r in self.filling if r.done)

    def _blocks(self, tokens: float) -> float:
        """Blocks of a decoding request with so many tokens on average: half a block is empty."""
        size, total = self.engine.layout.block, 0.0
        for window, groups in self.engine.layout.groups:
            total += groups * (min(tokens, window - 1 + IN_FLIGHT) / size + 1 if window else tokens / size + 0.5)
        return total

    @property
    def capacity(self) -> int:
        """Blocks of the pool now; the null block belongs to none."""
        return self.pool - 1 + (self.engine.loan.blocks if self.engine.loan and self.lent else 0)

    # --- the run ---

    def run(self) -> Outcome:
        """Runs until every request is answered."""
        while self.coming or self.waiting or self.filling or self.decoding:
            self._arrive()
            if not (self.waiting or self.filling or self.decoding):
                if self.coming:
                    self.now = max(self.now, self.coming[0].arrived)
                continue
            self._resize()
            chunks = self._schedule()
            if chunks:
                self._step(chunks)
            elif self.decoding:
                self._decode_many()
            else:
                self._stuck()
        return outcome(self.counters, self.refused, self.skipped)

    def _arrive(self) -> None:
        inside = len(self.waiting) + len(self.filling) + len(self.decoding)
        while self.coming and (
            inside < self.concurrency if self.concurrency is not None else self.coming[0].arrived <= self.now
        ):
            request = self.coming.popleft()
            if self.concurrency is not None:
                request.arrived = self.now
            if self.engine.request_blocks(request.prompt + request.output) > self.pool - 1:
                self.refused += 1  # vLLM refuses what can never fit
                continue
            self.waiting.append(request)
            inside += 1

    def _resize(self) -> None:
        while self.resizes and self.resizes[0][0] <= self.now:
            self.pool = self.resizes.popleft()[1]
        while self.used() > self.capacity and (self.filling or self.decoding):
            self._preempt()

    def _schedule(self) -> list[tuple[Request, int]]:
        """The chunks of prompts of the next step."""
        engine = self.engine
        before = self.counters.preemptions
        while self.decoding and self.used(1) > self.capacity:
            if not self._preempt():
                break
        budget = engine.chunk - len(self.decoding)
        wanted = sum(r.prompt - r.done for r in self.filling) + (self.waiting[0].prompt if self.waiting else 0)
        if engine.loan:
            budget = self._settle(engine.loan, budget, wanted)
        free = self.capacity - self.used(1)
        chunks: list[tuple[Request, int]] = []
        for request in list(self.filling):
            size = min(request.prompt - request.done, budget)
            if size <= 0 or request not in self.filling:
                break
            grows = self._growth(request, size)
            while grows > free and request in self.filling:
                self._preempt()  # the last one, in the end the request itself
                free = self.capacity - self.used(1) - sum(self._growth(r, n) for r, n in chunks)
            if request in self.filling:
                chunks.append((request, size))
                budget, free = budget - size, free - grows
        if self.counters.preemptions > before:
            return chunks
        while self.waiting and budget > 0 and len(self.filling) + len(self.decoding) < engine.sequences:
            request = self.waiting[0]
            if engine.request_blocks(request.prompt) > free:
                break
            size = min(request.prompt, budget)
            self.waiting.popleft()
            self.filling.append(request)
            chunks.append((request, size))
            budget, free = budget - size, free - engine.request_blocks(size)
        return chunks

    def _growth(self, request: Request, size: int) -> int:
        """Blocks that the next ``size`` tokens of a prompt take besides those that it has."""
        has = self.engine.request_blocks(request.done) if request.done else 0
        return self.engine.request_blocks(request.done + size) - has

    def _settle(self, loan: Loan, budget: int, wanted: int) -> int:
        """Takes the loan back before a large prefill, or keeps prompts small; gives it again when there is none."""
        if wanted <= loan.tokens:
            self.lent = True
            return min(budget, loan.tokens)
        if self.lent and self.used(1) <= self.pool - 1:
            self.lent = False
            self.now += loan.pause
        return min(budget, loan.tokens) if self.lent else budget

    def _step(self, chunks: list[tuple[Request, int]]) -> None:
        count = len(self.decoding)
        mean = self.context / count + self.decode_step if count else 0.0
        time = self.engine.times.step(count, mean, [(size, r.done) for r, size in chunks]) / 1e3
        self._advance(time, 1)
        for request, size in chunks:
            request.done += size
            if request.done >= request.prompt:
                self.filling.remove(request)
                self._begin(request)

    def _begin(self, request: Request) -> None:
        """The prompt is through: its last step gave a token, and the rest are decoded."""
        if request.first is None:
            request.first = self.now
        request.made += 1
        if request.made >= request.output:
            self._finish(request)
            return
        request.begun, request.ends = self.decode_step, self.decode_step + request.output - request.made
        self.context += request.prompt + 1 - self.decode_step
        self.order += 1
        heapq.heappush(self.decoding, (request.ends, self.order, request))

    def _decode_many(self) -> None:
        count = len(self.decoding)
        steps = min(self.decoding[0][0] - self.decode_step, LONGEST_JUMP)
        mean = self.context / count + self.decode_step
        room = self.capacity - self.used()
        steps = max(1, min(steps, int(room / max(count / self.engine.layout.block, 1e-9))))
        time = self.engine.times.step(count, mean + steps / 2, []) / 1e3
        until = self.resizes[0][0] if self.resizes else float("inf")
        if self.coming and self.concurrency is None and not self.waiting:
            until = min(until, self.coming[0].arrived)
        if until < self.now + steps * time:
            steps = max(1, min(steps, int((until - self.now) / time) + 1))
        self._advance(time * steps, steps)

    def _advance(self, time: float, steps: int) -> None:
        self.now += time
        counters = self.counters
        counters.steps += steps
        counters.busy += time
        counters.running += time * (len(self.decoding) + len(self.filling))
        counters.peak = max(counters.peak, self.used() / max(1, self.capacity))
        self.decode_step += steps
        while self.decoding and self.decoding[0][0] <= self.decode_step:
            _, _, request = heapq.heappop(self.decoding)
            self.context -= request.prompt + 1 - request.begun
            request.made = request.output
            self._finish(request)

    def _finish(self, request: Request) -> None:
        assert request.first is not None
        rest = (self.now - request.first) / max(1, request.output - 1)
        self.counters.finished.append((self.now, request.first - request.arrived, rest, request.output))

    def _preempt(self) -> bool:
        """Takes the blocks of the request that came last; it waits at the front and is computed again."""
        if self.filling:
            request = self.filling.pop()
        elif len(self.decoding) > 1 or (self.decoding and self.used() > self.capacity):
            entry = max(self.decoding, key=lambda each: each[1])
            self.decoding.remove(entry)
            heapq.heapify(self.decoding)
            request = entry[2]
            self.context -= request.prompt + 1 - request.begun
            made = request.output - request.made - (request.ends - self.decode_step)
            request.made += made
            request.prompt += made + 1
        else:
            return False
        request.done = 0
        self.counters.preemptions += 1
        self.waiting.appendleft(request)
        return True

    def _stuck(self) -> None:
        """Nothing runs, and what waits does not fit: until the next resize, or for ever."""
        if self.resizes:
            self.now = max(self.now, self.resizes[0][0])
        else:
            self.waiting.popleft()
            self.refused += 1


def simulate(engine: Engine, workload: Workload, count: int, seed: int = 0, longest: int = 1 << 30) -> Outcome:
    """Runs ``count`` requests of a workload that has a rate or a concurrency."""
    rng = np.random.default_rng(seed)
    prompts = workload.prompt.sample(rng, count, longest - 1)
    outputs = workload.output.sample(rng, count, longest - 1)
    arrivals = np.cumsum(rng.exponential(1 / workload.rate, count)) if workload.rate else np.zeros(count)
    requests = [
        Request(float(at), prompt, min(output, longest - prompt))
        for at, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]
    # Without a concurrency it is not known how many requests fill the engine: a quarter is left out at either end.
    skipped = count // 4 if workload.rate else None
    return Simulation(engine, requests, None if workload.rate else workload.concurrency, skipped).run()
