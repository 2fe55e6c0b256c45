# SPDX-License-Identifier: Apache-2.0
"""What torch's allocator of device memory holds."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def spare_bytes(device: torch.device) -> int:
    """What torch holds on a device and can give to a step."""
    return spare_of(torch.cuda.memory_snapshot(), device.index or 0) if device.type == "cuda" else 0


def spare_of(segments: Iterable[Mapping[str, Any]], index: int) -> int:
    """The same of the device with that index, from what `torch.cuda.memory_snapshot` tells."""
    return sum(
        segment["total_size"] - segment["active_size"]
        for segment in segments
        # Pools of their own belong to captured graphs, which need them whenever they are replayed.
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0)
    )
