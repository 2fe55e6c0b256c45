# SPDX-License-Identifier: Apache-2.0
"""Lends the prefill reserve to the cache, and takes it back before a step that needs it.

The scheduler asks before each step how many tokens it may have. That is where it is decided. What follows are the
controller's own transactions: a growth when the reserve is lent, a shrink when it is taken back.

- The budget falls before memory is lent: the growth begins when no larger step is in flight.
- The budget rises after memory came back: not before every rank has given it to the device.
"""

import time
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from vllm.utils.math_utils import cdiv
from vllm.v1.elastic_kv.reserve import BY_PHASE, Reserve
from vllm.v1.elastic_kv.resize import ResizeRequest

if TYPE_CHECKING:
    from vllm.v1.elastic_kv.controller import ElasticKVController
    from vllm.v1.elastic_kv.transaction import Job
    from vllm.v1.request import Request


class Lender:
    """Decides for each step how many tokens it may have, and what part of the reserve the cache may hold."""

    def __init__(
        self,
        controller: "ElasticKVController",
        reserve: Reserve,
        own_blocks: int,
        block_bytes: int,
        lend_after_s: float,
    ) -> None:
        """
        Args:
            controller: Does the resizes.
            reserve: The sizes.
            own_blocks: What the cache may hold beside the whole reserve.
            block_bytes: Bytes of a block on the rank where it takes most.
            lend_after_s: Seconds without a step that needs the reserve, after which it is lent again.

        """
        self.reserve = reserve
        self._controller = controller
        self._own_blocks = own_blocks
        self._block_bytes = block_bytes
        self._lend_after_s = lend_after_s
        layout = controller.pool.layout
        chunk_bytes = block_bytes * layout.chunk_blocks
        lendable = reserve.lendable_bytes // chunk_bytes * layout.chunk_blocks
        self.lendable_blocks = min(lendable, layout.capacity_blocks - own_blocks)
        self._needed_at = float("-inf")
        self._late_blocks = 0
        self._last_budget = reserve.most
        self._returns = 0
        self._smaller_steps = 0
        controller.allowance.phase_blocks = own_blocks

    @property
    def most_blocks(self) -> int:
        """The cache's size with all lent that the policy lends."""
        return self._own_blocks + self.lendable_blocks

    @property
    def borrowed_blocks(self) -> int:
        """Blocks of the reserve that the cache holds, may come to hold, or has not given back yet."""
        controller = self._controller
        pool = controller.pool
        held = len(pool.resident_chunks) * pool.layout.chunk_blocks + self._late_blocks
        if (job := controller.running_job) is not None and job.run is not None and not job.request.dry_run:
            held = max(held, job.result.before, job.target)
        return max(held, controller.allowance.phase_blocks) - self._own_blocks

    def token_budget(self, most: int) -> int:
        """How many tokens the step may have that is about to be scheduled. Lends or takes back, if it is time to.

        Args:
            most: How many it may have otherwise.

        """
        self._refresh()
        wanted, prompt_logprobs = self._wanted(min(most, self.reserve.most))
        if wanted > self.reserve.budget(self.lendable_blocks * self._block_bytes, prompt_logprobs):
            self._needed_at = time.monotonic()
            self._stop_lending()
            if self.reserve.policy in BY_PHASE and self._controller.allowance.phase_blocks > self._own_blocks:
                self._take_back()
        elif self._quiet:
            self._lend()
        budget = min(most, self._budget(prompt_logprobs))
        self._smaller_steps += wanted > budget
        self._last_budget = budget
        return budget

    def ended(self, job: "Job") -> None:
        """After a change of size: what could not be lent is not held against the steps, what is late is."""
        allowance, pool = self._controller.allowance, self._controller.pool
        allowance.phase_blocks = min(allowance.phase_blocks, max(self._own_blocks, pool.num_gpu_blocks))
        if job.own and job.target < job.result.before:
            self._returns += 1
        self._late()

    def state(self) -> dict[str, Any]:
        """What `GET /elastic_kv` tells of the reserve. Sizes are blocks, bytes on each rank, and tokens of a step."""
        return {
            "reserve_bytes": self.reserve.nbytes,
            "lendable_blocks": self.lendable_blocks,
            "borrowed_blocks": max(0, self.borrowed_blocks),
            "token_budget": self._last_budget,
            "reserve_returns": self._returns,
            "smaller_steps": self._smaller_steps,
        }

    @property
    def _quiet(self) -> bool:
        """Whether it is time to lend."""
        if self.reserve.policy not in BY_PHASE:
            return True
        return time.monotonic() - self._needed_at >= self._lend_after_s

    def _budget(self, prompt_logprobs: bool) -> int:
        return self.reserve.budget(max(0, self.borrowed_blocks) * self._block_bytes, prompt_logprobs)

    def _wanted(self, most: int) -> tuple[int, bool]:
        """How many tokens a step would have if it could, up to `most`, and whether it would have a request that
        wants the log probabilities of its prompt. What a waiting request finds in the prefix cache counts as well.
        """
        scheduler: Any = self._controller.scheduler
        # Those that wait and have blocks, as when more of a streamed prompt has come, are scheduled before the others.
        active = [*scheduler.running, *scheduler.kv_holding_waiting]
        room = self._room()
        wanted = sum(map(_tokens_of, active))
        for request in islice(scheduler.waiting, max(0, scheduler.max_num_active_reqs - len(active))):
            room -= cdiv(request.num_tokens, self._controller.block_tokens)
            if wanted >= most or room < 0:
                break  # without room it needs blocks that are there only while the reserve is lent
            wanted += _tokens_of(request)
        # Of those that wait, any may get into the step: others may be passed over, or be prefixes of the cache's.
        prompt_logprobs = any(map(_wants_prompt_logprobs, chain(active, scheduler.waiting)))
        return min(wanted, most), prompt_logprobs

    def _room(self) -> int:
        """Free blocks that would be left if nothing were lent."""
        pool = self._controller.pool
        return pool.get_num_free_blocks() - max(0, pool.num_gpu_blocks - self._own_blocks)

    def _lend(self) -> None:
        controller = self._controller
        allowance = controller.allowance
        target = min(self.most_blocks, allowance.blocks)
        if target <= allowance.phase_blocks or controller.running_job is not None or not allowance.may_try():
            return
        if self._late_blocks:
            return  # a step must not have to do without what is lent and what is on its way back
        allowance.phase_blocks = target
        if target > controller.pool.num_gpu_blocks:
            controller.begin_own(ResizeRequest(blocks=target, allow_preemption=False), target, fenced=True)

    def _stop_lending(self) -> None:
        """What is not lent yet need not be taken back. Waits for the end where the policy may."""
        controller = self._controller
        job = controller.running_job
        if job is None or not job.own or not job.fenced:
            return
        job.withdrawn = True
        if self.reserve.policy == "reclaim" and not controller.steps_in_flight:
            controller.poll(wait=True)

    def _take_back(self) -> None:
        """Begin to take back, and end it here if no step is in flight and the policy may wait for it.

        Where live blocks need the room, nothing is taken back, since a request would have to be preempted for it:
        most likely the one that needs the reserve. It goes on in smaller steps.
        """
        controller = self._controller
        allowance, pool = controller.allowance, controller.pool
        if self._room() < 0 or controller.running_job is not None or not allowance.may_try():
            return
        allowance.phase_blocks = self._own_blocks
        chunks = (pool.num_gpu_blocks - self._own_blocks) // pool.layout.chunk_blocks
        if chunks <= 0:
            return
        plan = pool.plan_shrink(chunks)
        waits = self.reserve.policy == "reclaim" or not (plan.evicted or plan.moved)
        request = ResizeRequest(blocks=self._own_blocks, allow_preemption=False)
        controller.begin_own(request, self._own_blocks, holds_all_steps=waits)
        if waits and not controller.steps_in_flight:
            controller.poll(wait=True)

    def _refresh(self) -> None:
        """Ask again for memory that was late, but not with every step."""
        if self._late_blocks and self._controller.measure_again():
            self._late()

    def _late(self) -> None:
        self._late_blocks = cdiv(self._controller.late_bytes, self._block_bytes)


def _tokens_of(request: "Request") -> int:
    """Tokens that a request would have in a step without a limit; 1 at least, for one that decodes."""
    return max(1, request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens)


def _wants_prompt_logprobs(request: "Request") -> bool:
    params = request.sampling_params
    if params is None or params.prompt_logprobs is None:
        return False
    return request.num_computed_tokens < request.num_prompt_tokens
