"""An engine core as the controller sees it: a real block pool, a real arena on every rank, and no model."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import torch
from arena.drivers import FaultyDriver, Indivisible
from pool.pools import TOKENS, check, make_arena, make_layout, make_pool
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.elastic_kv.controller import ElasticKVController
from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.residency import Residency
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
MODEL_LEN = 10 * TOKENS
WATERMARK = 0.1


class Runner(SimpleNamespace):
    """What a model runner of version 1 keeps of requests, for two requests of three blocks."""

    def __init__(self, arena) -> None:
        blocks = arena.capacity_chunks * arena.chunk_blocks
        layout = SimpleNamespace(arena=arena, capacity_blocks=blocks, chunk_blocks=arena.chunk_blocks)
        layout.residency = Residency(layout, arena.tensor())
        layout.residency.mark(arena.attached, True)
        table = np.zeros((4, 8), dtype=np.int32)
        super().__init__(
            kv_cache_config=SimpleNamespace(elastic_kv=layout),
            requests={},
            attn_groups=[],
            input_batch=SimpleNamespace(
                num_reqs=2,
                block_table=SimpleNamespace(block_tables=[SimpleNamespace(block_table=SimpleNamespace(np=table))]),
            ),
        )

    @property
    def table(self) -> np.ndarray:
        return self.input_batch.block_table.block_tables[0].block_table.np


class Scheduler:
    """Running requests and their blocks, and what upstream's scheduler does with one that is preempted."""

    policy = SchedulingPolicy.FCFS
    max_num_active_reqs = 4

    def __init__(self, manager) -> None:
        self.kv_cache_manager = manager
        self.running: list[SimpleNamespace] = []
        self.waiting: list[SimpleNamespace] = []
        self.kv_holding_waiting: list[SimpleNamespace] = []
        self.prev_step_scheduled_req_ids: set[str] = set()

    def run(self, name: str, count: int, **fields) -> SimpleNamespace:
        """A request that runs with `count` blocks."""
        request = SimpleNamespace(request_id=name, **fields)
        self.running.append(request)
        self.blocks[name] = self.kv_cache_manager.block_pool.get_new_blocks(count)
        return request

    @property
    def blocks(self) -> dict[str, list]:
        return self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def finish(self, name: str) -> None:
        self.running = [request for request in self.running if request.request_id != name]
        self.kv_cache_manager.block_pool.free_blocks(reversed(self.blocks.pop(name)))

    def _request_blocks_can_be_freed(self, request) -> bool:
        return True

    def _preempt_request(self, request, timestamp, drop_stale_output=False) -> None:
        assert request not in self.running
        self.kv_cache_manager.block_pool.free_blocks(reversed(self.blocks.pop(request.request_id)))
        self.waiting.insert(0, request)


class Executor:
    """Calls functions on every rank. With `hold`, only when `step` says so, as busy workers do.
    Unless `settles` is off, each call ends with a quiet background.
    """

    def __init__(self, arenas) -> None:
        self.workers = [
            SimpleNamespace(
                rank=rank,
                device=torch.device("cpu"),
                model_runner=Runner(arena),
            )
            for rank, arena in enumerate(arenas)
        ]
        self.hold = False
        self.settles = True
        self.time_out_on: str | None = None
        self.broken_on: str | None = None
        self.calls: list[str] = []
        self.after: dict[str, Callable[[], None]] = {}  # done after a call of that name
        self._waiting: deque = deque()

    def collective_rpc(self, function, timeout=None, args=(), kwargs=None, non_block=False):
        self.calls.append(function.__name__)
        future: Future = Future()
        if function.__name__ == self.broken_on:
            raise RuntimeError("the executor is shut down")
        if function.__name__ == self.time_out_on:
            future.set_exception(TimeoutError(f"RPC call to {function.__name__} timed out."))
            return future
        self._waiting.append((future, function, args))
        if not self.hold:
            self.step()
        return future

    def step(self) -> None:
        """Let the workers do what was asked of them, in order."""
        while self._waiting:
            future, function, args = self._waiting.popleft()
            try:
                future.set_result([self._call(worker, function, args) for worker in self.workers])
                self.after.get(function.__name__, lambda: None)()
            except Exception as error:
                future.set_exception(error)

    def _call(self, worker, function, args):
        try:
            return function(worker, *args)
        finally:
            # What a worker tells next then does not depend on how far its background has come.
            if self.settles:
                assert worker.model_runner.kv_cache_config.elastic_kv.arena.settle(60.0)


class Engine:
    """The parts of an engine core that the controller uses. Sizes are chunks."""

    def __init__(
        self,
        ranks=2,
        chunk_blocks=2,
        base=1,
        start=3,
        capacity=8,
        strides=None,
        policy="static",
        divisible=False,
        reserve=None,
        run_chunks=1,
        drivers=None,
    ) -> None:
        self.layout = make_layout(chunk_blocks, base, start, capacity)
        self.layout.reserve = reserve
        # One handle for each chunk and segment, so that a test can say which call fails.
        drivers = drivers or [HostPageDriver() if divisible else Indivisible() for _ in range(ranks)]
        self.drivers = [FaultyDriver(driver) for driver in drivers]
        strides = strides or [4096] * ranks
        self.arenas = [
            make_arena(self.layout, driver, stride, run_chunks=run_chunks)
            for driver, stride in zip(self.drivers, strides, strict=True)
        ]
        self.pool = make_pool(self.layout, enable_kv_cache_events=True)
        self.model_executor = Executor(self.arenas)
        self.batch_queue: deque | None = deque()
        self.log_stats = True
        self.scheduler = Scheduler(
            SimpleNamespace(
                block_pool=self.pool,
                watermark_blocks=int(WATERMARK * self.layout.start_blocks),
                kv_cache_config=SimpleNamespace(
                    num_blocks=self.layout.start_blocks, kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)]
                ),
                coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks={})]),
            ),
        )
        self.vllm_config = SimpleNamespace(
            elastic_kv_config=ElasticKVConfig(
                policy=reserve.policy if reserve else policy, unsafe_always_lent=True, lend_after_s=2.0
            ),
            cache_config=SimpleNamespace(
                block_size=TOKENS,
                num_gpu_blocks=self.layout.start_blocks,
                kv_cache_size_tokens=self.layout.start_blocks * TOKENS,
                kv_cache_max_concurrency=None,
            ),
            scheduler_config=SimpleNamespace(watermark=WATERMARK),
            model_config=SimpleNamespace(max_model_len=MODEL_LEN),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        )
        self.controller = ElasticKVController(self)
        self.model_executor.calls.clear()

    def close(self) -> None:
        for arena, driver in zip(self.arenas, self.drivers, strict=True):
            driver.mend()
            arena.close()

    def resize(self, **fields) -> dict:
        """A resize that ends at once, as one does when nothing is in flight."""
        answer = self.controller.resize(fields)
        self.idle()
        assert answer.done()
        return answer.result()

    def idle(self) -> None:
        """Let the engine loop go round until no transaction is pending."""
        for _ in range(1000):
            if not self.controller.pending:
                return
            self.controller.poll()
        raise AssertionError("a transaction does not end")

    def turns(self, answer: Future) -> int:
        """Let the workers and the engine take turns until a resize has ended. Returns how many it took."""
        for turn in range(1000):
            if answer.done():
                return turn
            self.model_executor.step()
            self.controller.poll()
        raise AssertionError("a transaction does not end")

    def launch_step(self) -> Future:
        """Put a step into flight, as the engine's step does."""
        future: Future = Future()
        assert self.batch_queue is not None
        self.batch_queue.appendleft((future, None, future))
        return future

    def end_step(self) -> None:
        """Process the oldest step in flight, and give the controller its turn."""
        assert self.batch_queue
        future, *_ = self.batch_queue.pop()
        if not future.done():
            future.set_result(None)
        self.controller.poll()
        if not self.batch_queue and not self.model_executor.hold:
            self.idle()

    def resident_blocks(self) -> int:
        return self.pool.num_gpu_blocks

    def check(self, same_as_pool: bool = True) -> None:
        """All ranks agree with each other, with the system, with the pool and with upstream's numbers."""
        for arena in self.arenas:
            check(self.pool, arena if same_as_pool else None)
            assert arena.attached >= self.pool.resident_chunks - self.pool._leaving.keys()
            # A rank that failed is followed by the others in the next turn.
            assert arena.attached == self.arenas[0].attached or not same_as_pool
            assert arena.reported_bytes() == arena.resident_bytes
            assert len(arena.driver.live) == arena.num_handles
        for worker in self.model_executor.workers:
            layout = worker.model_runner.kv_cache_config.elastic_kv
            marked = set(layout.residency.resident.view(-1, layout.chunk_blocks).all(1).nonzero().flatten().tolist())
            # What the kernels are told is never more than what is there.
            assert self.pool.resident_chunks - self.pool._leaving.keys() <= marked <= layout.arena.attached
        blocks = self.resident_blocks()
        cache_config, manager = self.vllm_config.cache_config, self.scheduler.kv_cache_manager
        if not self.pool.leaving:  # a block that is freed while its chunk leaves is counted out when the chunk is
            assert manager.kv_cache_config.num_blocks == cache_config.num_gpu_blocks == blocks
            assert manager.watermark_blocks == int(WATERMARK * blocks)
            assert cache_config.kv_cache_size_tokens == blocks * TOKENS
        state = self.controller.state()
        counts = state["blocks"]
        assert counts["resident"] == blocks
        assert counts["used"] + counts["cached"] + counts["free"] == blocks - 1
        assert counts["base"] <= blocks <= counts["capacity"]
        assert state["bytes"]["resident"] == blocks * state["bytes"]["per_block"]
        assert [rank["rank"] for rank in state["ranks"]] == list(range(len(self.arenas)))
        if same_as_pool and not self.controller.pending and not self.batch_queue:
            for rank, arena in zip(state["ranks"], self.arenas, strict=True):
                assert rank["reported_bytes"] == rank["resident_bytes"] == arena.resident_bytes
                assert rank["handles"] == arena.num_handles
            assert state["bytes"]["reported"] == state["bytes"]["resident"]
