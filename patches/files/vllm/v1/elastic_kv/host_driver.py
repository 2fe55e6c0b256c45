# SPDX-License-Identifier: Apache-2.0
"""Pages of host memory: anonymous mappings, moved behind their address by mremap.

Moving a mapping re-points page tables and copies nothing, and any part of a
mapping can be moved or given back, so that a handle can be cut anywhere.

There are no huge pages here, also where the system would give them unasked. A huge
page of which a part is unmapped keeps all of its memory until the rest goes too,
while the resident set says that it is gone: memory that was promised back would
not be there.
Sources: mmap(2), mremap(2), mprotect(2), madvise(2), mincore(2), proc_sys_vm(5).
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from . import host_memory
from .ledger import Ledger
from .page_driver import OutOfMemoryError, PageDriver, PageDriverError

if TYPE_CHECKING:
    import torch

_NO_ACCESS = 0  # PROT_NONE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MREMAP_DONTUNMAP = 4
_MADV_DONTNEED = 4
_MADV_NOHUGEPAGE = 15
_MADV_POPULATE_WRITE = 23
_PAGE_TABLE = 2 << 20  # bytes that one page table covers; on other architectures only speed depends on it
# Bytes to create or free in one system call: each holds a lock that every mmap of the process waits for.
# They are about a millisecond of work.
_CREATE_SLICE = 4 << 20
_FREE_SLICE = 32 << 20
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_WINDOW = 1 << 30  # bytes asked of mincore at a time

_libc = ctypes.CDLL(None, use_errno=True)
for _name, _arguments in {
    "mmap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    "mremap": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
    "munmap": (ctypes.c_void_p, ctypes.c_size_t),
    "mprotect": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "madvise": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    "mincore": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p),
}.items():
    getattr(_libc, _name).argtypes = _arguments
    getattr(_libc, _name).restype = ctypes.c_void_p if _name in ("mmap", "mremap") else ctypes.c_int

_FAILED = ctypes.c_void_p(-1).value


class HostPageDriver(PageDriver):
    """Host memory behind the rules of `PageDriver`. A handle is an anonymous
    mapping with pages; until it is mapped, it lies at an address of its own.
    """

    name = "host"
    divisible = True
    device = "host"

    def __init__(self) -> None:
        self._at: dict[int, tuple[int, int]] = {}  # handle -> where its pages are now, bytes
        self._hidden: set[int] = set()  # unmapped handles whose pages have to be made accessible again
        self._ledger = Ledger(mmap.PAGESIZE)

    @property
    def granule(self) -> int:
        return mmap.PAGESIZE

    @property
    def max_mappings(self) -> int:
        # Three quarters of what a process may have: the engine has mappings of its own.
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * 3 // 4

    def reserve(self, nbytes: int) -> int:
        self._ledger.check_size(nbytes)
        address = self._address("mmap", nbytes, None, nbytes, _NO_ACCESS, _RESERVED, -1, 0)
        self._ledger.reserved(address, nbytes)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._ledger.check_unreserve(address, nbytes)
        self._status("munmap", nbytes, address, nbytes)
        self._ledger.unreserved(address)

    def create(self, nbytes: int, address: int = 0) -> int:
        self._ledger.check_size(nbytes)
        place = self._place(nbytes, address)
        try:
            # Advice only: EINVAL on a kernel that has no huge pages changes nothing.
            _libc.madvise(place, nbytes, _MADV_NOHUGEPAGE)
            # Fault the pages in now, so that what is resident is what was asked for.
            for start in range(0, nbytes, _CREATE_SLICE):
                length = min(_CREATE_SLICE, nbytes - start)
                self._status("madvise", nbytes, place + start, length, _MADV_POPULATE_WRITE)
        except PageDriverError:
            _libc.munmap(place, nbytes)
            raise
        handle = self._ledger.created(nbytes)
        self._at[handle] = (place, nbytes)
        return handle

    def release(self, handle: int) -> None:
        self._ledger.check_release(handle)
        address, nbytes = self._at[handle]
        for start in range(0, nbytes - _FREE_SLICE, _FREE_SLICE):
            self._status("madvise", nbytes, address + start, _FREE_SLICE, _MADV_DONTNEED)
        self._status("munmap", nbytes, address, nbytes)
        del self._at[handle]
        self._hidden.discard(handle)
        self._ledger.released(handle)

    def map(self, address: int, handle: int, usable: bool = True) -> None:
        self._ledger.check_map(address, handle)
        source, nbytes = self._at[handle]
        if handle in self._hidden:
            self._status("mprotect", nbytes, source, nbytes, _READ_WRITE)
            self._hidden.discard(handle)
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        self._address("mremap", nbytes, source, nbytes, nbytes, flags, address)
        self._at[handle] = (address, nbytes)
        self._ledger.mapped(address, handle)

    def make_usable(self, handles: Iterable[int]) -> None:
        """Pages are usable wherever they are mapped."""

    def unmap(self, handle: int) -> None:
        self._ledger.check_unmap(handle)
        address, nbytes = self._at[handle]
        away: int | None = None
        hidden = False
        try:
            try:
                away = self._move_away(address, nbytes)
            except OutOfMemoryError:
                # The move needs room for a second mapping of the same size. Without access the pages
                # do not count against RLIMIT_DATA. Not done at once, since it costs far more than the move.
                self._status("mprotect", nbytes, address, nbytes, _NO_ACCESS)
                hidden = True
                away = self._move_away(address, nbytes)
            self._address("mmap", nbytes, address, nbytes, _NO_ACCESS, _RESERVED | _MAP_FIXED, -1, 0)
        except PageDriverError as error:
            try:
                if away is not None:
                    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
                    self._address("mremap", nbytes, away, nbytes, nbytes, flags, address)
                if hidden:
                    self._status("mprotect", nbytes, address, nbytes, _READ_WRITE)
            except PageDriverError as lost:
                # No PageDriverError: the pages are not as the handle says, so nothing may go on.
                raise RuntimeError(f"{error}; and the pages could not be put back: {lost}") from lost
            raise
        self._at[handle] = (away, nbytes)
        if hidden:
            self._hidden.add(handle)
        self._ledger.unmapped(handle)

    def split(self, handle: int, nbytes: int) -> int:
        self._ledger.check_split(handle, nbytes)
        rest = self._ledger.split(handle, nbytes)
        address, size = self._at[handle]
        self._at[handle] = (address, nbytes)
        self._at[rest] = (address + nbytes, size - nbytes)
        if handle in self._hidden:
            self._hidden.add(rest)
        return rest

    def synchronize(self) -> None:
        """What a step does on the host it has done when it returns, and the caller has seen to it that it has."""

    def available_bytes(self) -> int:
        return host_memory.available_bytes()

    def total_bytes(self) -> int:
        return host_memory.total_bytes()

    def reported_bytes(self, address: int, nbytes: int) -> int:
        resident = 0
        for start in range(0, nbytes, _WINDOW):
            length = min(_WINDOW, nbytes - start)
            pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
            self._status("mincore", length, address + start, length, pages)
            # Bit 0 tells that a page is resident; the other bits are not used.
            resident += pages.raw.count(b"\x01")
        return resident * mmap.PAGESIZE

    def tensor(self, address: int, nbytes: int, on_free: Callable[[], None] | None = None) -> "torch.Tensor":
        import torch

        buffer = (ctypes.c_int8 * nbytes).from_address(address)
        if on_free is not None:
            # The storage holds the buffer. At exit the pages stay, since threads may still compute.
            weakref.finalize(buffer, on_free).atexit = False
        return torch.frombuffer(buffer, dtype=torch.int8)

    def _place(self, nbytes: int, like: int) -> int:
        """A mapping of `nbytes` that lies towards page tables as `like` does: pages are then
        moved a table at a time instead of one by one, which is five times as fast.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if nbytes < _PAGE_TABLE:
            return self._address("mmap", nbytes, None, nbytes, _READ_WRITE, flags, -1, 0)
        size = nbytes + _PAGE_TABLE
        start = self._address("mmap", nbytes, None, size, _READ_WRITE, flags, -1, 0)
        place, end = start + (like - start) % _PAGE_TABLE, start + size
        try:
            if start < place:
                self._status("munmap", nbytes, start, place - start)
                start = place
            self._status("munmap", nbytes, place + nbytes, end - place - nbytes)
        except PageDriverError:
            _libc.munmap(start, end - start)
            raise
        return place

    def _move_away(self, address: int, nbytes: int) -> int:
        """Move pages to an address of their own. Returns it."""
        hint = None
        if nbytes >= _PAGE_TABLE:
            # Look for room as `_place` does. It is only a hint: another thread may take that room first.
            size = nbytes + _PAGE_TABLE
            start = self._address("mmap", nbytes, None, size, _NO_ACCESS, _RESERVED, -1, 0)
            self._status("munmap", nbytes, start, size)
            hint = start + (address - start) % _PAGE_TABLE
        # DONTUNMAP keeps the range occupied until the reservation covers it again. Without it,
        # another thread's mmap could be given the hole.
        flags = _MREMAP_MAYMOVE | _MREMAP_DONTUNMAP
        return self._address("mremap", nbytes, address, nbytes, nbytes, flags, hint)

    def _address(self, call: str, nbytes: int, *arguments: int | None) -> int:
        address: int = getattr(_libc, call)(*arguments)
        if address == _FAILED:
            raise self._error(call, nbytes)
        return address

    def _status(self, call: str, nbytes: int, *arguments: object) -> None:
        if getattr(_libc, call)(*arguments) != 0:
            raise self._error(call, nbytes)

    def _error(self, call: str, nbytes: int) -> PageDriverError:
        number = ctypes.get_errno()
        # madvise tells EFAULT where populating failed for want of memory (madvise(2)).
        no_memory = number == errno.ENOMEM or (call == "madvise" and number == errno.EFAULT)
        kind = OutOfMemoryError if no_memory else PageDriverError
        return kind(call, errno.errorcode.get(number, str(number)), nbytes, self.device, os.strerror(number))
