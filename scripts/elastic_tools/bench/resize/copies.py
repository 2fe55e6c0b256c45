"""What copying costs without an engine: rows as long as those of a block, from anywhere to anywhere in a buffer."""

import time
from statistics import median

import torch

BUFFER_BYTES = 1 << 30
ROWS = 2048  # in one copy
REPEATS = 15


def copy_ms_per_mib(row_bytes: int) -> float:
    """Milliseconds for a MiB, at the median."""
    count = BUFFER_BYTES // row_bytes
    buffer = torch.zeros(count, row_bytes, dtype=torch.int8)
    chance = torch.Generator().manual_seed(0)
    times = []
    for _ in range(REPEATS):
        rows = torch.randperm(count, generator=chance)[: 2 * min(ROWS, count // 2)]
        source, goal = rows.chunk(2)
        begin = time.perf_counter()
        buffer[goal] = buffer[source]
        times.append(time.perf_counter() - begin)
    return 1000 * median(times) / (min(ROWS, count // 2) * row_bytes / 2**20)
