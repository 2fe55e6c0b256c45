# SPDX-License-Identifier: Apache-2.0
"""How the cache grows and shrinks: the steps of a transaction, over all ranks.

- Grow: make pages on all ranks and attach them, in the background; if a rank fails,
  detach on the others; publish the blocks.
- Shrink: withdraw the blocks; move the live ones, with no step in flight; wait for the
  steps that were in flight, since they may still touch the chunks; detach on all ranks,
  in the background; give the memory back, or if a rank fails, attach it again and publish.

Between the slices of a transaction the engine steps.
"""

import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm.utils.math_utils import cdiv
from vllm.v1.elastic_kv import preemption, worker_side
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool, ShrinkPlan
from vllm.v1.elastic_kv.ranks import Ranks, call, reason_of
from vllm.v1.elastic_kv.resize import Outcome
from vllm.v1.elastic_kv.transaction import Fence, Job, Pause, Transaction, Waitable
from vllm.v1.elastic_kv.worker_side import ProbeReport, RankReport, RankState

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

# Pages that are made at a time while the cache grows.
PREPARE_BYTES = 256 << 20
# How long a shrink waits for its memory to be given back, in the background, before it answers.
SETTLE_SECONDS = 10.0


class Resizer:
    """Changes which chunks are attached on all ranks and published in the pool."""

    def __init__(
        self, engine: "EngineCore", pool: ElasticBlockPool, block_bytes: int, publish: Callable[[Job], None]
    ) -> None:
        """
        Args:
            engine: Whose steps use the blocks, and whose executor reaches the workers.
            pool: Where blocks are published and withdrawn.
            block_bytes: Bytes of a block on the rank where it takes most.
            publish: Called when the pool has another size.

        """
        self._engine = engine
        self._executor = engine.model_executor
        self._scheduler = cast("Scheduler", engine.scheduler)
        self._pool = pool
        self._block_bytes = block_bytes
        self._chunk_bytes = block_bytes * pool.layout.chunk_blocks
        self._publish = publish
        self.ranks = Ranks(
            engine.model_executor, {worker_side.attach: self._chunk_bytes, worker_side.move: block_bytes}
        )

    def foresee(self, job: Job, change: int) -> Transaction:
        """Tell what a change by so many chunks would come to, and do nothing."""
        chunk_blocks = self._pool.layout.chunk_blocks
        result = job.result
        if change <= 0:
            plan = self._pool.plan_shrink(-change)
            victims, freed = self._victims(job, plan)
            result.evicted, result.moved, result.preempted = plan.evicted, plan.moved, len(victims)
            result.moved_bytes = plan.moved * self._block_bytes
            missing = cdiv(max(0, plan.shortfall - freed), chunk_blocks) if victims else plan.missing
            result.after += (change + missing) * chunk_blocks
            return job.end(*_outcome_of_shrink(-change - missing, missing))
        available = yield from self._available_bytes()
        fits = min(change, available // self._chunk_bytes)
        result.after += fits * chunk_blocks
        if fits == change:
            return job.end("done")
        return job.end("partial" if fits else "refused", f"{available} bytes are available to each rank")

    def grow(self, job: Job, chunks: Sequence[int]) -> Transaction:
        """Attach `chunks` and publish their blocks, slice by slice."""
        size = max(1, PREPARE_BYTES // self._chunk_bytes)
        if run_blocks := self._pool.layout.run_blocks:
            # As long as a run may be, for fewer handles, but no longer than what there is memory for.
            fits = (yield from self._available_bytes()) // self._chunk_bytes
            size = max(size, min(run_blocks // self._pool.layout.chunk_blocks, fits))
        for first in range(0, len(chunks), size):
            part = chunks[first : first + size]
            error = yield from self._prepare(job, part)
            error = error or (yield from self.ranks.aside(job, worker_side.begin_attach, worker_side.detach, part))
            if error:
                yield call(self._executor, worker_side.discard)
                return job.end("partial" if first else "refused", error)
            with Pause(job):
                self._pool.grow(part)
                self._publish(job)
        return job.end("done")

    def grow_now(self, job: Job, chunks: Sequence[int]) -> None:
        """Attach `chunks` and publish their blocks at once, for a step that is being scheduled."""
        error = self.ranks.at_once(job, worker_side.attach, worker_side.detach, chunks)
        job.end("refused" if error else "done", error)
        if not error:
            self._pool.grow(chunks)
            self._publish(job)

    def shrink(self, job: Job, num_chunks: int) -> Transaction:
        """Withdraw up to `num_chunks` chunks, empty and detach them."""
        with Pause(job):
            plan = self._pool.plan_shrink(num_chunks)
        if self._victims(job, plan)[0]:
            yield from self._drain(job)
            with Pause(job):
                # Requests may have ended meanwhile, or come to need more.
                victims, _ = self._victims(job, self._pool.plan_shrink(num_chunks))
                preemption.preempt(self._scheduler, victims)
                job.result.preempted = len(victims)
                plan = self._pool.plan_shrink(num_chunks)
        with Pause(job):
            job.result.evicted = self._pool.withdraw(plan.chunks)
            self._publish(job)
        job.holds_steps = False
        gone, error = 0, None
        while self._pool.leaving and not error:
            with Pause(job):
                empty = self._pool.emptied()
            if empty:
                went, error = yield from self._detach(job, empty)
                gone += went
            else:
                error = job.given_up or (yield from self._move(job))
        if error:
            self._pool.restore()
        self._publish(job)
        if error:
            return job.end("partial" if gone else "refused", error)
        return job.end(*_outcome_of_shrink(gone, plan.missing))

    def settle(self, job: Job) -> Generator[Waitable, Any, list[RankState]]:
        """Wait for the ranks to have given memory back, and see what they hold."""
        end = time.monotonic() + SETTLE_SECONDS
        yield from self.ranks.look(worker_side.busy, _all_idle, lambda: time.monotonic() > end)
        measured: list[RankState] = yield call(self._executor, worker_side.measure)
        return measured

    def _victims(self, job: Job, plan: ShrinkPlan) -> "tuple[list[Request], int]":
        """The requests to preempt, and the blocks that come free with them."""
        if not plan.shortfall or not job.request.allow_preemption:
            return [], 0
        return preemption.choose(self._scheduler, plan.shortfall)

    def _drain(self, job: Job) -> Generator[Waitable, Any, None]:
        """Let the steps in flight end, and none begin until `holds_steps` is reset."""
        job.holds_steps = True
        yield Fence(self._engine)
        # The lender begins within a scheduling pass, whose own step comes into flight only after that.
        yield Fence(self._engine)

    def _detach(self, job: Job, chunks: Sequence[int]) -> Generator[Waitable, Any, tuple[int, str | None]]:
        """Detach chunks that were emptied, while the engine goes on. Returns how many went, or why none did.

        Where they cannot all go, those do that need no cut. What they leave free may be what the others lack.
        """
        # From here on their pages go, even if the caller's time is up: nothing uses them any more.
        yield Fence(self._engine)
        error = yield from self.ranks.aside(job, worker_side.begin_detach, worker_side.take_back, chunks)
        if error and (whole := (yield from self._whole(chunks))):
            job.rank_failed, chunks = False, whole
            error = yield from self.ranks.aside(job, worker_side.begin_detach, worker_side.take_back, chunks)
        if error:
            return 0, error
        reports: list[RankReport] = yield call(self._executor, worker_side.let_go)
        job.result.pause_ms += max(report["elapsed_ms"] for report in reports)
        with Pause(job):
            self._pool.retire(chunks)
        return len(chunks), None

    def _whole(self, chunks: Sequence[int]) -> Generator[Waitable, Any, list[int]]:
        """Those of `chunks` that every rank can detach without a cut, if that is a part of them and not all."""
        by_rank: list[list[int]] = yield call(self._executor, worker_side.whole, chunks)
        whole = set(chunks).intersection(*by_rank)
        return sorted(whole) if len(whole) < len(chunks) else []

    def _move(self, job: Job) -> Generator[Waitable, Any, str | None]:
        """Move a slice of live blocks out of leaving chunks. Returns why it could not be done."""
        yield from self._drain(job)
        moves = self._pool.next_moves(self.ranks.in_a_slice(worker_side.move))
        error = None
        if moves:  # the requests may have ended meanwhile
            # At once: an abort that is processed meanwhile would free blocks that are being moved.
            error = self.ranks.at_once(job, worker_side.move, worker_side.unmove, moves)
        if not error:
            with Pause(job):
                self._pool.move(moves)
                self._publish(job)
                job.result.moved += len(moves)
                job.result.moved_bytes += len(moves) * self._block_bytes
        job.holds_steps = False
        return error

    def _prepare(self, job: Job, chunks: Sequence[int]) -> Generator[Waitable, Any, str | None]:
        """Make pages for `chunks` on all ranks, while the engine goes on."""
        if job.given_up:
            return job.given_up
        reports: list[RankReport] = yield call(self._executor, worker_side.prepare, chunks)
        job.result.pause_ms += max(report["elapsed_ms"] for report in reports)
        if reason := reason_of(reports):
            job.rank_failed = True
            return reason
        yield from self.ranks.look(worker_side.busy, _all_idle, lambda: job.given_up is not None)
        return job.given_up

    def _available_bytes(self) -> Generator[Waitable, Any, int]:
        """Memory that each rank can have now."""
        probes: list[ProbeReport] = yield call(self._executor, worker_side.probe, self._pool.layout.driver)
        return min(probe["available_bytes"] for probe in probes) // self._pool.layout.ranks_sharing


def _all_idle(busy: Sequence[bool]) -> bool:
    return not any(busy)


def _outcome_of_shrink(taken: int, missing: int) -> tuple[Outcome, str | None]:
    if not missing:
        return "done", None
    reason = f"live blocks need the room of {missing} more chunks"
    return ("partial" if taken else "refused"), reason
