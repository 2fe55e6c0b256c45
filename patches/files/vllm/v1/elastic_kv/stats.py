# SPDX-License-Identifier: Apache-2.0
"""What the engine core tells the front end about an elastic cache."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ElasticKVStats:
    """Sizes now, in blocks, bytes per rank, tokens and requests of the maximum length,
    as upstream's `CacheConfig` has them, and the resizes that ended since
    the last time, each as `ResizeResult.to_dict` gives it, with its `direction`, and
    `failed` as its `outcome` where a rank failed. Also since the last time: block ids without
    memory that the attention of requests met. `reserve` is what `Lender.state` tells, where there is a reserve,
    but what it counts is since the last time as well.
    """

    resident_blocks: int
    capacity_blocks: int
    base_blocks: int
    block_bytes: int
    reported_bytes: int
    size_tokens: int | None
    max_concurrency: float | None
    resizes: list[dict[str, Any]] = field(default_factory=list)
    soft_page_faults: int = 0
    reserve: dict[str, Any] | None = None
