# SPDX-License-Identifier: Apache-2.0
"""Runs: consecutive chunks whose pages are behind common handles."""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Piece(NamedTuple):
    """A handle, and how many chunks of a run it holds in one segment."""

    handle: int
    chunks: int


@dataclass(eq=False)
class Run:
    """The chunks from `first` to `first + count - 1`.

    In each segment one handle holds all of them. Where cutting the run failed half-way, there are
    more of them in some segments, in the order of the chunks.
    """

    first: int
    count: int
    pieces: list[list[Piece]] = field(default_factory=list)  # by segment; fewer than there are while they are made
    # For pages that are made in the background: whether that has ended, and how.
    made: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    unwanted: bool = False

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def chunks(self) -> range:
        return range(self.first, self.end)

    @property
    def handles(self) -> list[int]:
        return [piece.handle for pieces in self.pieces for piece in pieces]


def runs_of(chunks: Iterable[int], longest: int = sys.maxsize) -> list[Run]:
    """Group chunks into the longest runs, of no more than `longest` chunks."""
    runs: list[Run] = []
    for chunk in sorted(chunks):
        if runs and runs[-1].end == chunk and runs[-1].count < longest:
            runs[-1].count += 1
        else:
            runs.append(Run(chunk, 1))
    return runs


class RunTable:
    """Runs, found by the chunks that they are made of."""

    def __init__(self, cut: Callable[[Run, Sequence[Run], frozenset[int]], None]) -> None:
        """`cut` gives the handles of a run to the parts of it, given which chunks nobody needs any more."""
        self._cut = cut
        self._of: dict[int, Run] = {}  # chunk -> its run

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._of

    def __len__(self) -> int:
        """Chunks."""
        return len(self._of)

    @property
    def chunks(self) -> frozenset[int]:
        return frozenset(self._of)

    @property
    def runs(self) -> list[Run]:
        return list(dict.fromkeys(self._of.values()))

    def add(self, run: Run) -> None:
        self._of.update(dict.fromkeys(run.chunks, run))

    def remove(self, run: Run) -> None:
        for chunk in run.chunks:
            del self._of[chunk]

    def touched(self, chunks: Iterable[int]) -> list[Run]:
        """The runs in which some of `chunks` are."""
        return list(dict.fromkeys(self._of[chunk] for chunk in chunks if chunk in self._of))

    def whole(self, chunks: Iterable[int]) -> list[int]:
        """Those of `chunks` whose runs have no other chunks, so that nothing is cut to take them."""
        wanted = frozenset(chunks)
        runs = [run for run in self.touched(sorted(wanted)) if wanted.issuperset(run.chunks)]
        return [chunk for run in runs for chunk in run.chunks]

    def take(self, chunks: Iterable[int]) -> list[Run]:
        """The runs that are exactly `chunks`, all of which are in the table. Longer runs are cut.

        Where a cut fails, the run is in the table as before, and those that were cut are in parts.
        """
        wanted = frozenset(chunks)
        ordered = sorted(wanted)
        for run in self.touched(ordered):
            if wanted.issuperset(run.chunks):
                continue
            parts: list[Run] = []
            for chunk in run.chunks:
                if parts and (chunk in wanted) == (chunk - 1 in wanted):
                    parts[-1].count += 1
                else:
                    parts.append(Run(chunk, 1, made=run.made))
            self._cut(run, parts, wanted)
            for part in parts:
                self.add(part)
        return self.touched(ordered)
