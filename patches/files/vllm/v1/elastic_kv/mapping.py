# SPDX-License-Identifier: Apache-2.0
"""Which chunks have pages, and how they come to have and to lose them."""

import sys
from collections.abc import Iterable, Sequence

from .cut import Cutter
from .page_driver import PageDriver
from .places import Places
from .runs import Run, RunTable, runs_of
from .stock import PageStock
from .undo import Undo


class Mapping:
    """The chunks that are attached, those that are held, and a stock of pages.

    Neither waits for anybody nor checks what it is asked for: that is the arena's part.
    """

    def __init__(
        self, driver: PageDriver, places: Places, scratch: int, ranks_sharing: int = 1, run_chunks: int = sys.maxsize
    ) -> None:
        """Begin with nothing.

        Args:
            driver: Maps the pages.
            places: Where chunks lie.
            scratch: Reserved addresses for the longest handle, for a driver whose handles cannot be cut.
            ranks_sharing: How many take their pages from the same memory.
            run_chunks: Chunks that share handles, at most.

        """
        self.attached = RunTable(self._cut)
        self.held: list[Run] = []  # detached, and not given back until every rank has done so
        self.stock = PageStock(driver, places, self._cut, ranks_sharing)
        self._driver = driver
        self._places = places
        self._cutter = Cutter(driver, places, self.stock, scratch)
        self._run_chunks = run_chunks
        # Handles that are mapped nowhere are mappings of the process too, beside the pieces of the range.
        # An eighth as many leaves the engine some of the quarter that the host driver does not use.
        limit = driver.max_mappings
        self._max_loose_runs = sys.maxsize if limit is None else max(1, limit // 8 // len(places.segments))

    def missing(self, chunks: Iterable[int]) -> list[Run]:
        """Runs, without handles, of those `chunks` that have no prepared pages."""
        prepared = self.stock.prepared
        return runs_of((chunk for chunk in chunks if chunk not in prepared), self._run_chunks)

    def room(self) -> int:
        """How many more runs can be mapped nowhere."""
        loose = self.stock.num_prepared_runs + len(self.held) + self.stock.num_unreleased // len(self._places.segments)
        return self._max_loose_runs - loose

    def give(self, chunks: Sequence[int]) -> None:
        """Attach chunks that are not, all or none."""
        if not self._driver.divisible:
            self.stock.give_back_parts(chunks)
        missing = self.missing(chunks)
        prepared = self.stock.prepared
        ready = self.stock.wait(chunk for chunk in chunks if chunk in prepared)
        self.stock.demand(self._places.bytes_of(missing))
        with Undo() as undo:
            for run in ready:
                self._map(run, undo)
            for run in missing:
                self.stock.make(run)
                undo.add(self.stock.give_back, [run])
                self._map(run, undo)
            self._make_usable([*ready, *missing])
        for run in ready:
            self.stock.remove(run)
        for run in [*ready, *missing]:
            self.attached.add(run)

    def cut_out(self, chunks: Sequence[int]) -> list[Run]:
        """Cut runs so that `chunks` are whole ones. Returns these."""
        self._driver.synchronize()
        return self.attached.take(chunks)

    def take(self, chunks: Sequence[int]) -> None:
        """Detach chunks that are attached, all or none, and hold their pages."""
        runs = self.cut_out(chunks)
        with Undo() as undo:
            undo.add(self.take_back, chunks)
            for start in range(0, len(runs), self._max_loose_runs):
                batch = runs[start : start + self._max_loose_runs]
                if self.room() < len(batch):
                    # What an earlier batch held has to go then. Nobody needs it: should a later one fail, it is to
                    # have pages, of whatever content.
                    self.let_go()
                    self.stock.await_releases()
                self._unmap(batch)

    def let_go(self) -> None:
        """Give back, in the background, what is held. Tries again what could not be given back."""
        held, self.held = self.held, []
        self.stock.give_back(held)

    def take_back(self, chunks: Sequence[int]) -> None:
        """Attach `chunks` again that were taken, from the pages that are held. They have whatever contents."""
        with Undo() as undo:
            for run in self.held:
                self._map(run, undo)
            self._make_usable(self.held)
        for run in self.held:
            self.attached.add(run)
        self.held = []
        # Where mappings are limited, not all could be held.
        if missing := [chunk for chunk in chunks if chunk not in self.attached]:
            self.give(missing)

    def _unmap(self, runs: Sequence[Run]) -> None:
        with Undo() as undo:
            for run in runs:
                for handle, address, _ in self._places.pieces(run):
                    self._driver.unmap(handle)
                    undo.add(self._driver.map, address, handle)
        for run in runs:
            self.attached.remove(run)
        self.held += runs

    def _map(self, run: Run, undo: Undo) -> None:
        for handle, address, _ in self._places.pieces(run):
            self._driver.map(address, handle, usable=False)
            undo.add(self._driver.unmap, handle)

    def _make_usable(self, runs: Iterable[Run]) -> None:
        if handles := [handle for run in runs for handle in run.handles]:
            self._driver.make_usable(handles)

    def _cut(self, run: Run, parts: Sequence[Run], leaving: frozenset[int]) -> None:
        self._cutter.cut(run, parts, leaving)
