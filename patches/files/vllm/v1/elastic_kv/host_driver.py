# SPDX-License-Identifier: Apache-2.0
"""Pages of host memory: anonymous mappings, moved behind their address by mremap.

Moving a mapping re-points page tables and copies nothing. Anonymous memory gets
huge pages where the system allows it, which shared memory mostly does not.
Sources: mmap(2), mremap(2), mprotect(2), madvise(2), mincore(2), proc_sys_vm(5).
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from . import host_memory
from .page_driver import Ledger, OutOfMemoryError, PageDriver, PageDriverError

if TYPE_CHECKING:
    import torch

_NO_ACCESS = 0  # PROT_NONE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MREMAP_DONTUNMAP = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_HUGE_PAGE = 2 << 20
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
    device = "host"

    def __init__(self) -> None:
        self._at: dict[int, tuple[int, int]] = {}  # handle -> where its pages are now, bytes
        self._parked: set[int] = set()  # handles whose pages were unmapped, and may not be touched
        self._ledger = Ledger(mmap.PAGESIZE)
        self._next_handle = 1

    @property
    def granule(self) -> int:
        return mmap.PAGESIZE

    @property
    def max_mappings(self) -> int:
        # Three quarters of what a process may have: the engine has mappings of its own.
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * 3 // 4

    def reserve(self, nbytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._ledger.check_size(nbytes)
        address = self._address("mmap", nbytes, None, nbytes, _NO_ACCESS, flags, -1, 0)
        self._ledger.reserved(address, nbytes)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._ledger.check_unreserve(address, nbytes)
        self._status("munmap", nbytes, address, nbytes)
        self._ledger.unreserved(address)

    def create(self, nbytes: int) -> int:
        self._ledger.check_size(nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._address("mmap", nbytes, None, nbytes, _READ_WRITE, flags, -1, 0)
        try:
            if nbytes >= _HUGE_PAGE:
                # Advice only: EINVAL on a kernel that has no huge pages changes nothing.
                _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
            # Fault the pages in now, so that what is resident is what was asked for.
            self._status("madvise", nbytes, address, nbytes, _MADV_POPULATE_WRITE)
        except PageDriverError:
            _libc.munmap(address, nbytes)
            raise
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._at[handle] = (address, nbytes)
        self._ledger.created(handle, nbytes)
        return handle

    def release(self, handle: int) -> None:
        self._ledger.check_release(handle)
        address, nbytes = self._at[handle]
        self._status("munmap", nbytes, address, nbytes)
        del self._at[handle]
        self._parked.discard(handle)
        self._ledger.released(handle)

    def map(self, address: int, handle: int) -> None:
        self._ledger.check_map(address, handle)
        source, nbytes = self._at[handle]
        if handle in self._parked:
            self._status("mprotect", nbytes, source, nbytes, _READ_WRITE)
            self._parked.discard(handle)
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        self._address("mremap", nbytes, source, nbytes, nbytes, flags, address)
        self._at[handle] = (address, nbytes)
        self._ledger.mapped(address, handle)

    def unmap(self, handle: int) -> None:
        self._ledger.check_unmap(handle)
        address, nbytes = self._at[handle]
        # Without access the pages do not count against RLIMIT_DATA, so that moving them cannot fail
        # for want of memory: the move needs room for a second mapping of the same size.
        self._status("mprotect", nbytes, address, nbytes, _NO_ACCESS)
        away: int | None = None
        try:
            # DONTUNMAP keeps the range occupied until the reservation covers it again. Without it,
            # another thread's mmap could be given the hole.
            flags = _MREMAP_MAYMOVE | _MREMAP_DONTUNMAP
            away = self._address("mremap", nbytes, address, nbytes, nbytes, flags, None)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            self._address("mmap", nbytes, address, nbytes, _NO_ACCESS, flags, -1, 0)
        except PageDriverError as error:
            try:
                if away is not None:
                    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
                    self._address("mremap", nbytes, away, nbytes, nbytes, flags, address)
                self._status("mprotect", nbytes, address, nbytes, _READ_WRITE)
            except PageDriverError as lost:
                # No PageDriverError: the pages are not as the handle says, so nothing may go on.
                raise RuntimeError(f"{error}; and the pages could not be put back: {lost}") from lost
            raise
        self._at[handle] = (away, nbytes)
        self._parked.add(handle)
        self._ledger.unmapped(handle)

    def synchronize(self) -> None:
        """Nothing runs on the host beside the thread that calls this."""

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

    def _address(self, call: str, nbytes: int, *arguments: int | None) -> int:
        address = getattr(_libc, call)(*arguments)
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
