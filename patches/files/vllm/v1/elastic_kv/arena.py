# SPDX-License-Identifier: Apache-2.0
"""One reservation, and the chunks of it that have pages."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .layout import Segment
from .page_driver import OutOfMemoryError, PageDriver, PageDriverError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class ArenaBrokenError(RuntimeError):
    """A call failed and what was done could not be undone: the arena no longer
    knows which of the chunks have pages. Not a PageDriverError, since nothing
    may go on from here.
    """


class KVArena:
    """The memory of one rank's KV cache: a stable range of `capacity_chunks` chunks.

    A chunk is mapped with one handle per segment. `attach` and `detach` are
    all-or-nothing: what was done before a failure is undone, and the failure is
    reported. Chunks that no longer have pages must not be touched: the caller
    sees to it that no block id of a detached chunk is in use.
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
        self._handles: dict[int, list[int]] = {}  # chunk -> one handle per segment
        self._unreleased: list[int] = []  # mapped nowhere; their release failed and is tried again

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk over all segments."""
        return self.nbytes // self.capacity_chunks

    @property
    def attached(self) -> frozenset[int]:
        """The chunks that have pages."""
        return frozenset(self._handles)

    @property
    def resident_bytes(self) -> int:
        """Bytes that are attached, by our own account."""
        return len(self._handles) * self.chunk_bytes

    @property
    def num_handles(self) -> int:
        """Handles that hold memory: one per attached chunk and segment, and those
        that could not be released yet.
        """
        return len(self._handles) * len(self.segments) + len(self._unreleased)

    def reported_bytes(self) -> int:
        """Bytes that are attached, as the system or the driver tells it."""
        return self.driver.reported_bytes(self.address, self.nbytes)

    def tensor(self) -> "torch.Tensor":
        """An int8 tensor of shape `[nbytes]` over the whole range, valid until `close`."""
        return self.driver.tensor(self.address, self.nbytes)

    def owned_tensor(self) -> "torch.Tensor":
        """Like `tensor`, but the arena closes when the last view of it is gone."""
        return self.driver.tensor(self.address, self.nbytes, on_free=self.close)

    def attach(self, chunks: Iterable[int]) -> None:
        """Give pages to `chunks`; they read as zero.

        Raises:
            ValueError: A chunk is out of range, named twice, or attached already.
            OutOfMemoryError: The device has too little memory now. Nothing is changed.
            PageDriverError: A call failed. What was done is undone.
            ArenaBrokenError: It could not be undone.

        """
        chunks = self._checked(chunks, attached=False)
        self._release([])
        self._check_memory(len(chunks) * self.chunk_bytes)
        with _Undo() as undo:
            handles = {chunk: self._map_chunk(chunk, undo) for chunk in chunks}
        self._handles.update(handles)

    busy = False

    def prepare(self, chunks):
        pass

    def discard_prepared(self):
        pass

    def detach(self, chunks: Iterable[int]) -> None:
        """Take the pages of `chunks` and give them back to the device.

        A handle that cannot be released does not count as failure: its chunk is
        detached, and the next call tries again to give the memory back.

        Raises:
            ValueError: A chunk is out of range, named twice, or not attached.
            PageDriverError: A call failed. What was done is undone.
            ArenaBrokenError: It could not be undone.

        """
        chunks = self._checked(chunks, attached=True)
        self.driver.synchronize()
        with _Undo() as undo:
            for chunk in chunks:
                for segment, handle in zip(self.segments, self._handles[chunk], strict=True):
                    self.driver.unmap(handle)
                    undo.add(self.driver.map, self._chunk_address(segment, chunk), handle)
        self._release([handle for chunk in chunks for handle in self._handles.pop(chunk)])

    def close(self) -> None:
        """Detach everything and give the range back. The tensor is no longer valid."""
        self.detach(sorted(self._handles))
        if self.nbytes:
            self.driver.unreserve(self.address, self.nbytes)
            self.nbytes = 0

    def _map_chunk(self, chunk: int, undo: "_Undo") -> list[int]:
        handles = []
        for segment in self.segments:
            handle = self.driver.create(segment.stride * self.chunk_blocks)
            undo.add(self._release, [handle])
            self.driver.map(self._chunk_address(segment, chunk), handle)
            undo.add(self.driver.unmap, handle)
            handles.append(handle)
        return handles

    def _release(self, handles: Iterable[int]) -> None:
        """Release `handles`, and those that could not be released earlier."""
        pending, self._unreleased = [*self._unreleased, *handles], []
        for handle in pending:
            try:
                self.driver.release(handle)
            except PageDriverError as error:
                logger.warning("Elastic KV cache: memory could not be given back, to be tried again: %s", error)
                self._unreleased.append(handle)

    def _chunk_address(self, segment: Segment, chunk: int) -> int:
        return self.address + segment.offset + chunk * self.chunk_blocks * segment.stride

    def _check_memory(self, nbytes: int) -> None:
        # A device that hands out more than it has may kill the process later instead of failing now.
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
            if (chunk in self._handles) != attached:
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
