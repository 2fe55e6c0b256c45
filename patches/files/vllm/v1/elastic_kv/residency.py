# SPDX-License-Identifier: Apache-2.0
"""What a rank's kernels are told about residency, and what they tell: which blocks have memory, and which requests
named one that has none (a soft page fault).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from vllm.v1.elastic_kv.runs import runs_of
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.elastic_kv.layout import ElasticKVLayout

# By the address of the cache's buffer, so that a layer finds what belongs to its views of it.
_BY_ADDRESS: "WeakValueDictionary[int, Residency]" = WeakValueDictionary()


class Residency:
    """Two tensors on the device of a rank, at addresses that never change.

    A block is marked after it has memory and before it loses it, so what the map says is
    never more than what is there.
    """

    def __init__(self, layout: "ElasticKVLayout", buffer: torch.Tensor) -> None:
        self._chunk_blocks = layout.chunk_blocks
        self.resident = torch.zeros(layout.capacity_blocks, dtype=torch.uint8, device=buffer.device)
        self.faults: torch.Tensor | None = None  # int32 [rows of a batch], once a backend that counts asks for it
        _BY_ADDRESS[buffer.untyped_storage().data_ptr()] = self

    def mark(self, chunks: Iterable[int], resident: bool) -> None:
        """Say that chunks have memory, or are about to lose it. Takes no memory of the device for that."""
        by_chunk = self.resident.view(-1, self._chunk_blocks)
        for run in runs_of(chunks):
            by_chunk[run.first : run.end].fill_(int(resident))

    def count(self, rows: int) -> torch.Tensor:
        """The counters, int32, for batches of up to `rows` requests."""
        if self.faults is None or self.faults.shape[0] < rows:
            self.faults = torch.zeros(rows, dtype=torch.int32, device=self.resident.device)
        return self.faults


def residency_of(cache: torch.Tensor) -> Residency | None:
    """What belongs to the buffer that `cache` is a view of; None where it is not elastic."""
    return _BY_ADDRESS.get(cache.untyped_storage().data_ptr())


class FaultReport(AsyncModelRunnerOutput):
    """The output of a step, to which the counters are added once they have arrived on the host."""

    def __init__(self, output: ModelRunnerOutput | AsyncModelRunnerOutput, taken: torch.Tensor) -> None:
        self._output = output
        self._event: torch.cuda.Event | None = None
        if taken.is_cuda:
            self._faults = torch.empty(taken.shape, dtype=taken.dtype, pin_memory=True)
            self._faults.copy_(taken, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._faults = taken

    def get_output(self) -> ModelRunnerOutput:
        output = self._output
        if isinstance(output, AsyncModelRunnerOutput):
            output = output.get_output()
        if self._event is not None:
            self._event.synchronize()
        counts = self._faults[: len(output.req_ids)].tolist()
        output.kv_faults = {req_id: n for req_id, n in zip(output.req_ids, counts, strict=True) if n}
        return output


def report_faults(
    residency: Residency | None,
    output: ModelRunnerOutput | AsyncModelRunnerOutput | None,
    ranks: "GroupCoordinator",
) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
    """Add to a step's output which of its requests had soft page faults, and how many on the rank that had most: only
    one rank's output is read. To be called on all of `ranks`, after each step.
    """
    if residency is None or residency.faults is None:
        return output
    # On the stream of the kernels: behind those that were launched so far, and so that the next step counts from zero.
    taken = residency.faults.clone()
    residency.faults.zero_()
    if ranks.world_size > 1:
        taken = _most(taken, ranks)
    if output is None:
        return None
    report = FaultReport(output, taken)
    return report if isinstance(output, AsyncModelRunnerOutput) else report.get_output()


def _most(counts: torch.Tensor, ranks: "GroupCoordinator") -> torch.Tensor:
    """The largest of each count over all ranks. By the communicator that steps use, where there is one: another would
    take memory of the device that was not there when the cache was sized.
    """
    nccl = getattr(ranks.device_communicator, "pynccl_comm", None)
    if nccl is not None and not nccl.disabled:
        most: torch.Tensor = nccl.all_reduce(counts, op=dist.ReduceOp.MAX)
        return most
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=ranks.device_group)
    return counts
