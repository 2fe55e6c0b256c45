# SPDX-License-Identifier: Apache-2.0
"""The books of a page driver, and the rules that they show to be kept."""

import threading
from bisect import bisect_left, insort


class Ledger:
    """What a driver has reserved, created and mapped. The `check_` methods raise
    ValueError where the rules of `PageDriver` forbid a call; the others record one.

    The lock is held while tables are read or written, never while the system works.
    """

    def __init__(self, granule: int) -> None:
        self._granule = granule
        self._lock = threading.RLock()
        self._next_handle = 1
        self._ranges: dict[int, int] = {}  # address -> bytes
        self._sizes: dict[int, int] = {}  # handle -> bytes
        self._mapped: dict[int, int] = {}  # handle -> address
        self._pieces: list[tuple[int, int]] = []  # what is mapped: address and end, in order

    def check_size(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self._granule:
            raise ValueError(f"{nbytes} bytes are not whole granules of {self._granule} bytes")

    def reserved(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._ranges[address] = nbytes

    def check_unreserve(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._ranges.get(address) != nbytes:
                raise ValueError(f"{nbytes} bytes at {address:#x} are not a reservation")
            if self._overlaps(address, address + nbytes):
                raise ValueError(f"the reservation at {address:#x} still has pages mapped in it")

    def unreserved(self, address: int) -> None:
        with self._lock:
            del self._ranges[address]

    def created(self, nbytes: int) -> int:
        """Returns the new handle."""
        with self._lock:
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._sizes[handle] = nbytes
            return handle

    def check_release(self, handle: int) -> None:
        with self._lock:
            self._size(handle)
            if handle in self._mapped:
                raise ValueError(f"handle {handle} is still mapped at {self._mapped[handle]:#x}")

    def released(self, handle: int) -> None:
        with self._lock:
            del self._sizes[handle]

    def check_map(self, address: int, handle: int) -> None:
        with self._lock:
            end = address + self._size(handle)
            if handle in self._mapped:
                raise ValueError(f"handle {handle} is already mapped at {self._mapped[handle]:#x}")
            if address % self._granule:
                raise ValueError(f"address {address:#x} is no multiple of the granule of {self._granule} bytes")
            if not any(start <= address and end <= start + nbytes for start, nbytes in self._ranges.items()):
                raise ValueError(f"addresses {address:#x} to {end:#x} are not reserved")
            if self._overlaps(address, end):
                raise ValueError(f"addresses {address:#x} to {end:#x} have pages already")

    def mapped(self, address: int, handle: int) -> None:
        with self._lock:
            self._mapped[handle] = address
            insort(self._pieces, (address, address + self._sizes[handle]))

    def check_unmap(self, handle: int) -> None:
        with self._lock:
            self._size(handle)
            if handle not in self._mapped:
                raise ValueError(f"handle {handle} is not mapped")

    def unmapped(self, handle: int) -> None:
        with self._lock:
            address = self._mapped.pop(handle)
            del self._pieces[bisect_left(self._pieces, (address,))]

    def check_split(self, handle: int, nbytes: int) -> None:
        with self._lock:
            size = self._size(handle)
            self.check_size(nbytes)
            if nbytes >= size:
                raise ValueError(f"handle {handle} has {size} bytes, so that {nbytes} bytes are no part of it")

    def split(self, handle: int, nbytes: int) -> int:
        """Returns the new handle, which has what comes after the first `nbytes`."""
        with self._lock:
            rest = self.created(self._sizes[handle] - nbytes)
            self._sizes[handle] = nbytes
            if handle in self._mapped:
                address = self._mapped[handle]
                self._pieces[bisect_left(self._pieces, (address,))] = (address, address + nbytes)
                self.mapped(address + nbytes, rest)
            return rest

    def place(self, handle: int) -> int:
        """The address of a mapped handle."""
        with self._lock:
            return self._mapped[handle]

    def pieces(self, address: int, end: int) -> list[tuple[int, int]]:
        """What is mapped between two addresses, as address and end, in order."""
        with self._lock:
            first, last = bisect_left(self._pieces, (address,)), bisect_left(self._pieces, (end,))
            return self._pieces[first:last]

    def _size(self, handle: int) -> int:
        if handle not in self._sizes:
            raise ValueError(f"there is no handle {handle}")
        return self._sizes[handle]

    def _overlaps(self, address: int, end: int) -> bool:
        before = bisect_left(self._pieces, (end,)) - 1
        return before >= 0 and self._pieces[before][1] > address
