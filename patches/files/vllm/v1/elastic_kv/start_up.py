# SPDX-License-Identifier: Apache-2.0
"""Sizes an elastic cache at start-up, in the engine core."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv, round_down, round_up
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_configs,
    update_kv_cache_capacity,
)
from vllm.v1.elastic_kv import worker_side
from vllm.v1.elastic_kv.call_costs import PUBLISHED, TYPICAL_RESIZE_BYTES, CallCosts, best_run_bytes
from vllm.v1.elastic_kv.layout import ElasticKVLayout, chunk_blocks_of, segments_of
from vllm.v1.elastic_kv.ranks import call
from vllm.v1.elastic_kv.reserve_start import check_own, fit_into_budget, measure_reserve
from vllm.v1.kv_cache_interface import CrossAttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.elastic_kv import ElasticKVConfig
    from vllm.v1.elastic_kv.reserve import Reserve
    from vllm.v1.elastic_kv.worker_side import ProbeReport
    from vllm.v1.executor import Executor
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = init_logger(__name__)


def make_elastic(
    vllm_config: "VllmConfig",
    executor: "Executor",
    kv_cache_specs: Sequence[dict[str, "KVCacheSpec"]],
    available_memory: Sequence[int],
) -> list["KVCacheConfig"]:
    """Lay the cache out for its capacity, with as many blocks resident as upstream would have.

    A request of the maximum length has to fit into the capacity; the cache grows when one comes.

    Args:
        vllm_config: The engine's configuration, with `elastic_kv_config` set.
        executor: Reaches the workers, which have no cache yet.
        kv_cache_specs: The layers that have a cache, by name, one dict per rank.
        available_memory: Bytes on each rank that upstream would give to the cache.

    Returns:
        One config per rank: `num_blocks` are the resident blocks, `elastic_kv`
        tells the rest, and the tensors are placed for the capacity.

    Raises:
        ValueError: The model or a size cannot be served; the message says why.

    """
    config = vllm_config.elastic_kv_config
    assert config is not None
    probes = call(executor, worker_side.probe, config.driver).result()
    memory = _capacity_memory(config, probes, available_memory)
    kv_cache_configs = get_kv_cache_configs(vllm_config, list(kv_cache_specs), list(memory))
    for kv_cache_config in kv_cache_configs:
        _refuse_models(kv_cache_config)
    block_bytes = [_bytes_per_block(kv_cache_config) for kv_cache_config in kv_cache_configs]
    layout = _layout(config, kv_cache_configs, block_bytes, probes, available_memory)
    logger.info(
        "Elastic KV cache: %d of up to %d blocks resident (base %d, blocks per chunk %d, bytes per block %d, "
        "page driver %s, policy %s)",
        layout.start_blocks,
        layout.capacity_blocks,
        layout.base_blocks,
        layout.chunk_blocks,
        max(block_bytes),
        layout.driver,
        config.policy,
    )
    elastic = []
    for kv_cache_config, nbytes, probe in zip(kv_cache_configs, block_bytes, probes, strict=True):
        at_capacity = get_kv_cache_config_from_groups(
            vllm_config, kv_cache_config.kv_cache_groups, nbytes * layout.capacity_blocks
        )
        assert at_capacity.num_blocks == layout.capacity_blocks
        elastic.append(
            replace(
                kv_cache_config,
                num_blocks=layout.start_blocks,
                kv_cache_tensors=at_capacity.kv_cache_tensors,
                elastic_kv=replace(layout, available_bytes=probe["available_bytes"] + probe["spare_bytes"]),
            )
        )
    return elastic


def commit_start(
    vllm_config: "VllmConfig",
    executor: "Executor",
    kv_cache_configs: Sequence["KVCacheConfig"],
    scheduler_kv_cache_config: "KVCacheConfig",
) -> None:
    """Attach the rest of what the engine starts with, now that the workers are warm.

    Until here only the base is resident, where the driver is CUDA's. What warming up and
    capturing graphs took is measured, not guessed, and `start` is lessened by it and by the
    margin. What torch holds and nobody uses is not taken: it is for what a step computes, such as the
    sampler's buffers, which upstream has left room for already. A `start` that was asked for, or
    `--kv-cache-memory-bytes`, stays as it is.

    Args:
        vllm_config: The engine's configuration.
        executor: Reaches the workers, which have their caches.
        kv_cache_configs: One per rank, as `make_elastic` gave them.
        scheduler_kv_cache_config: What the scheduler is made with. Its sizes are corrected.

    Raises:
        ValueError: Too little memory is left for the base, or for what was asked for.

    """
    layout, config = scheduler_kv_cache_config.elastic_kv, vllm_config.elastic_kv_config
    assert layout is not None
    assert config is not None
    block_bytes = max(_bytes_per_capacity_block(one, layout) for one in kv_cache_configs)
    if config.keeps_reserve:
        layout.reserve = measure_reserve(vllm_config, executor, block_bytes)
    if layout.first_blocks is not None and layout.start_blocks > layout.first_blocks:
        _attach_start(vllm_config, executor, kv_cache_configs, scheduler_kv_cache_config, block_bytes)
    if config.keeps_reserve:
        check_own(vllm_config)


def _attach_start(
    vllm_config: "VllmConfig",
    executor: "Executor",
    kv_cache_configs: Sequence["KVCacheConfig"],
    scheduler_kv_cache_config: "KVCacheConfig",
    block_bytes: int,
) -> None:
    layout, config = scheduler_kv_cache_config.elastic_kv, vllm_config.elastic_kv_config
    assert layout is not None
    assert layout.first_blocks is not None
    assert config is not None
    if config.memory_budget is not None:
        layout.start_blocks = fit_into_budget(vllm_config, executor, layout, block_bytes)
    elif vllm_config.cache_config.kv_cache_memory_bytes is None:
        probes = call(executor, worker_side.probe, layout.driver).result()
        blocks = min(
            _start_after_warm_up(kv_cache_config, probe, config.size("margin") or 0, layout.reserve)
            for kv_cache_config, probe in zip(kv_cache_configs, probes, strict=True)
        )
        if blocks < layout.base_blocks:
            raise ValueError(
                f"Too little memory is left after warming up for elastic_kv_config base ({layout.base_blocks} blocks) "
                f"and margin ({config.size('margin')} bytes): room for {blocks} blocks."
            )
        layout.start_blocks = blocks
    chunks = range(layout.first_blocks // layout.chunk_blocks, layout.start_blocks // layout.chunk_blocks)
    size = (layout.run_blocks or layout.start_blocks) // layout.chunk_blocks
    for first in range(0, len(chunks), size):
        reports = call(executor, worker_side.attach, chunks[first : first + size]).result()
        if failed := [f"rank {report['rank']}: {report['error']}" for report in reports if report["error"]]:
            raise ValueError(
                f"The elastic KV cache cannot begin with {layout.start_blocks} blocks: {'; '.join(failed)}."
            )
    scheduler_kv_cache_config.num_blocks = layout.start_blocks
    vllm_config.cache_config.num_gpu_blocks = layout.start_blocks
    update_kv_cache_capacity(vllm_config, scheduler_kv_cache_config)
    logger.info("Elastic KV cache: %d blocks resident after warming up", layout.start_blocks)


def _start_after_warm_up(
    kv_cache_config: "KVCacheConfig", probe: "ProbeReport", margin: int, reserve: "Reserve | None" = None
) -> int:
    """Blocks that a rank can start with, in whole chunks. A reserve that was measured is left free beside them."""
    layout = kv_cache_config.elastic_kv
    assert layout is not None
    assert layout.first_blocks is not None
    nbytes = _bytes_per_capacity_block(kv_cache_config, layout)
    resident = layout.first_blocks * nbytes
    available = probe["available_bytes"]
    taken = max(0, layout.available_bytes - available - probe["spare_bytes"] - resident)
    planned = layout.start_blocks * nbytes - taken - margin
    free = available + resident - margin - (0 if reserve is None else reserve.nbytes)
    return round_down(max(0, min(planned, free)) // nbytes, layout.chunk_blocks)


def _bytes_per_capacity_block(kv_cache_config: "KVCacheConfig", layout: ElasticKVLayout) -> int:
    return kv_cache_config.kv_cache_tensors[0].size // layout.capacity_blocks


def _capacity_memory(
    config: "ElasticKVConfig", probes: Sequence["ProbeReport"], available_memory: Sequence[int]
) -> list[int]:
    """Bytes on each rank that the cache may grow to."""
    capacity = config.size("capacity")
    sharing = _ranks_sharing(probes)
    if capacity is None:
        # What the device could hold now: the cache is not allocated yet.
        most = config.size("memory_budget") or sys.maxsize
        return [
            max(min(probe["available_bytes"] // ranks, most), start)
            for probe, ranks, start in zip(probes, sharing, available_memory, strict=True)
        ]
    for rank, (probe, ranks) in enumerate(zip(probes, sharing, strict=True)):
        if capacity * ranks > probe["total_bytes"]:
            raise ValueError(
                f"elastic_kv_config capacity ({capacity} bytes on each of {ranks} ranks that share the device) is "
                f"more than the device of rank {rank} has ({probe['total_bytes']} bytes)."
            )
    if capacity < min(available_memory):
        raise ValueError(
            f"elastic_kv_config capacity ({capacity} bytes) is less than the cache starts with "
            f"({min(available_memory)} bytes); give a larger capacity, or a smaller start."
        )
    return [capacity] * len(probes)


def _ranks_sharing(probes: Sequence["ProbeReport"]) -> list[int]:
    """For each rank, how many take their pages from the same memory."""
    ranks_on = Counter(probe["node"] for probe in probes)
    return [ranks_on[probe["node"]] if probe["node"] else 1 for probe in probes]


def _layout(
    config: "ElasticKVConfig",
    kv_cache_configs: Sequence["KVCacheConfig"],
    block_bytes: Sequence[int],
    probes: Sequence["ProbeReport"],
    available_memory: Sequence[int],
) -> ElasticKVLayout:
    largest = max(block_bytes)
    capacity_blocks = kv_cache_configs[0].num_blocks
    start = min(memory // nbytes for memory, nbytes in zip(available_memory, block_bytes, strict=True))
    chunk = _chunk_blocks(kv_cache_configs, probes, capacity_blocks)
    rounded = round_down(capacity_blocks, chunk) if config.capacity else round_up(capacity_blocks, chunk)
    if not rounded:
        raise ValueError(
            f"elastic_kv_config capacity ({config.capacity} bytes, {capacity_blocks} blocks of {largest} bytes) is "
            f"less than one chunk of {chunk} blocks."
        )
    base_blocks = round_up(max(cdiv(config.size("base") or 1, largest), 1), chunk)
    start_blocks = min(round_up(max(start, 1), chunk), rounded)
    if base_blocks > start_blocks:
        raise ValueError(
            f"elastic_kv_config base ({config.base} bytes, {base_blocks} blocks of {largest} bytes in chunks of "
            f"{chunk}) is more than the cache starts with ({start_blocks} blocks)."
        )
    layout = ElasticKVLayout(
        base_blocks=base_blocks,
        start_blocks=start_blocks,
        capacity_blocks=rounded,
        chunk_blocks=chunk,
        driver=probes[0]["driver"],
        ranks_sharing=max(_ranks_sharing(probes)),
    )
    if config.memory_budget is not None:
        layout.first_blocks = base_blocks
    if layout.driver == "cuda":
        segments = segments_of(kv_cache_configs[0].kv_cache_tensors, kv_cache_configs[0].num_blocks)
        costs = probes[0]["costs"] or PUBLISHED
        run_bytes = _run_bytes(config, [segment.stride for segment in segments], costs)
        layout.first_blocks = base_blocks
        layout.run_blocks = max(round_down(run_bytes // largest, chunk), chunk)
        logger.info("Elastic KV cache: handles for up to %d blocks; calls cost: %s", layout.run_blocks, costs.source)
        layout.keep_bytes = config.size("keep") or 0
    return layout


def _run_bytes(config: "ElasticKVConfig", strides: Sequence[int], costs: CallCosts) -> int:
    """Bytes of a run of handles: as configured, or by the cost model. A cut copies handle by handle, so that the
    longest one of a run has to fit into the margin.

    Args:
        config: The user's.
        strides: Bytes of a block in each segment.
        costs: Of the driver's calls.

    """
    longest = (config.size("margin") or 0) * sum(strides) // max(strides)
    return config.size("run") or best_run_bytes(costs, len(strides), TYPICAL_RESIZE_BYTES, longest)


def _chunk_blocks(
    kv_cache_configs: Sequence["KVCacheConfig"], probes: Sequence["ProbeReport"], capacity_blocks: int
) -> int:
    """The chunk that suits every rank."""
    sizes = []
    for kv_cache_config, probe in zip(kv_cache_configs, probes, strict=True):
        try:
            segments = segments_of(kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks)
        except ValueError as error:
            raise ValueError(f"The elastic KV cache cannot map this model's KV cache layout: {error}.") from error
        strides = [segment.stride for segment in segments]
        sizes.append(chunk_blocks_of(strides, probe["granule"], capacity_blocks, probe["max_mappings"]))
    if len(set(sizes)) != 1:
        raise ValueError(f"The ranks need chunks of different sizes ({sizes} blocks); an elastic cache needs one.")
    return sizes[0]


def _bytes_per_block(kv_cache_config: "KVCacheConfig") -> int:
    return kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks


def _refuse_models(kv_cache_config: "KVCacheConfig") -> None:
    if not kv_cache_config.kv_cache_tensors:
        raise ValueError("The elastic KV cache needs a model that has a KV cache; this one has none.")
    refused = {
        "state-space (Mamba) layers": kv_cache_config.has_mamba_layers,
        "KV caches of different precision in one model": kv_cache_config.has_mixed_precision_kv_cache,
        "encoder-decoder models (cross-attention layers)": any(
            isinstance(group.kv_cache_spec, CrossAttentionSpec) for group in kv_cache_config.kv_cache_groups
        ),
        "a KV cache that is kept on the host": any(group.host_resident for group in kv_cache_config.kv_cache_groups),
    }
    for reason, present in refused.items():
        if present:
            raise ValueError(f"The elastic KV cache does not support {reason} yet.")
