"""What copying costs without an engine: rows as long as those of a block, from anywhere to anywhere in a buffer."""

import time
from statistics import median

import numpy as np

BUFFER_BYTES = 1 << 30
ROWS = 2048  # in one copy
REPEATS = 15


def copy_ms_per_mib(row_bytes: int) -> float:
    """Milliseconds for a MiB, at the median."""
    # Ones and no zeros: pages that were never written to would cost a fault each.
    buffer = np.ones((BUFFER_BYTES // row_bytes, row_bytes), dtype=np.uint8)
    chance = np.random.default_rng(0)
    rows = min(ROWS, len(buffer) // 2)
    times = []
    for _ in range(REPEATS):
        picked = chance.permutation(len(buffer))[: 2 * rows].tolist()
        begin = time.perf_counter()
        for source, goal in zip(picked[:rows], picked[rows:], strict=True):
            buffer[goal] = buffer[source]
        times.append(time.perf_counter() - begin)
    return 1000 * median(times) / (rows * row_bytes / 2**20)
