# SPDX-License-Identifier: Apache-2.0
"""One reservation, and the chunks of it that have pages."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .layout import Segment
from .page_driver import OutOfMemoryError, PageDriver, PageDriverError
from .page_maker import PageMaker

if TYPE_CHECKING:
    import torch

# How long memory that is being given back is waited for where there is too little.
SETTLE_SECONDS = 10.0


class ArenaBrokenError(RuntimeError):
    """A call failed and what was done could not be undone: the arena no longer
    knows which of the chunks have pages. Not a PageDriverError, since nothing
    may go on from here.
    """


@dataclass(eq=False)
class _Run:
    """Chunks from `first` on that were attached together, with one handle per segment."""

    first: int
    count: int
    handles: list[int]


class KVArena:
    """The memory of one rank's KV cache: a stable range of `capacity_chunks` chunks.

    Chunks that lie side by side and are attached together are a run, which is mapped
    with one handle per segment where the driver can cut handles, so that a part of it
    can leave; otherwise each chunk is a run. `attach` and `detach` are all-or-nothing: what was
    done before a failure is undone, and the failure is reported. Chunks that no
    longer have pages must not be touched: the caller sees to it that no block id
    of a detached chunk is in use.

    Pages are given back in the background, and made there by `prepare`.
    """

    def __init__(
        self,
        driver: PageDriver,
        segments: Sequence[Segment],
        chunk_blocks: int,
        capacity_chunks: int,
        ranks_sharing: int = 1,
    ) -> None:
        """Reserve the range; nothing is attached yet.

        Args:
            driver: Maps the pages.
            segments: How the blocks lie in the range.
            chunk_blocks: Blocks in a chunk.
            capacity_chunks: Chunks that the range has room for.
            ranks_sharing: Arenas that take their pages from the same memory, this one
                among them; all of them attach at the same time.

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
        self.ranks_sharing = ranks_sharing
        self.nbytes = sum(segment.stride for segment in segments) * chunk_blocks * capacity_chunks
        self.address = driver.reserve(self.nbytes)
        self._runs: dict[int, _Run] = {}  # by chunk
        self._maker = PageMaker(driver)
        # What `prepare` was asked for: the runs, and their handles, run by run and segment by segment.
        self._prepared: tuple[list[range], Future[list[int]]] | None = None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk over all segments."""
        return self.nbytes // self.capacity_chunks

    @property
    def attached(self) -> frozenset[int]:
        """The chunks that have pages."""
        return frozenset(self._runs)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are attached, by our own account."""
        return len(self._runs) * self.chunk_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that are mapped nowhere and not given back yet."""
        return sum(self._maker.unreleased.values())

    @property
    def num_handles(self) -> int:
        """Handles that are mapped, and those that wait to be given back."""
        return len(set(self._runs.values())) * len(self.segments) + len(self._maker.unreleased)

    @property
    def busy(self) -> bool:
        """Whether pages are being made or given back."""
        return self._maker.busy

    def reported_bytes(self) -> int:
        """Bytes that are attached, as the system or the driver tells it."""
        return self.driver.reported_bytes(self.address, self.nbytes)

    def tensor(self) -> "torch.Tensor":
        """An int8 tensor of shape `[nbytes]` over the whole range, valid until `close`."""
        return self.driver.tensor(self.address, self.nbytes)

    def owned_tensor(self) -> "torch.Tensor":
        """Like `tensor`, but the arena closes when the last view of it is gone."""
        return self.driver.tensor(self.address, self.nbytes, on_free=self.close)

    def prepare(self, chunks: Iterable[int]) -> None:
        """Begin to make pages for `chunks` in the background; `attach` of the same
        chunks maps them, and tells what went wrong.

        Raises:
            ValueError: As `attach`.
            OutOfMemoryError: The device has too little memory now.

        """
        self.discard_prepared()
        chunks = self._checked(chunks, attached=False)
        self._check_memory(len(chunks) * self.chunk_bytes)
        runs = self._in_runs(chunks)
        self._prepared = runs, self._maker.create([size for run in runs for size in self._sizes(len(run))])

    def discard_prepared(self) -> None:
        """Give prepared pages back that were not attached."""
        if self._prepared is None:
            return
        (runs, made), self._prepared = self._prepared, None
        sizes = [size for run in runs for size in self._sizes(len(run))]
        with suppress(PageDriverError):  # they could not be made: there is nothing to give back
            self._maker.release(dict(zip(made.result(), sizes, strict=True)))

    def attach(self, chunks: Iterable[int]) -> None:
        """Give pages to `chunks`; they read as zero.

        Raises:
            ValueError: A chunk is out of range, named twice, or attached already.
            OutOfMemoryError: The device has too little memory now. Nothing is changed.
            PageDriverError: A call failed. What was done is undone.
            ArenaBrokenError: It could not be undone.

        """
        chunks = self._checked(chunks, attached=False)
        if self._prepared is None or self._prepared[0] != self._in_runs(chunks):
            self.prepare(chunks)
        assert self._prepared is not None
        runs, made = self._prepared
        mapped = []
        try:
            handles = iter(made.result())
            with _Undo() as undo:
                for run in runs:
                    mapped.append(_Run(run.start, len(run), [next(handles) for _ in self.segments]))
                    for segment, handle in zip(self.segments, mapped[-1].handles, strict=True):
                        self.driver.map(self._chunk_address(segment, run.start), handle)
                        undo.add(self.driver.unmap, handle)
        except BaseException:
            self.discard_prepared()
            raise
        self._prepared = None
        for attached in mapped:
            self._runs.update(dict.fromkeys(range(attached.first, attached.first + attached.count), attached))

    def detach(self, chunks: Iterable[int]) -> None:
        """Take the pages of `chunks`, and begin to give them back to the device.

        A handle that cannot be released does not count as failure: its chunk is
        detached, and the next call tries again to give the memory back.

        Raises:
            ValueError: A chunk is out of range, named twice, or not attached.
            PageDriverError: A call failed. What was done is undone.
            ArenaBrokenError: It could not be undone.

        """
        chunks = self._checked(chunks, attached=True)
        self.driver.synchronize()
        runs = [self._cut_out(part) for part in self._in_runs(chunks)]
        sizes = {}
        with _Undo() as undo:
            for run in (run for parts in runs for run in parts):
                for segment, handle, size in zip(self.segments, run.handles, self._sizes(run.count), strict=True):
                    self.driver.unmap(handle)
                    undo.add(self.driver.map, self._chunk_address(segment, run.first), handle)
                    sizes[handle] = size
        for chunk in chunks:
            del self._runs[chunk]
        self._maker.release(sizes)

    def settle(self, timeout_s: float = SETTLE_SECONDS) -> bool:
        """Wait for the work in the background. Returns whether it ended in time."""
        return self._maker.settle(timeout_s)

    def close(self) -> None:
        """Detach everything and give the range back. The tensor is no longer valid."""
        self.discard_prepared()
        self.detach(sorted(self._runs))
        self._maker.close()
        if self.nbytes:
            self.driver.unreserve(self.address, self.nbytes)
            self.nbytes = 0

    def _in_runs(self, chunks: Sequence[int]) -> list[range]:
        """`chunks` in runs, as far as the driver can cut them again."""
        runs: list[range] = []
        for chunk in sorted(chunks):
            if self.driver.divisible and runs and chunk == runs[-1].stop:
                runs[-1] = range(runs[-1].start, chunk + 1)
            else:
                runs.append(range(chunk, chunk + 1))
        return runs

    def _cut_out(self, chunks: range) -> list[_Run]:
        """The runs that `chunks` are made of, cut from those that reach beyond them."""
        found = []
        first = chunks.start
        while first < chunks.stop:
            run = self._runs[first]
            if run.first < first:
                run = self._cut(run, first - run.first)
            if run.first + run.count > chunks.stop:
                self._cut(run, chunks.stop - run.first)
            found.append(run)
            first = run.first + run.count
        return found

    def _cut(self, run: _Run, count: int) -> _Run:
        """Leave `count` chunks to a run. Returns the run of the others."""
        rest = [self.driver.split(handle, size) for handle, size in zip(run.handles, self._sizes(count), strict=True)]
        new = _Run(run.first + count, run.count - count, rest)
        run.count = count
        self._runs.update(dict.fromkeys(range(new.first, new.first + new.count), new))
        return new

    def _sizes(self, num_chunks: int) -> list[int]:
        """Bytes of so many chunks in each segment."""
        return [segment.stride * self.chunk_blocks * num_chunks for segment in self.segments]

    def _chunk_address(self, segment: Segment, chunk: int) -> int:
        return self.address + segment.offset + chunk * self.chunk_blocks * segment.stride

    def _check_memory(self, nbytes: int) -> None:
        # A device that hands out more than it has may kill the process later instead of failing now.
        available = self.driver.available_bytes() // self.ranks_sharing
        if nbytes > available and self.busy:
            self.settle()
            available = self.driver.available_bytes() // self.ranks_sharing
        if nbytes > available:
            hint = f"{available} bytes are available to each rank"
            raise OutOfMemoryError("attach", "out of memory", nbytes, self.driver.device, hint)

    def _checked(self, chunks: Iterable[int], attached: bool) -> list[int]:
        chunks = list(chunks)
        if len(set(chunks)) != len(chunks):
            raise ValueError(f"a chunk is named twice in {chunks}")
        for chunk in chunks:
            if not 0 <= chunk < self.capacity_chunks:
                raise ValueError(f"chunk {chunk} is not below the capacity of {self.capacity_chunks} chunks")
            if (chunk in self._runs) != attached:
                raise ValueError(f"chunk {chunk} is {'not' if attached else 'already'} attached")
        return chunks


class _Undo:
    """Runs what was added, last first, if the block it guards fails."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __enter__(self) -> "_Undo":
        return self

    def add(self, function: Callable[..., None], *arguments: Any) -> None:
        self._steps.append((function, arguments))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        failures = []
        for function, arguments in reversed(self._steps):
            try:
                function(*arguments)
            except (PageDriverError, ValueError) as failure:  # go on, and undo as much as can be undone
                failures.append(str(failure))
        if failures:
            raise ArenaBrokenError(f"{error}; and it could not be undone: {'; '.join(failures)}") from error
