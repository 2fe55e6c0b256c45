# SPDX-License-Identifier: Apache-2.0
"""Where chunks lie in a range of addresses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .layout import Segment
from .runs import Run


@dataclass(frozen=True)
class Places:
    """The addresses of chunks, of which each has a piece in every segment."""

    address: int
    segments: tuple[Segment, ...]
    chunk_blocks: int

    def piece_bytes(self, segment: int) -> int:
        """Bytes of a chunk in one segment."""
        return self.segments[segment].stride * self.chunk_blocks

    def at(self, segment: int, chunk: int) -> int:
        """The address of a chunk in one segment."""
        return self.address + self.segments[segment].offset + chunk * self.piece_bytes(segment)

    def of(self, run: Run) -> list[tuple[int, int]]:
        """Address and bytes of a run in each segment."""
        return [
            (self.at(segment, run.first), run.count * self.piece_bytes(segment))
            for segment in range(len(self.segments))
        ]

    def pieces(self, run: Run) -> Iterator[tuple[int, int, int]]:
        """Handle, address and bytes of all that a run has, in the order of addresses."""
        for segment, pieces in enumerate(run.pieces):
            chunk = run.first
            for piece in pieces:
                yield piece.handle, self.at(segment, chunk), piece.chunks * self.piece_bytes(segment)
                chunk += piece.chunks

    def bytes_of(self, runs: Iterable[Run]) -> int:
        """Bytes of runs over all segments."""
        return sum(run.count for run in runs) * sum(self.piece_bytes(segment) for segment in range(len(self.segments)))
