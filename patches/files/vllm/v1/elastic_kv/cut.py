# SPDX-License-Identifier: Apache-2.0
"""Cutting runs, so that a part of one can be detached."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from .page_driver import PageDriver, torch_errors
from .places import Places
from .runs import Piece, Run
from .stock import PageStock
from .undo import Undo


class Cutter:
    """Gives the handles of a run to the parts of it.

    A driver that is `divisible` cuts handles in its books. For any other, what stays is copied,
    one handle after the other: all parts, also those that leave, get handles of their own, the old
    one is given back, and only then comes the next segment. So a cut takes no more memory
    than one handle has, and when it is done a detach needs none, nor does undoing it.

    Where a cut fails, nothing is lost: handles that were cut stay so, and each chunk has pages.
    """

    def __init__(self, driver: PageDriver, places: Places, stock: PageStock, scratch: int) -> None:
        """
        Args:
            driver: Has made the handles.
            places: Where chunks lie.
            stock: Tells whether there is memory, and takes handles that are not needed any more.
            scratch: Reserved addresses for the longest handle.

        """
        self._driver = driver
        self._places = places
        self._stock = stock
        self._scratch = scratch

    def cut(self, run: Run, parts: Sequence[Run], leaving: frozenset[int]) -> None:
        """Hand the pages of a run over to `parts`, which are all of it in order.

        With a driver that is not `divisible`, nobody may use the run meanwhile.

        Args:
            run: The run.
            parts: Consecutive runs without handles.
            leaving: Chunks whose contents nobody needs. They may read as zero afterwards.

        Raises:
            OutOfMemoryError: There is too little memory for the copy of a handle.
            PageDriverError: A call failed.
            ArenaBrokenError: It could not be undone.

        """
        for segment in range(len(run.pieces)):
            self._cut_segment(run, segment, [part.first for part in parts], leaving)
        for part in parts:
            part.pieces = [[] for _ in run.pieces]
        for segment, pieces in enumerate(run.pieces):
            chunk, owners = run.first, iter(parts)
            part = next(owners)
            for piece in pieces:
                if chunk == part.end:
                    part = next(owners)
                part.pieces[segment].append(piece)
                chunk += piece.chunks

    def _cut_segment(self, run: Run, segment: int, edges: Sequence[int], leaving: frozenset[int]) -> None:
        """Replace the handles that have one of `edges`, which are chunks, inside."""
        whole, run.pieces[segment] = run.pieces[segment], []
        chunk, divide = run.first, self._split if self._driver.divisible else partial(self._copy, leaving=leaving)
        try:
            while whole:
                end = chunk + whole[0].chunks
                inside = [edge for edge in edges if chunk < edge < end]
                sizes = [after - before for before, after in pairwise([chunk, *inside, end])]
                run.pieces[segment] += divide(whole[0], segment, chunk, sizes) if inside else [whole[0]]
                whole.pop(0)
                chunk = end
        finally:
            run.pieces[segment] += whole

    def _split(self, piece: Piece, segment: int, first: int, sizes: Sequence[int]) -> list[Piece]:
        pieces, handle = [], piece.handle
        for size in sizes[:-1]:
            rest = self._driver.split(handle, size * self._places.piece_bytes(segment))
            pieces.append(Piece(handle, size))
            handle = rest
        return [*pieces, Piece(handle, sizes[-1])]

    def _copy(
        self, piece: Piece, segment: int, first: int, sizes: Sequence[int], leaving: frozenset[int]
    ) -> list[Piece]:
        """Give each part of a mapped handle a handle of its own, in its place."""
        driver, unit, at = self._driver, self._places.piece_bytes(segment), self._places.at(segment, first)
        nbytes = piece.chunks * unit
        self._stock.demand(nbytes)
        pieces: list[Piece] = []
        with Undo() as undo:
            for size in sizes:
                address = at + sum(made.chunks for made in pieces) * unit
                pieces.append(Piece(driver.create(size * unit, address), size))
                undo.add(self._stock.release, pieces[-1].handle, size * unit)
            driver.unmap(piece.handle)
            undo.add(driver.map, at, piece.handle)
            driver.map(self._scratch, piece.handle)
            undo.add(driver.unmap, piece.handle)
            chunk = first
            for handle, size in pieces:
                driver.map(self._places.at(segment, chunk), handle, usable=False)
                undo.add(driver.unmap, handle)
                chunk += size
            driver.make_usable([handle for handle, _ in pieces])
            undo.add(driver.synchronize)  # copies may be under way when a later one fails
            with torch_errors("copy_", nbytes, driver.device):
                source, target = driver.tensor(self._scratch, nbytes), driver.tensor(at, nbytes)
                start = 0
                for _, size in pieces:
                    end = start + size * unit
                    if first + start // unit not in leaving:
                        target[start:end].copy_(source[start:end])
                    start = end
            driver.synchronize()
            driver.unmap(piece.handle)
        self._stock.release(piece.handle, nbytes)
        return pieces
