# SPDX-License-Identifier: Apache-2.0
"""Preempting requests whose blocks a shrink cannot keep."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import SchedulingPolicy

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def choose(scheduler: "Scheduler", num_blocks: int) -> tuple[list["Request"], int]:
    """The running requests to preempt for `num_blocks` blocks to come free, or all if
    that is too few, and how many blocks come free. The last requests first, as upstream does
    when blocks run out: in order of arrival or, with the priority policy, of priority.
    Changes nothing.
    """
    chosen: list[Request] = []
    references: dict[int, int] = {}  # block id -> references that are left
    freed = 0
    for request in _last_first(scheduler):
        if freed >= num_blocks:
            break
        chosen.append(request)
        for block in _blocks_of(scheduler, request):
            left = references.get(block.block_id, block.ref_cnt) - 1
            references[block.block_id] = left
            freed += left == 0
    return chosen, freed


def preempt(scheduler: "Scheduler", requests: Sequence["Request"]) -> None:
    """Preempt running requests between two steps. They wait at the front of the queue,
    keep the tokens they have, and compute their KV again when there is room.
    """
    now = time.monotonic()
    for request in requests:
        scheduler.running.remove(request)
        # It may be scheduled again in the very next step, as after reset_prefix_cache: what a step
        # in flight samples for it is then sampled again, and the runner must not take it for a
        # request that went on.
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _last_first(scheduler: "Scheduler") -> list["Request"]:
    requests = [request for request in reversed(scheduler.running) if scheduler._request_blocks_can_be_freed(request)]
    if scheduler.policy == SchedulingPolicy.PRIORITY:
        requests.sort(key=lambda request: (request.priority, request.arrival_time), reverse=True)
    return requests


def _blocks_of(scheduler: "Scheduler", request: "Request") -> Iterator["KVCacheBlock"]:
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for block in manager.req_to_blocks.get(request.request_id, ()):
            if not block.is_null:
                yield block
