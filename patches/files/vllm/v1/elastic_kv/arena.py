# SPDX-License-Identifier: Apache-2.0
"""One reservation, and the chunks of it that have pages."""

import logging
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from .layout import Segment
from .page_driver import PageDriver, torch_errors
from .runs import Run, RunTable, runs_of
from .stock import PageStock
from .undo import ArenaBrokenError, Undo

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # how long to wait for memory, or for mappings, that are just being given back
_CLOSE_S = 60.0


class KVArena:
    """The memory of one rank's KV cache: a stable range of `capacity_chunks` chunks.

    Consecutive chunks that are attached together are a run: one handle per segment holds
    their pages, and is cut where only a part of them is detached. With a driver whose
    handles cannot be cut, what stays of a run is copied to handles of its own. That takes
    memory for it while it lasts, one run after the other.

    `attach` and `detach` are all-or-nothing: what was done before a failure is undone, and
    the failure is reported. (Cuts stay. Nobody sees them but for the number of handles.)
    Chunks that no longer have pages must not be touched: the caller sees to it that no
    block id of a detached chunk is in use.

    What is slow, creating pages and giving them back, a thread in the background does:
    after `prepare`, and after every `detach`. `begin_detach` lets it do a whole detach that
    touches nothing that stays. The methods themselves are for one thread. Those that change
    what is attached, and those that look at it, wait for a detach that was begun.
    """

    def __init__(
        self,
        driver: PageDriver,
        segments: Sequence[Segment],
        chunk_blocks: int,
        capacity_chunks: int,
        ranks_sharing: int = 1,
        run_chunks: int = sys.maxsize,
    ) -> None:
        """Reserve the range; nothing is attached yet.

        Args:
            driver: Maps the pages.
            segments: How the blocks lie in the range.
            chunk_blocks: Blocks in a chunk.
            capacity_chunks: Chunks that the range has room for.
            ranks_sharing: Arenas that take their pages from the same memory, this one
                among them; all of them attach at the same time.
            run_chunks: Chunks that share handles, at most.

        Raises:
            ValueError: A chunk does not fill whole granules in every segment.
            OutOfMemoryError: There is no address space for it.

        """
        for segment in segments:
            if segment.stride * chunk_blocks % driver.granule or segment.offset % driver.granule:
                raise ValueError(f"{chunk_blocks} blocks at {segment} do not fill granules of {driver.granule} bytes")
        self.driver = driver
        self.segments = tuple(segments)
        self.chunk_blocks = chunk_blocks
        self.capacity_chunks = capacity_chunks
        self.run_chunks = run_chunks
        self.nbytes = sum(segment.stride for segment in segments) * chunk_blocks * capacity_chunks
        self.address = driver.reserve(self.nbytes)
        self._attached = RunTable(self._split)
        self._stock = PageStock(driver, self._places, self._split, ranks_sharing)
        self._detaching: Future[None] | None = None  # what `begin_detach` began last
        # Handles that are mapped nowhere are mappings of the process too, beside the pieces of the range.
        # An eighth as many leaves the engine some of the quarter that the host driver does not use.
        limit = driver.max_mappings
        self._max_loose_runs = sys.maxsize if limit is None else max(1, limit // 8 // len(self.segments))

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk over all segments."""
        return self.nbytes // self.capacity_chunks

    @property
    def attached(self) -> frozenset[int]:
        """The chunks that have pages."""
        self._wait_for_detach()
        return self._attached.chunks

    @property
    def resident_bytes(self) -> int:
        """Bytes that are attached, by our own account."""
        self._wait_for_detach()
        return len(self._attached) * self.chunk_bytes

    @property
    def prepared_bytes(self) -> int:
        """Bytes that are held for prepared chunks which are not attached."""
        return self._stock.prepared_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that are unmapped and not given back to the device yet. What could not be
        given back counts too; every later call tries again.
        """
        return self._stock.unreleased_bytes

    @property
    def busy(self) -> bool:
        """Whether pages are being made or given back, or are going to be."""
        return self._stock.background.busy

    @property
    def num_handles(self) -> int:
        """Handles that hold memory, whether attached, prepared or not released yet."""
        self._wait_for_detach()
        return sum(len(run.handles) for run in self._attached.runs) + self._stock.num_handles

    def reported_bytes(self) -> int:
        """Bytes that are attached, as the system or the driver tells it."""
        self._wait_for_detach()
        return self.driver.reported_bytes(self.address, self.nbytes)

    def tensor(self) -> "torch.Tensor":
        """An int8 tensor of shape `[nbytes]` over the whole range, valid until `close`."""
        return self.driver.tensor(self.address, self.nbytes)

    def owned_tensor(self) -> "torch.Tensor":
        """Like `tensor`, but the arena closes when the last view of it is gone."""
        return self.driver.tensor(self.address, self.nbytes, on_free=self._freed)

    def prepare(self, chunks: Iterable[int]) -> None:
        """Start to create the pages of `chunks` in the background, for a later `attach`.

        Chunks that are prepared already stay so. Where `chunks` are many and far from each other,
        as many are prepared as the limit on mappings allows: `attach` creates the others.

        Raises:
            ValueError: A chunk is out of range, named twice, or attached already.
            OutOfMemoryError: The device has too little memory now. Nothing is changed.
                Where memory runs out later, `attach` tells.

        """
        chunks = self._checked(chunks, attached=False)
        self._stock.drop_failed()
        self._stock.retry()
        prepared = self._stock.prepared
        runs = runs_of((chunk for chunk in chunks if chunk not in prepared), self.run_chunks)
        runs = runs[: max(0, self._max_loose_runs - self._loose_runs())]
        if runs:
            # Pages on their way back are there by the time that these are made.
            available = self._stock.available_bytes() + self._stock.unreleased_bytes
            self._stock.check(self._bytes(runs), available)
            self._stock.prepare(runs)

    def discard_prepared(self) -> None:
        """Give the pages back, in the background, of all chunks that were prepared and not attached."""
        self._wait_for_detach()
        self._stock.discard()
        self._stock.retry()

    def attach(self, chunks: Iterable[int]) -> None:
        """Give pages to `chunks`; they read as zero.

        Of chunks that were prepared the pages are there, or are waited for. The others'
        are created now. Where handles cannot be cut, a run that was prepared is used as a whole
        or not at all: the rest of it is not prepared any more.

        Raises:
            ValueError: A chunk is out of range, named twice, or attached already.
            OutOfMemoryError: The device has too little memory now, or had when it came
                to preparing. Nothing is attached.
            PageDriverError: A call failed. What was done is undone.
            ArenaBrokenError: It could not be undone.

        """
        chunks = self._checked(chunks, attached=False)
        self._stock.retry()
        if not self.driver.divisible:
            self._stock.give_back_parts(chunks)
        prepared = self._stock.prepared
        missing = runs_of((chunk for chunk in chunks if chunk not in prepared), self.run_chunks)
        ready = self._stock.wait(chunk for chunk in chunks if chunk in prepared)
        self._check_memory(self._bytes(missing))
        with Undo() as undo:
            for run in ready:
                self._map(run, undo)
            for run in missing:
                self._stock.make(run)
                undo.add(self._stock.give_back, [run])
                self._map(run, undo)
            self._make_usable([*ready, *missing])
        for run in ready:
            self._stock.remove(run)
        for run in [*ready, *missing]:
            self._attached.add(run)

    def detach(self, chunks: Iterable[int]) -> None:
        """Take the pages of `chunks`, and give them back to the device in the background.

        Raises:
            ValueError: A chunk is out of range, named twice, or not attached.
            OutOfMemoryError: There is too little memory to copy what stays of a run.
            PageDriverError: A call failed. What was done is undone: all chunks are attached,
                but those of `chunks` may read as zero.
            ArenaBrokenError: It could not be undone.

        """
        self._take(self._checked(chunks, attached=True))

    def begin_detach(self, chunks: Iterable[int]) -> None:
        """Start to detach `chunks` in the background. `end_detach` tells how it went.

        Where what stays of a run has to be copied, it is done at once: steps write to it, and none may run meanwhile.

        Raises:
            ValueError: A chunk is out of range, named twice, or not attached.

        """
        chunks = self._checked(chunks, attached=True)
        ended: Future[None] = Future()
        if self._cuts(chunks):
            self._detach_aside(chunks, ended)
        else:
            self._stock.background.submit(partial(self._detach_aside, chunks, ended))
        self._detaching = ended

    def end_detach(self) -> bool:
        """Whether the detach that was begun last has ended.

        Raises:
            PageDriverError: It failed. What was done is undone.
            ArenaBrokenError: It could not be undone.

        """
        if self._detaching is None:
            return True
        if not self._detaching.done():
            return False
        self._detaching.result()
        return True

    def settle(self, timeout_s: float) -> bool:
        """Wait until the background has nothing to do. Returns whether that is so."""
        return self._stock.background.settle(timeout_s)

    def close(self) -> None:
        """Detach everything and give the range back. The tensor is no longer valid.

        Raises:
            PageDriverError: A call failed. What was done is undone.
            ArenaBrokenError: It could not be undone, or a detach that was begun does not end.

        """
        self.discard_prepared()
        self.detach(sorted(self.attached))
        if not self.settle(_CLOSE_S):
            logger.warning("Elastic KV cache: memory is still being given back after %.0f s", _CLOSE_S)
        if self.nbytes:
            self.driver.unreserve(self.address, self.nbytes)
            self.nbytes = 0

    def _freed(self) -> None:
        """Close, now that nobody has the tensor any more."""
        if self._stock.background.is_current:  # garbage can be collected on any thread, in the middle of a job
            self._stock.background.submit(self.close)
        else:
            self.close()

    def _detach_aside(self, chunks: list[int], ended: "Future[None]") -> None:
        try:
            self._take(chunks)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    def _wait_for_detach(self) -> None:
        """Wait until the detach that was begun has ended, however it does. The detach itself passes."""
        if self._detaching is None or self._stock.background.is_current:
            return
        if not wait([self._detaching], _CLOSE_S).done:
            raise ArenaBrokenError(f"chunks are still being detached on {self.driver.device} after {_CLOSE_S:.0f} s")

    def _cuts(self, chunks: list[int]) -> bool:
        """Whether `chunks` are a part of runs whose handles cannot be cut, so that the rest is copied."""
        if self.driver.divisible:
            return False
        return sum(run.count for run in self._attached.touched(chunks)) > len(chunks)

    def _take(self, chunks: list[int]) -> None:
        """Detach chunks that are attached."""
        self._stock.retry()
        self.driver.synchronize()
        leaving = frozenset(chunks)
        with Undo() as undo:
            for batch in self._batches(leaving):
                self._detach(batch, leaving)
                # A batch is more mappings than can wait at a time, or a run that is cut. What an earlier one held is
                # gone by then, but nobody needs it: should a later one fail, it is to have pages, of whatever content.
                undo.add(self.attach, [chunk for run in batch for chunk in run.chunks if chunk in leaving])

    def _map(self, run: Run, undo: Undo) -> None:
        for handle, (address, _) in zip(run.handles, self._places(run), strict=True):
            self.driver.map(address, handle, usable=False)
            undo.add(self.driver.unmap, handle)

    def _make_usable(self, runs: Iterable[Run]) -> None:
        if handles := [handle for run in runs for handle in run.handles]:
            self.driver.make_usable(handles)

    def _batches(self, leaving: frozenset[int]) -> list[list[Run]]:
        """The runs to detach so that `leaving` go, in lists that go at a time."""
        if self.driver.divisible:
            runs, size = self._attached.take(leaving), self._max_loose_runs
            return [runs[start : start + size] for start in range(0, len(runs), size)]
        runs = self._attached.touched(sorted(leaving))
        whole = [run for run in runs if leaving.issuperset(run.chunks)]
        # Whole ones first: their memory may be what the others need to be cut.
        return [*([whole] if whole else []), *([run] for run in runs if run not in whole)]

    def _detach(self, runs: list[Run], leaving: frozenset[int]) -> None:
        """Take the pages of runs, and copy what is not `leaving` to runs of its own."""
        staying = [part for run in runs for part in runs_of(chunk for chunk in run.chunks if chunk not in leaving)]
        self._check_memory(self._bytes(staying))
        if self._loose_runs() + len(runs) > self._max_loose_runs:
            self._stock.await_releases(_PATIENCE_S)
        with Undo() as undo:
            for part in staying:
                self._stock.make(part)
                undo.add(self._stock.give_back, [part])
            self._copy(staying)
            for run in runs:
                for handle, (address, _) in zip(run.handles, self._places(run), strict=True):
                    self.driver.unmap(handle)
                    undo.add(self.driver.map, address, handle)
            for part in staying:
                self._map(part, undo)
            self._make_usable(staying)
        for run in runs:
            self._attached.remove(run)
        for part in staying:
            self._attached.add(part)
        self._stock.give_back(runs)

    def _copy(self, runs: Sequence[Run]) -> None:
        """Copy the contents of the places of `runs` to their handles, which are mapped nowhere."""
        if not runs:
            return
        buffer, nbytes = self.tensor(), self._bytes(runs)
        with Undo() as undo:
            at = elsewhere = self.driver.reserve(nbytes)
            undo.add(self.driver.unreserve, elsewhere, nbytes)
            sources = []
            for run in runs:
                for handle, (address, size) in zip(run.handles, self._places(run), strict=True):
                    self.driver.map(at, handle, usable=False)
                    undo.add(self.driver.unmap, handle)
                    sources.append(buffer[address - self.address :][:size])
                    at += size
            self._make_usable(runs)
            target = self.driver.tensor(elsewhere, nbytes)
            with torch_errors("copy_", nbytes, self.driver.device):
                for source, part in zip(sources, target.split([len(source) for source in sources]), strict=True):
                    part.copy_(source)
            self.driver.synchronize()
            undo.do_now()

    def _loose_runs(self) -> int:
        """Runs that are, or are going to be, mapped nowhere."""
        return self._stock.num_prepared_runs + self._stock.num_unreleased // len(self.segments)

    def _bytes(self, runs: Iterable[Run]) -> int:
        return sum(run.count for run in runs) * self.chunk_bytes

    def _places(self, run: Run) -> list[tuple[int, int]]:
        """Address and bytes of a run in each segment."""
        first, count = run.first * self.chunk_blocks, run.count * self.chunk_blocks
        return [
            (self.address + segment.offset + first * segment.stride, count * segment.stride)
            for segment in self.segments
        ]

    def _split(self, run: Run, count: int) -> list[int]:
        """Cut the handles of `run` behind `count` chunks. Returns those of the rest."""
        blocks = count * self.chunk_blocks
        return [
            self.driver.split(handle, blocks * segment.stride)
            for handle, segment in zip(run.handles, self.segments, strict=True)
        ]

    def _check_memory(self, nbytes: int) -> None:
        if not nbytes:
            return
        available = self._stock.available_bytes()
        if nbytes > available and self.busy:
            # Pages on their way back are not lost, only late.
            self._stock.await_releases(_PATIENCE_S)
            available = self._stock.available_bytes()
        self._stock.check(nbytes, available)

    def _checked(self, chunks: Iterable[int], attached: bool) -> list[int]:
        self._wait_for_detach()
        chunks = list(chunks)
        if len(set(chunks)) != len(chunks):
            raise ValueError(f"a chunk is named twice in {chunks}")
        for chunk in chunks:
            if not 0 <= chunk < self.capacity_chunks:
                raise ValueError(f"chunk {chunk} is not below the capacity of {self.capacity_chunks} chunks")
            if (chunk in self._attached) != attached:
                raise ValueError(f"chunk {chunk} is {'not' if attached else 'already'} attached")
        return chunks
