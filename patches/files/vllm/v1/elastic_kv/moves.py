# SPDX-License-Identifier: Apache-2.0
"""Moving live blocks on one rank: their contents, and the block tables that name them."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.elastic_kv.page_driver import torch_errors

if TYPE_CHECKING:
    from vllm.v1.elastic_kv.arena import KVArena


def copy_blocks(arena: "KVArena", sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copy whole blocks, every byte of them in every segment: all layers, all cache
    groups, and scales that lie inside the blocks.

    Args:
        arena: The rank's memory.
        sources: Block ids to copy from.
        destinations: Block ids to copy to, none of them among the sources.

    Raises:
        PageDriverError: It could not be done. No source has changed.

    """
    arena.driver.synchronize()
    buffer = arena.tensor()
    capacity = arena.capacity_chunks * arena.chunk_blocks
    nbytes = len(sources) * sum(segment.stride for segment in arena.segments)
    with torch_errors("copy_", nbytes, arena.driver.device):
        if buffer.is_cuda:
            # One launch, instead of one for each block and segment.
            from vllm.v1.elastic_kv.kernels.move import move_blocks

            move_blocks(buffer, arena.segments, sources, destinations, capacity)
        else:
            for segment in arena.segments:
                rows = torch.as_strided(buffer, (capacity, segment.stride), (segment.stride, 1), segment.offset)
                for source, destination in zip(sources, destinations, strict=True):
                    rows[destination].copy_(rows[source])
    arena.driver.synchronize()


def check_runner(model_runner: Any) -> None:
    """Make sure that `repoint` knows where the model runner keeps its block tables, and that nothing else depends
    on how many blocks there are at the start.

    Raises:
        TypeError: It is not a runner that the elastic cache was made for.
        ValueError: Its attention backend has tables of the size that the cache has at the start.

    """
    if _is_v2(model_runner):
        known = all(table.gpu.dtype == torch.int32 for table in model_runner.block_tables.block_tables)
    else:
        tables = getattr(getattr(model_runner, "input_batch", None), "block_table", None)
        known = (
            tables is not None
            and isinstance(model_runner.requests, dict)
            and all(table.block_table.np.dtype == np.int32 for table in tables.block_tables)
        )
    if not known:
        raise TypeError(
            f"The elastic KV cache does not know the block tables of {type(model_runner).__module__}."
            f"{type(model_runner).__qualname__}."
        )
    for group in chain.from_iterable(model_runner.attn_groups):
        if (backend := group.backend.get_name()) == "FLEX_ATTENTION":
            raise ValueError(
                f"The elastic KV cache does not work with the attention backend {backend}, whose tables have room for "
                "the blocks of the start alone."
            )


def repoint(model_runner: Any, moved: dict[int, int], num_blocks: int) -> None:
    """Replace block ids in the model runner's block tables.

    Called between steps, with nothing submitted that still reads the tables. Rows of
    requests that have ended may name any block; nothing reads them.

    Args:
        model_runner: Of either version.
        moved: New block id by old one. No new id is also an old one.
        num_blocks: Above every block id.

    Raises:
        PageDriverError: The device has too little memory for it. No table has changed.

    """
    new_ids = np.arange(num_blocks, dtype=np.int32)
    new_ids[list(moved)] = list(moved.values())
    if _is_v2(model_runner):
        # [num_blocks] on the device of the tables, which are [max_num_reqs, max_num_blocks].
        tables = [table.gpu for table in model_runner.block_tables.block_tables]
        device = tables[0].device
        with torch_errors("repoint", 2 * sum(table.nbytes for table in tables), str(device)):
            lookup = torch.from_numpy(new_ids).to(device)
            # All that takes memory comes first.
            changed = [lookup[table] for table in tables]
            for table, ids in zip(tables, changed, strict=True):
                table.copy_(ids)
        return
    for request in model_runner.requests.values():
        for ids in request.block_ids:
            ids[:] = [moved.get(block_id, block_id) for block_id in ids]
    batch = model_runner.input_batch
    for group in batch.block_table.block_tables:
        rows = group.block_table.np[: batch.num_reqs]
        rows[:] = new_ids[rows]


def _is_v2(model_runner: Any) -> bool:
    # Version 2 keeps its tables on the device, and has no input batch of its own.
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return isinstance(model_runner, GPUModelRunner)
