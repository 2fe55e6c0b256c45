# SPDX-License-Identifier: Apache-2.0
"""The one owner of the cache's size, in the engine core.

A resize is a transaction. It runs between steps, one at a time, as a generator
that yields what it waits for. While it waits, the engine goes on stepping.
"""

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.logger import init_logger
from vllm.v1.elastic_kv import activation_probe, worker_side
from vllm.v1.elastic_kv.accounts import Accounts
from vllm.v1.elastic_kv.allowance import Allowance
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool
from vllm.v1.elastic_kv.lending import Lender
from vllm.v1.elastic_kv.ranks import call
from vllm.v1.elastic_kv.resize import ResizeRequest, ResizeResult, explain
from vllm.v1.elastic_kv.resizer import Resizer
from vllm.v1.elastic_kv.stats import ElasticKVStats
from vllm.v1.elastic_kv.transaction import Fence, Job, Timer, Transaction, Waitable
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)


class ElasticKVController:
    """Resizes the KV cache of an engine core. Used from the engine's own thread only."""

    def __init__(self, engine: EngineCore) -> None:
        pool = engine.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        if not isinstance(pool, ElasticBlockPool):
            raise TypeError(
                f"The elastic KV cache needs its own block pool, but {type(engine.scheduler).__name__} "
                f"has a {type(pool).__name__}."
            )
        self.pool = pool
        self._engine = engine
        self._queue: deque[Job] = deque()
        self._fatal: Exception | None = None
        call(engine.model_executor, worker_side.check).result()
        ranks = call(engine.model_executor, worker_side.measure).result()
        self._accounts = Accounts(engine, pool, ranks)
        self._resizer = Resizer(engine, pool, self._accounts.block_bytes, self._accounts.publish)
        config = engine.vllm_config.elastic_kv_config
        assert config is not None
        self._policy = config.policy
        on_demand = self._policy == "on-demand"
        self.allowance = Allowance(pool, pool.layout.capacity_blocks if on_demand else pool.num_gpu_blocks)
        # Tokens in a block, of a request that takes blocks from every cache group.
        self.block_tokens = engine.vllm_config.cache_config.block_size
        self.lender: Lender | None = None
        if (reserve := pool.layout.reserve) is not None:
            own_blocks = pool.num_gpu_blocks
            self.lender = Lender(self, reserve, own_blocks, self._accounts.block_bytes, config.lend_after_s)
            self.allowance.blocks = self.lender.most_blocks
        engine.scheduler.elastic_kv = self  # type: ignore[attr-defined]
        engine.scheduler.kv_cache_manager.elastic_kv = self  # type: ignore[attr-defined]
        self._accounts.show()

    @property
    def pending(self) -> bool:
        """Whether a transaction runs, or waits for its turn, or should."""
        return bool(self._queue) or self.allowance.exceeded

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be scheduled now: a transaction waits for those in flight."""
        return bool(self._queue) and (self._queue[0].holds_steps or self._queue[0].holds_all_steps)

    @property
    def scheduler(self) -> Any:
        """The engine core's scheduler."""
        return self._engine.scheduler

    @property
    def steps_in_flight(self) -> bool:
        """Whether a step was begun whose output is not processed yet."""
        return bool(self._engine.batch_queue)

    @property
    def running_job(self) -> Job | None:
        """The transaction that runs, or comes next."""
        return self._queue[0] if self._queue else None

    @property
    def late_bytes(self) -> int:
        """What a rank had not given back to the device when it was asked last."""
        return self._accounts.late_bytes

    def resize(self, fields: dict[str, Any]) -> "Future[dict[str, Any]]":
        """Queue a resize, and begin it if no other one runs.

        Args:
            fields: What a `ResizeRequest` is made of.

        Returns:
            The answer, as `ResizeResult.to_dict` gives it, or `{"invalid": why}`
            where the request is malformed or asks for a size that the cache cannot
            have: the caller's mistake, which changes nothing.

        """
        answer: Future[dict[str, Any]] = Future()
        layout = self.pool.layout
        try:
            request = ResizeRequest.model_validate(fields)
            target = request.target_blocks(
                layout.capacity_blocks, layout.base_blocks, self._accounts.block_bytes, self.block_tokens
            )
        except ValueError as error:
            answer.set_result({"invalid": explain(error) if isinstance(error, ValidationError) else str(error)})
            return answer
        self._queue.append(self._job(request, target // layout.chunk_blocks * layout.chunk_blocks, answer))
        self.poll()
        return answer

    def poll(self, wait: bool = False) -> None:
        """Give the transactions their turn: one thing they wait for. The engine loop
        does so between two looks at its input, whether there is a step or not.

        Args:
            wait: Go on until all have ended. For callers without an engine loop.

        Raises:
            Exception: A transaction broke, and the engine cannot go on. Every
                later call raises the same, so that the engine loop meets it too.

        """
        if not self._queue and self.allowance.exceeded:
            request = ResizeRequest(blocks=self.allowance.now, allow_preemption=False)
            self._queue.append(self._job(request, self.allowance.now, own=True))
        self._refuse_overdue()
        while self._queue:
            if self._fatal is not None:
                raise self._fatal
            try:
                moved = self._advance(self._queue[0], wait)
            except Exception as error:  # whatever it is, what the ranks hold is no longer known
                self._fatal = error
                raise
            if not wait or not moved:
                return

    def _refuse_overdue(self) -> None:
        """Answer those whose turn did not come in time, also while another one still runs."""
        for job in [job for job in self._queue if job.run is None and job.overdue]:
            self._queue.remove(job)
            job.result.before = job.result.after = self.pool.num_gpu_blocks
            job.end("refused", f"its turn did not come within {job.request.timeout_s:g} s")
            self._finish(job, had_its_turn=False)  # no news about the memory, and another one may be under way

    def _advance(self, job: Job, wait: bool) -> bool:
        """Carry a transaction on to the next thing it waits for. False if it waits still."""
        value = None
        if job.run is None:
            job.run = self._run(job)
        elif job.waits_for is not None:
            if not wait and not job.waits_for.done() and self._has_steps(job.waits_for):
                return False
            value = job.waits_for.result()
        try:
            job.waits_for = job.run.send(value)
        except StopIteration:
            self._queue.popleft()
            self._finish(job)
        return True

    def token_budget(self, most: int) -> int:
        """How many tokens the step may have that is about to be scheduled, at most `most`.

        Raises:
            Exception: A transaction broke, and the engine cannot go on.

        """
        return most if self.lender is None else self.lender.token_budget(most)

    def begin_own(
        self, request: ResizeRequest, target: int, holds_all_steps: bool = False, fenced: bool = False
    ) -> None:
        """Queue a resize of the controller's own, and begin it if no other one runs."""
        job = self._job(request, target, own=True)
        job.holds_all_steps, job.fenced = holds_all_steps, fenced
        self._queue.append(job)
        self.poll()

    def measure_again(self) -> bool:
        """Ask the ranks what they hold, if they were not asked just now. Returns whether they were."""
        if not self._accounts.stale:
            return False
        self._accounts.measured(call(self._engine.model_executor, worker_side.measure).result())
        return True

    def make_room(self, request: "Request", num_blocks: int) -> None:
        """Grow, if that is allowed and helps, for a request that needs `num_blocks` blocks
        in the step that is being scheduled.

        Raises:
            Exception: The ranks could not be brought together again.

        """
        if self._queue:
            return
        running = self._engine.scheduler.running  # type: ignore[attr-defined]
        chunks = self.allowance.growth(
            request, num_blocks, running, lambda: self._resizer.ranks.in_a_slice(worker_side.attach)
        )
        if not chunks:
            return
        target = self.pool.num_gpu_blocks + len(chunks) * self.pool.layout.chunk_blocks
        job = self._job(ResizeRequest(blocks=target), target, own=True)
        self._resizer.grow_now(job, chunks)
        self._accounts.outdated()  # to be measured when somebody asks: the step waits
        self._finish(job)

    def state(self) -> dict[str, Any]:
        """The state as `GET /elastic_kv` gives it."""
        if self._accounts.stale and not self._engine.batch_queue and not self.pending:
            self._accounts.measured(call(self._engine.model_executor, worker_side.measure).result())
        reserve = self.lender.state() if self.lender is not None else None
        return self._accounts.state(self._policy, self.allowance.blocks, self.block_tokens, reserve)

    def fail_faulty(self, faults: dict[str, int]) -> list[str]:
        """Say why requests fail whose attention met block ids without memory, and forget what they computed.

        Args:
            faults: Ids of requests, and how many block ids each met in one step.

        Returns:
            The requests that are to end with an error.

        """
        scheduler = self._engine.scheduler
        for request_id, count in faults.items():
            request = scheduler.requests.get(request_id)  # type: ignore[attr-defined]
            if request is None or request.is_finished():
                continue
            self._accounts.faulted(count)
            request.stop_reason = f"soft page fault: its block table names {count} KV cache block(s) without memory"
            logger.error("Elastic KV cache: request %s fails: %s. This is a bug.", request_id, request.stop_reason)
            # Keys and values of later layers come from what was masked. No other request may find them.
            manager = scheduler.kv_cache_manager  # type: ignore[attr-defined]
            manager.evict_blocks({block for ids in manager.get_block_ids(request_id) for block in ids})
        return list(faults)

    def take_stats(self) -> ElasticKVStats:
        """What the metrics show; hands out each ended resize once."""
        return self._accounts.take_stats(self.lender.state() if self.lender is not None else None)

    def _run(self, job: Job) -> Transaction:
        job.result.before = job.result.after = self.pool.num_gpu_blocks
        asked, job.target = job.target, min(job.target, self.allowance.phase_blocks)
        change = (job.target - self.pool.num_gpu_blocks) // self.pool.layout.chunk_blocks
        if job.request.dry_run:
            yield from self._resizer.foresee(job, change)
            return self._lessened(job, asked)
        if not job.own:
            self.allowance.set(asked)
        if job.fenced:
            yield Fence(self._engine)
            yield call(self._engine.model_executor, activation_probe.trim)
        if change > 0:
            result = yield from self._resizer.grow(job, self.pool.missing_chunks()[:change])
        else:
            result = yield from self._resizer.shrink(job, -change)
        ranks = yield from self._resizer.settle(job)
        self._accounts.measured(ranks)
        if late := max(rank["unreleased_bytes"] for rank in ranks):
            result.reason = result.reason or f"{late} bytes of a rank are not given back to the device yet"
        return self._lessened(job, asked)

    @staticmethod
    def _lessened(job: Job, asked: int) -> ResizeResult:
        """The result, which is not what was asked for where the prefill reserve is kept."""
        if job.result.outcome != "done" or job.target >= asked:
            return job.result
        reason = f"the prefill reserve is kept: there can be {job.target} blocks now"
        return job.end("refused" if job.result.after <= job.result.before else "partial", reason)

    def _job(
        self, request: ResizeRequest, target: int, answer: "Future[dict[str, Any]] | None" = None, own: bool = False
    ) -> Job:
        now = self.pool.num_gpu_blocks
        result = ResizeResult("done", before=now, after=now)
        return Job(request, answer or Future(), time.monotonic(), result, target, own)

    def _has_steps(self, waits_for: Waitable) -> bool:
        """Whether the engine has steps to do while a transaction waits. Without a step in
        flight nothing but the transaction itself would fetch the result of a call.
        """
        if self._engine.batch_queue:
            return True
        return isinstance(waits_for, Timer) and self._engine.scheduler.has_requests()

    def _wake_after(self, seconds: float) -> None:
        """Let the engine loop look again by then, though it be idle: what could not be done may be possible."""
        if isinstance(self._engine, EngineCoreProc):
            wake = (EngineCoreRequestType.WAKEUP, None)
            timer = threading.Timer(seconds, self._engine.input_queue.put_nowait, [wake])
            timer.daemon = True
            timer.start()

    def _finish(self, job: Job, had_its_turn: bool = True) -> None:
        answer = self._accounts.ended(job)
        if had_its_turn and not job.request.dry_run:
            if self.lender is not None:
                self.lender.ended(job)
            # More than there can be while the prefill reserve is kept was asked for in vain, but nothing has failed.
            failed = job.result.after != job.target and not job.withdrawn
            if wait := self.allowance.ended(not failed):
                self._wake_after(wait)
        job.answer.set_result(answer)
        self._accounts.show()
