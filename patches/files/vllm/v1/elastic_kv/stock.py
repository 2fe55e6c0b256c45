# SPDX-License-Identifier: Apache-2.0
"""Pages that are mapped nowhere: those made ahead of their use, and those on their way back."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from .background import Background
from .page_driver import OutOfMemoryError, PageDriver, PageDriverError
from .places import Places
from .runs import Piece, Run, RunTable

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0  # how long to wait for memory, or for mappings, that are just being given back
_MAKING_S = 60.0  # how long to wait for pages that are being made


class PageStock:
    """Creates and releases the pages of runs, in the background or at once.

    Creating pages means to zero them, and releasing them takes a while as well. In the
    background neither holds up the thread that serves requests.
    """

    def __init__(
        self,
        driver: PageDriver,
        places: Places,
        cut: Callable[[Run, Sequence[Run], frozenset[int]], None],
        ranks_sharing: int,
    ) -> None:
        """Make an empty stock.

        Args:
            driver: Makes the pages.
            places: Where chunks lie.
            cut: Cuts a run, as `RunTable` asks for it.
            ranks_sharing: Stocks that take their pages from the same memory, this one among them.

        """
        self.background = Background("elastic-kv-pages")
        self._driver = driver
        self._places = places
        self._ranks_sharing = ranks_sharing
        self._prepared = RunTable(cut)
        # Guards what both threads change: the handles of runs in the making, and the table of unreleased ones.
        self._lock = threading.RLock()
        self._unreleased: dict[int, int] = {}  # handle -> bytes

    @property
    def prepared(self) -> frozenset[int]:
        """Chunks whose pages are made or being made."""
        return self._prepared.chunks

    @property
    def prepared_bytes(self) -> int:
        """Memory that is held for chunks which are not attached yet."""
        with self._lock:
            return sum(nbytes for run in self._prepared.runs for *_, nbytes in self._places.pieces(run))

    @property
    def promised_bytes(self) -> int:
        """Memory that is still to be taken for pages which are being made."""
        with self._lock:
            return sum(
                nbytes
                for run in self._prepared.runs
                if not run.made.is_set()
                for _, nbytes in self._places.of(run)[len(run.pieces) :]
            )

    @property
    def unreleased_bytes(self) -> int:
        """Memory that is not needed any more and not given back yet."""
        with self._lock:
            return sum(self._unreleased.values())

    @property
    def num_prepared_runs(self) -> int:
        """Runs of prepared chunks."""
        return len(self._prepared.runs)

    @property
    def num_unreleased(self) -> int:
        """Handles that are not needed any more and hold memory."""
        return len(self._unreleased)

    @property
    def num_handles(self) -> int:
        """Handles that hold memory."""
        with self._lock:
            return sum(len(run.handles) for run in self._prepared.runs) + len(self._unreleased)

    def available_bytes(self) -> int:
        """Memory that the driver can get and that is not promised to pages in the making."""
        return self._driver.available_bytes() // self._ranks_sharing - self.promised_bytes

    def check(self, nbytes: int, available: int) -> None:
        # A device that hands out more than it has may kill the process later instead of failing now.
        if nbytes > available:
            hint = f"{available} bytes are available to each rank"
            raise OutOfMemoryError("attach", "out of memory", nbytes, self._driver.device, hint)

    def demand(self, nbytes: int) -> None:
        """Make sure that so much memory can be had. Waits for pages on their way back: they are not lost, only late.

        Raises:
            OutOfMemoryError: There is less.

        """
        if not nbytes:
            return
        available = self.available_bytes()
        if nbytes > available and self.background.busy:
            self.await_releases()
            available = self.available_bytes()
        self.check(nbytes, available)

    def make(self, run: Run) -> None:
        """Create the pages of `run` at once, all or none."""
        try:
            self._create(run)
        except BaseException:  # whatever it is, the pages that were made go back; it is raised again
            self.give_back([run])
            raise
        run.made.set()

    def prepare(self, runs: Iterable[Run]) -> None:
        """Start to create the pages of `runs`. Those that are on their way back go first, and make room."""
        for run in runs:
            self._prepared.add(run)
            self.background.submit(partial(self._make_prepared, run))

    def drop_failed(self) -> None:
        """Forget the chunks whose pages could not be made."""
        for run in self._prepared.runs:
            if run.error is not None:
                self._prepared.remove(run)

    def give_back_parts(self, chunks: Iterable[int]) -> None:
        """Give back the prepared runs of which `chunks` are only a part. For handles that cannot be cut."""
        chunks = set(chunks)
        parts = [run for run in self._prepared.touched(chunks) if not chunks.issuperset(run.chunks)]
        for run in parts:
            self._prepared.remove(run)
        self.give_back(parts)

    def wait(self, chunks: Iterable[int]) -> list[Run]:
        """Wait until the pages of `chunks`, all of them prepared, are made.

        Returns:
            The runs that are exactly `chunks`. They stay in the stock.

        Raises:
            OutOfMemoryError, PageDriverError: Some could not be made. They are not prepared any more.
                Or it takes too long: then they may still come to be prepared.

        """
        chunks = list(chunks)
        runs = self._prepared.touched(chunks)
        for run in runs:
            if not run.made.wait(_MAKING_S):
                hint = f"pages are still being made after {_MAKING_S:.0f} s"
                raise PageDriverError("create", "timed out", self._places.bytes_of([run]), self._driver.device, hint)
        error = next((run.error for run in runs if run.error is not None), None)
        if error is not None:
            self.drop_failed()
            raise error
        return self._prepared.take(chunks)

    def remove(self, run: Run) -> None:
        """Let a run go that is mapped now."""
        self._prepared.remove(run)

    def discard(self) -> None:
        """Give all prepared pages back, also those that are only being made."""
        runs = self._prepared.runs
        for run in runs:
            self._prepared.remove(run)
        self.give_back(runs)

    def give_back(self, runs: Iterable[Run]) -> None:
        """Release the pages of runs that are mapped nowhere, in the background."""
        for run in runs:
            self._reject(run)
        self.retry()

    def retry(self) -> None:
        """Release what is not needed any more, also what could not be released before."""
        if self._unreleased:
            self.background.submit(self._release)

    def release(self, handle: int, nbytes: int) -> None:
        """Release an unmapped handle at once. Where that fails, it is tried again later."""
        if not self._try_release(handle):
            with self._lock:
                self._unreleased[handle] = nbytes

    def await_releases(self) -> None:
        """Wait for what is on its way back, or give it back at once where it is the background that asks."""
        if self.background.is_current:
            self._release()
        else:
            self.background.settle(PATIENCE_S)

    def _create(self, run: Run) -> None:
        for address, nbytes in self._places.of(run):
            if run.unwanted:
                return
            handle = self._driver.create(nbytes, address)
            with self._lock:
                if run.unwanted:
                    self._unreleased[handle] = nbytes
                else:
                    run.pieces.append([Piece(handle, run.count)])

    def _make_prepared(self, run: Run) -> None:
        try:
            self.check(self._places.bytes_of([run]), self._driver.available_bytes() // self._ranks_sharing)
            self._create(run)
        except Exception as error:  # raised to whoever wants the run; nobody waits for this thread's own
            self._reject(run)
            run.error = error
        finally:
            run.made.set()
        if run.unwanted:
            self._release()

    def _reject(self, run: Run) -> None:
        with self._lock:
            run.unwanted = True
            self._unreleased.update({handle: nbytes for handle, _, nbytes in self._places.pieces(run)})
            run.pieces.clear()

    def _release(self) -> None:
        with self._lock:
            handles = list(self._unreleased)
        for handle in handles:
            if self._try_release(handle):
                with self._lock:
                    del self._unreleased[handle]

    def _try_release(self, handle: int) -> bool:
        try:
            self._driver.release(handle)
        except PageDriverError as error:
            logger.warning("Elastic KV cache: memory could not be given back, to be tried again: %s", error)
            return False
        return True
