# SPDX-License-Identifier: Apache-2.0
"""Which cores a CPU rank on Ray computes on. Other ranks get theirs from the executor that forks them."""

import os
from collections.abc import Sequence

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import parse_id_list

logger = init_logger(__name__)


def bind_threads(rank: int, local_rank: int, local_world_size: int) -> None:
    """Keep the threads of this rank to its own cores. Without that every rank has a thread on every core, and
    ranks that wait for each other wait for the scheduler as well. Called before anything is computed.

    Args:
        rank: Of all ranks.
        local_rank: Of those of this engine on this node.
        local_world_size: How many those are.

    Raises:
        ValueError: `VLLM_CPU_OMP_THREADS_BIND` does not tell the cores of this rank.

    """
    cpus = cpus_of_rank(
        envs.VLLM_CPU_OMP_THREADS_BIND, rank, local_rank, local_world_size, sorted(os.sched_getaffinity(0))
    )
    if cpus is None:
        return
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))
    logger.info("Rank %d computes on cores %s", rank, cpus)


def cpus_of_rank(
    setting: str, rank: int, local_rank: int, local_world_size: int, allowed: Sequence[int]
) -> list[int] | None:
    """The cores of a rank, or None where it is not to be bound.

    Args:
        setting: Of `VLLM_CPU_OMP_THREADS_BIND`. `auto` shares the node's cores out evenly; else there
            is a list for each rank, of the node or of the engine.
        rank: Of all ranks.
        local_rank: Of those of this engine on this node.
        local_world_size: How many those are.
        allowed: The cores of the node that the process may use.

    Raises:
        ValueError: There is no list for the rank, or it names cores that the process may not use.

    """
    if setting == "nobind":
        return None
    if setting == "auto":
        share = max(1, len(allowed) // local_world_size)
        first = local_rank * share % len(allowed)
        return list(allowed[first : first + share])
    lists = setting.split("|")
    number = local_rank if len(lists) == local_world_size else rank
    cpus = parse_id_list(lists[number]) if number < len(lists) else []
    if not cpus or not set(cpus) <= set(allowed):
        raise ValueError(
            f"VLLM_CPU_OMP_THREADS_BIND={setting!r} gives rank {rank} the cores {cpus}; on its node there are "
            f"{list(allowed)}. It takes one list for each rank, as in '0-3|4-7', or 'auto' or 'nobind'."
        )
    return cpus
