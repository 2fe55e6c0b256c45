# SPDX-License-Identifier: Apache-2.0
"""Runs: consecutive chunks whose pages are behind common handles."""

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Run:
    """The chunks from `first` to `first + count - 1`, with one handle for each segment."""

    first: int
    count: int
    handles: list[int] = field(default_factory=list)
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

    def __init__(self, split: Callable[[Run, int], list[int]]) -> None:
        """`split` cuts the handles of a run behind a number of chunks, and returns those of the rest."""
        self._split = split
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

    def take(self, chunks: Iterable[int]) -> list[Run]:
        """The runs that are exactly `chunks`, all of which are in the table. Longer runs are cut."""
        runs = []
        for wanted in runs_of(chunks):
            chunk = wanted.first
            while chunk < wanted.end:
                run = self._of[chunk]
                if run.first < chunk:
                    run = self._cut(run, chunk)
                if run.end > wanted.end:
                    self._cut(run, wanted.end)
                runs.append(run)
                chunk = run.end
        return runs

    def _cut(self, run: Run, chunk: int) -> Run:
        """Cut a run before `chunk`. Returns the part that begins there."""
        rest = Run(chunk, run.end - chunk, self._split(run, chunk - run.first), run.made)
        run.count -= rest.count
        self.add(rest)
        return rest
