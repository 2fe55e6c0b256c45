# SPDX-License-Identifier: Apache-2.0
"""The prefill reserve at start-up, in the engine core: measured, made room for, and reported."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import round_down
from vllm.v1.elastic_kv import activation_probe
from vllm.v1.elastic_kv.activation import agree, token_counts
from vllm.v1.elastic_kv.layout import ElasticKVLayout
from vllm.v1.elastic_kv.ranks import call
from vllm.v1.elastic_kv.reserve import Reserve, make_reserve

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor import Executor

logger = init_logger(__name__)


def measure_reserve(vllm_config: "VllmConfig", executor: "Executor", block_bytes: int) -> Reserve:
    """Measure what steps take on every rank, and log one line that says what lending it gains.

    Args:
        vllm_config: The engine's configuration, with `elastic_kv_config` set.
        executor: Reaches the workers, which are warm, and have the base of their caches.
        block_bytes: Bytes of a block on the rank where it takes most.

    """
    config, scheduler, speculative = (
        vllm_config.elastic_kv_config,
        vllm_config.scheduler_config,
        vllm_config.speculative_config,
    )
    assert config is not None
    most = scheduler.max_num_batched_tokens
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    decodes = scheduler.max_num_seqs * (1 + drafts)
    if config.memory_budget is not None:
        call(executor, activation_probe.return_at_once).result()
    ranks = call(executor, activation_probe.measure_activations, *token_counts(decodes, most)).result()
    reserve = make_reserve(config.policy, agree(ranks), most, config.small_chunk, decodes)
    logger.info("Elastic KV cache: %s", reserve.describe(block_bytes, vllm_config.cache_config.block_size))
    return reserve


def fit_into_budget(vllm_config: "VllmConfig", executor: "Executor", layout: ElasticKVLayout, block_bytes: int) -> int:
    """Hold every worker process to the memory budget. Returns how many blocks the cache starts with: what the weights,
    the reserve and the margin leave, or what was asked for, if that is there.

    Raises:
        ValueError: The budget is too small for the base, or for what was asked for.

    """
    config, reserve = vllm_config.elastic_kv_config, layout.reserve
    assert config is not None
    assert reserve is not None
    assert layout.first_blocks is not None
    budget, margin = config.size("memory_budget"), config.size("margin") or 0
    assert budget is not None
    resident = layout.first_blocks * block_bytes
    taken = max(call(executor, activation_probe.data_bytes).result()) - resident
    left = budget - taken - reserve.nbytes - margin
    blocks = round_down(max(0, left // block_bytes), layout.chunk_blocks)
    if config.start is not None and layout.start_blocks <= blocks:
        blocks = layout.start_blocks
    elif blocks < layout.base_blocks or config.start is not None:
        raise ValueError(
            f"elastic_kv_config memory_budget ({budget} bytes) is too small: the process has {taken} bytes, the "
            f"prefill reserve takes {reserve.nbytes} and the margin {margin}, which leaves room for {blocks} blocks of "
            f"{block_bytes} bytes."
        )
    call(executor, activation_probe.limit_data, budget).result()
    return min(blocks, layout.capacity_blocks)


def check_own(vllm_config: "VllmConfig") -> None:
    """Refuse a cache that, beside the whole reserve, is too small for the longest request: it would wait for ever.

    Raises:
        ValueError: It is too small.

    """
    concurrency = vllm_config.cache_config.kv_cache_max_concurrency
    if concurrency is not None and concurrency < 1:
        raise ValueError(
            f"Beside its prefill reserve the elastic KV cache has room for {concurrency:.2f} requests of "
            f"--max-model-len {vllm_config.model_config.max_model_len} tokens; lower it or --max-num-batched-tokens."
        )
