# SPDX-License-Identifier: Apache-2.0
"""Makes physical pages and gives them back, beside the thread that maps them.

Both take time in proportion to the bytes: new pages are zeroed, old ones are freed one by
one. Mapping does not. So a step has to wait for the mapping only.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from .page_driver import PageDriver, PageDriverError

logger = logging.getLogger(__name__)


class PageMaker:
    """One thread per arena. Its methods are called from the arena's own thread."""

    def __init__(self, driver: PageDriver) -> None:
        self._driver = driver
        self._thread: ThreadPoolExecutor | None = None  # made when there is work
        self._work: set[Future] = set()
        # Bytes by handle, of those that are mapped nowhere and not given back. Only the thread takes entries out.
        self._unreleased: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether work is under way or queued."""
        self._work = {work for work in self._work if not work.done()}
        return bool(self._work)

    @property
    def unreleased(self) -> dict[int, int]:
        """Bytes by handle of what waits to be given back, those among them that could not be."""
        return dict(self._unreleased)

    def create(self, sizes: Sequence[int]) -> "Future[list[int]]":
        """Begin to make one handle of each size, all or none."""
        return self._submit(self._create, sizes)

    def release(self, sizes: dict[int, int]) -> None:
        """Begin to give unmapped handles back, and those that could not be given back earlier.

        Args:
            sizes: Bytes by handle.

        """
        self._unreleased |= sizes
        if self._unreleased:
            self._submit(self._release)

    def settle(self, timeout_s: float) -> bool:
        """Wait for all work to end. Returns whether it did."""
        return not wait(self._work, timeout_s).not_done

    def close(self) -> None:
        """Wait for all work to end, and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic-kv-pages")
        work = self._thread.submit(function, *arguments)
        self._work.add(work)
        return work

    def _create(self, sizes: Sequence[int]) -> list[int]:
        handles: dict[int, int] = {}
        try:
            for nbytes in sizes:
                handles[self._driver.create(nbytes)] = nbytes
        except PageDriverError:
            self._unreleased |= handles
            self._release()
            raise
        return list(handles)

    def _release(self) -> None:
        for handle in list(self._unreleased):
            try:
                self._driver.release(handle)
            except PageDriverError as error:
                logger.warning("Elastic KV cache: memory could not be given back, to be tried again: %s", error)
            else:
                del self._unreleased[handle]
