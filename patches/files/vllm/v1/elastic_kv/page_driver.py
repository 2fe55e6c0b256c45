# SPDX-License-Identifier: Apache-2.0
"""What a page driver does, and how it fails."""

import os
from abc import ABC, abstractmethod
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
    card: str | None = None  # what the hardware is called, where calls cost what they cost on it

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
