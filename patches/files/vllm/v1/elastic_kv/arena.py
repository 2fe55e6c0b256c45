# SPDX-License-Identifier: Apache-2.0
"""One reservation, and the chunks of it that have pages."""

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .layout import Segment
from .mapping import Mapping
from .page_driver import PageDriver
from .places import Places
from .turn import Turn

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CLOSE_S = 60.0


class KVArena:
    """The memory of one rank's KV cache: a stable range of `capacity_chunks` chunks.

    Consecutive chunks that are attached together are a run: one handle per segment holds
    their pages, and is cut where only a part of them is detached (see `Cutter`).

    `attach` and `detach` are all-or-nothing: what was done before a failure is undone, and
    the failure is reported. (Cuts stay. Nobody sees them but for the number of handles.)
    Chunks that no longer have pages must not be touched: the caller sees to it that no
    block id of a detached chunk is in use.

    What is slow, creating pages and giving them back, a thread in the background does:
    after `prepare`, and after every `detach`. `begin_attach` and `begin_detach` let it do the
    rest as well, and `ended` tells how that went. The pages of such a detach are held until
    `let_go`, so that `take_back` needs no memory: another rank may have failed.

    The methods themselves are for one thread. Those that change what is attached, and those
    that look at it, wait for what was begun. Those that change it let go of what is held.
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
        self.nbytes = sum(segment.stride for segment in segments) * chunk_blocks * capacity_chunks
        longest = max(segment.stride for segment in segments) * chunk_blocks * min(run_chunks, capacity_chunks)
        # Behind the range is room to look at a handle while it is cut.
        self._reserved = self.nbytes + (0 if driver.divisible else longest)
        self.address = driver.reserve(self._reserved)
        self._places = Places(self.address, self.segments, chunk_blocks)
        self._mapping = Mapping(driver, self._places, self.address + self.nbytes, ranks_sharing, run_chunks)
        self._stock = self._mapping.stock
        self._turn = Turn(self._stock.background)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk over all segments."""
        return self.nbytes // self.capacity_chunks

    @property
    def attached(self) -> frozenset[int]:
        """The chunks that have pages."""
        self._turn.wait()
        return self._mapping.attached.chunks

    @property
    def resident_bytes(self) -> int:
        """Bytes that are attached, by our own account."""
        self._turn.wait()
        return len(self._mapping.attached) * self.chunk_bytes

    @property
    def prepared_bytes(self) -> int:
        """Bytes that are held for prepared chunks which are not attached."""
        return self._stock.prepared_bytes

    @property
    def unreleased_bytes(self) -> int:
        """Bytes that are unmapped and not given back to the device yet. What could not be
        given back counts too; every later call tries again.
        """
        return self._places.bytes_of(self._mapping.held) + self._stock.unreleased_bytes

    @property
    def busy(self) -> bool:
        """Whether pages are being made or given back, or are going to be."""
        return self._stock.background.busy

    @property
    def num_handles(self) -> int:
        """Handles that hold memory, whether attached, prepared or not released yet."""
        self._turn.wait()
        mapped_or_held = [*self._mapping.attached.runs, *self._mapping.held]
        return sum(len(run.handles) for run in mapped_or_held) + self._stock.num_handles

    def reported_bytes(self) -> int:
        """Bytes that are attached, as the system or the driver tells it."""
        self._turn.wait()
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
        if runs := self._mapping.missing(chunks)[: max(0, self._mapping.room())]:
            # Pages on their way back are there by the time that these are made.
            available = self._stock.available_bytes() + self._stock.unreleased_bytes
            self._stock.check(self._places.bytes_of(runs), available)
            self._stock.prepare(runs)

    def discard_prepared(self) -> None:
        """Give the pages back, in the background, of all chunks that were prepared and not attached."""
        self._turn.wait()
        self._stock.discard()
        self._mapping.let_go()

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
        self._mapping.give(self._checked(chunks, attached=False))

    def begin_attach(self, chunks: Iterable[int]) -> None:
        """Start to attach `chunks` in the background. `ended` tells how it went.

        Raises:
            ValueError: A chunk is out of range, named twice, or attached already.

        """
        chunks = self._checked(chunks, attached=False)
        self._turn.begin(lambda: self._mapping.give(chunks))

    def detach(self, chunks: Iterable[int]) -> None:
        """Take the pages of `chunks`, and give them back to the device in the background.

        Raises:
            ValueError: A chunk is out of range, named twice, or not attached.
            OutOfMemoryError: There is too little memory to cut a run.
            PageDriverError: A call failed. What was done is undone: all chunks are attached,
                but those of `chunks` may read as zero.
            ArenaBrokenError: It could not be undone.

        """
        self._mapping.take(self._checked(chunks, attached=True))
        self._mapping.let_go()

    def whole(self, chunks: Iterable[int]) -> list[int]:
        """Those of `chunks`, which are attached, that can be detached without the memory that a cut takes."""
        self._turn.wait()
        return list(chunks) if self.driver.divisible else self._mapping.attached.whole(chunks)

    def begin_detach(self, chunks: Iterable[int]) -> None:
        """Start to detach `chunks` in the background. `ended` tells how it went, a failure of the cut included.

        The pages are held until `let_go`. Where handles have to be copied for a cut, that is done at
        once: steps write to what stays, and none may run meanwhile.

        Raises:
            ValueError: A chunk is out of range, named twice, or not attached.

        """
        chunks = self._checked(chunks, attached=True)
        if self.driver.divisible or self._turn.now(lambda: self._mapping.cut_out(chunks)):
            self._turn.begin(lambda: self._mapping.take(chunks))

    def ended(self) -> bool:
        """Whether what was begun last has ended.

        Raises:
            PageDriverError: It failed. What was done is undone.
            ArenaBrokenError: It could not be undone.

        """
        return self._turn.ended()

    def let_go(self) -> None:
        """Give back, in the background, what was detached and is held. Tries again what could not be given back."""
        self._turn.wait()
        self._mapping.let_go()

    def take_back(self, chunks: Iterable[int]) -> None:
        """Undo the detach of `chunks` that ended last, from the pages that are held. They have whatever contents.

        Raises:
            PageDriverError: A call failed. Not all of `chunks` are attached.
            ArenaBrokenError: Nor could that be undone.

        """
        self._turn.wait()
        self._mapping.take_back(list(chunks))

    def settle(self, timeout_s: float) -> bool:
        """Wait until the background has nothing to do. Returns whether that is so."""
        return self._stock.background.settle(timeout_s)

    def close(self) -> None:
        """Detach everything and give the range back. The tensor is no longer valid.

        Raises:
            PageDriverError: A call failed. What was done is undone.
            ArenaBrokenError: It could not be undone, or what was begun does not end.

        """
        self.discard_prepared()
        self.detach(sorted(self.attached))
        if not self.settle(_CLOSE_S):
            logger.warning("Elastic KV cache: memory is still being given back after %.0f s", _CLOSE_S)
        if self.nbytes:
            self.driver.unreserve(self.address, self._reserved)
            self.nbytes = 0

    def _freed(self) -> None:
        """Close, now that nobody has the tensor any more."""
        if self._stock.background.is_current:  # garbage can be collected on any thread, in the middle of a job
            self._stock.background.submit(self.close)
        else:
            self.close()

    def _checked(self, chunks: Iterable[int], attached: bool) -> list[int]:
        self._turn.wait()
        chunks = list(chunks)
        if len(set(chunks)) != len(chunks):
            raise ValueError(f"a chunk is named twice in {chunks}")
        for chunk in chunks:
            if not 0 <= chunk < self.capacity_chunks:
                raise ValueError(f"chunk {chunk} is not below the capacity of {self.capacity_chunks} chunks")
            if (chunk in self._mapping.attached) != attached:
                raise ValueError(f"chunk {chunk} is {'not' if attached else 'already'} attached")
        self._mapping.let_go()
        return chunks
