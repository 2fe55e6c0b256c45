"""Work for all cores."""

import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import Pool
from typing import TypeVar

from tqdm import tqdm

Job = TypeVar("Job")
Answer = TypeVar("Answer")


def spread(
    one: Callable[[Job], Answer], jobs: Sequence[Job], name: str, workers: int | None = None, together: int = 1
) -> list[Answer]:
    """``one`` of every job, in the order of the jobs whatever the number of processes, with a progress bar.

    ``workers`` processes (default: one for each core), which take ``together`` jobs at a time.
    """
    count = min(workers or os.cpu_count() or 1, len(jobs))
    # Ctrl-C reaches every process of a terminal. Only this one is to answer it, which ends the others.
    with Pool(count, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        return list(tqdm(pool.imap(one, jobs, chunksize=together), total=len(jobs), desc=name, leave=False))
