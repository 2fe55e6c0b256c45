# SPDX-License-Identifier: Apache-2.0
"""A thread for work that nobody should wait for."""

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Background:
    """Does jobs one after the other, in the order in which they were submitted.

    The thread begins with the first job and ends when there is none left, so nothing
    has to be closed. It does not keep the process from ending. All methods but those
    that a job calls are called from one thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Reentrant, since collecting garbage can call `submit` at any place.
        self._lock = threading.RLock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._working = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is under way or waits."""
        return self._working

    @property
    def is_current(self) -> bool:
        """Whether it is a job that asks."""
        return threading.current_thread() is self._thread

    def submit(self, job: Callable[[], None]) -> None:
        """Do `job` after those that were submitted before. What it raises is logged."""
        with self._lock:
            self._jobs.append(job)
            if self._working:
                return
            self._working = True
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread to give
            self._work()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all jobs are done and the thread has ended. Returns whether that is so."""
        if self._thread is None:
            return True
        if self.is_current:  # a job cannot wait for itself: it does what is left
            while self._jobs:
                self._do(self._jobs.popleft())
            return True
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._working

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._working = False
                    return
                job = self._jobs.popleft()
            self._do(job)

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        # A job that fails must not end the thread: those behind it would never be done, and somebody may wait for them.
        except Exception:
            logger.exception("Elastic KV cache: a job in the background failed")
