# SPDX-License-Identifier: Apache-2.0
"""What a page driver does, and how it fails."""

import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


class PageDriverError(RuntimeError):
    """A call to the system or the driver failed.

    Attributes:
        call: The call that failed, by the name its manual page has.
        code: The error code, by name.
        nbytes: The bytes that the call was about.
        device: Where, e.g. `host` or `cuda:0`.

    """

    def __init__(self, call: str, code: str, nbytes: int, device: str, hint: str = "") -> None:
        super().__init__(f"{call} of {nbytes} bytes on {device} failed: {code}{hint and f' ({hint})'}")
        self.call, self.code, self.nbytes, self.device = call, code, nbytes, device


class OutOfMemoryError(PageDriverError):
    """There is no memory, or no address space, for the call. A later call may succeed."""


@contextmanager
def torch_errors(call: str, nbytes: int, device: str) -> Iterator[None]:
    """What torch raises meanwhile, as the error of a page driver, with the name of torch's for a code."""
    import torch

    try:
        yield
    except PageDriverError:
        raise
    except RuntimeError as error:
        kind = OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else PageDriverError
        raise kind(call, type(error).__name__, nbytes, device, str(error)) from error


class PageDriver(ABC):
    """Reserves address ranges and moves physical pages behind them; nothing else.

    The rules are those of CUDA's virtual memory management (cuMemAddressReserve,
    cuMemCreate, cuMemMap, cuMemUnmap, cuMemRelease), for every driver:

    - Addresses and sizes are multiples of `granule`.
    - A handle is mapped whole, to at most one address, and unmapped whole.
    - New pages read as zero. Reserved addresses without pages may not be touched.
    - A handle must be unmapped before it is released.
    - `unmap` does not wait for work that uses the pages: call `synchronize` first.

    A call that breaks one of them raises ValueError and changes nothing; `Ledger` sees to that.

    Threads: every call may come from any thread. `create`, `release` and `synchronize` run beside
    every other call, as long as no two calls are about the same handle at a time. All others come
    one at a time.
    """

    name: ClassVar[str]
    # Whether `split` works, so that a part of what one handle holds can be unmapped and released.
    divisible: ClassVar[bool]
    device: str

    @property
    @abstractmethod
    def granule(self) -> int:
        """Bytes that can be mapped at least."""

    @property
    @abstractmethod
    def max_mappings(self) -> int | None:
        """Pieces that a reservation can be cut into, or None where nothing limits them."""

    @abstractmethod
    def reserve(self, nbytes: int) -> int:
        """Reserve `nbytes` of addresses, without memory. Returns the first address."""

    @abstractmethod
    def unreserve(self, address: int, nbytes: int) -> None:
        """Give back a whole reservation in which nothing is mapped."""

    @abstractmethod
    def create(self, nbytes: int, address: int = 0) -> int:
        """Take `nbytes` of physical memory. Returns a handle.

        Args:
            nbytes: The size.
            address: Where it is going to be mapped, if that is known: some drivers then
                map it faster. It may still be mapped anywhere.

        Raises:
            OutOfMemoryError: The device has no such memory now.

        """

    @abstractmethod
    def release(self, handle: int) -> None:
        """Give the memory of an unmapped handle back to the device."""

    @abstractmethod
    def map(self, address: int, handle: int, usable: bool = True) -> None:
        """Put the pages of `handle` behind `address`.

        They are readable and writable, unless `usable` is false: then `make_usable` has to be
        called before they are touched. That is for several handles, and costs fewer calls.
        """

    @abstractmethod
    def make_usable(self, handles: Iterable[int]) -> None:
        """Let pages be read and written that were mapped without. Where it fails, they stay mapped."""

    @abstractmethod
    def unmap(self, handle: int) -> None:
        """Take the pages of `handle` away from its address, which stays reserved."""

    @abstractmethod
    def split(self, handle: int, nbytes: int) -> int:
        """Cut a handle in two. Its first `nbytes` stay with it; a new handle, which is
        returned, has the rest. The pages stay where they are, mapped or not.

        This changes the books and nothing else, so that it does not fail. Drivers that
        are not `divisible` refuse it with ValueError.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until no submitted work can touch mapped pages any more."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Memory that `create` could get at this moment."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory that the device has."""

    @abstractmethod
    def reported_bytes(self, address: int, nbytes: int) -> int:
        """Physical memory behind a range, as the system or the driver tells it."""

    @abstractmethod
    def tensor(self, address: int, nbytes: int, on_free: Callable[[], None] | None = None) -> "torch.Tensor":
        """An int8 tensor of shape `[nbytes]` over the range, without a copy.

        It sees every later `map` and `unmap`. `on_free` is called when the last
        tensor that shares its storage is gone, but not when the process ends.
        """


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


def check_driver(name: str, device_type: str) -> str:
    """Which page driver `name` is on a device (`auto`: the one for `device_type`). Loads no driver.

    Raises:
        ValueError: There is none for that device.

    """
    if name == "auto":
        name = {"cpu": "host", "cuda": "cuda"}.get(device_type, device_type)
    if (name, device_type) not in (("host", "cpu"), ("cuda", "cuda")):
        raise ValueError(
            f"The elastic KV cache has no page driver {name!r} for device type {device_type!r}; "
            "it has 'host' for 'cpu' and 'cuda' for 'cuda'."
        )
    if device_type == "cuda":
        import torch

        if torch.version.hip is not None:  # torch and vLLM call AMD's GPUs 'cuda' as well
            raise ValueError("The elastic KV cache has no page driver for ROCm: 'cuda' is for NVIDIA's driver.")
    return name


def make_driver(name: str, device_type: str, ordinal: int = 0, keep_bytes: int = 0) -> PageDriver:
    """The page driver called `name`, as `check_driver` has it.

    Args:
        name: `auto`, `host` or `cuda`.
        device_type: The type of torch's device.
        ordinal: The index of torch's device.
        keep_bytes: Released device memory to keep at hand. The host driver keeps none.

    Raises:
        ValueError: There is none for that device.

    """
    if check_driver(name, device_type) == "host":
        from .host_driver import HostPageDriver

        return HostPageDriver()
    from .cuda_driver import CudaPageDriver

    return CudaPageDriver(ordinal, keep_bytes)


def node_name() -> str:
    """Names the machine whose memory a host driver takes, equal on ranks that share it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{os.uname().nodename}/{file.read().strip()}"
