"""Page drivers for tests, and what tests ask the system about memory."""

import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.cuda_stand_in.cuda_stand_in import StandInDriver, reset
from vllm.v1.elastic_kv.cuda_driver import CudaPageDriver
from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriver, PageDriverError


class Indivisible(HostPageDriver):
    """The host driver with handles that cannot be cut, as on CUDA."""

    divisible = False

    def split(self, handle, nbytes):
        raise ValueError("handles of this driver cannot be cut")


def needs_stand_in() -> None:
    """Skip the test where NVIDIA's library is loaded already: a process has one libcuda.so.1."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, whose library the stand-in cannot replace")


def stand_in() -> StandInDriver:
    """The CUDA driver over a device that has pages of the host's size, so that tests are quick."""
    needs_stand_in()
    reset(granule=4096)
    return StandInDriver()


def real_cuda() -> PageDriver:
    """The CUDA driver over NVIDIA's library."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU, or this torch has no CUDA")
    torch.cuda.init()
    return CudaPageDriver(torch.cuda.current_device())


# Every driver that has to keep the contract, by the name that a failing test shows.
CONTRACT = {"host": HostPageDriver, "indivisible": Indivisible, "cuda over the stand-in": stand_in, "cuda": real_cuda}
AT_HAND = ["cuda" if torch.cuda.is_available() else "cuda over the stand-in", "host", "indivisible"]


def in_host_memory(driver: PageDriver) -> bool:
    """Whether what the driver maps can be seen in the process's own mappings."""
    inner = getattr(driver, "inner", driver)
    return not isinstance(inner, CudaPageDriver) or isinstance(inner, StandInDriver)


class LargeGranule(HostPageDriver):
    """The host driver with granules of CUDA's size."""

    granule = 2 << 20


class FaultyDriver(PageDriver):
    """Passes every call on to `inner`, counts it, and fails the ones that `fail` names."""

    name = "faulty"

    def __init__(self, inner: PageDriver) -> None:
        self.inner = inner
        self.divisible = inner.divisible
        self._lock = threading.Lock()  # the arena calls from two threads
        self.device = inner.device
        self.calls: Counter[str] = Counter()
        self.live: set[int] = set()  # handles that were created and not released
        self._fail: dict[str, tuple[int, bool]] = {}
        self._held: dict[str, threading.Event] = {}
        self.out_of_memory = False
        self.max_mappings = inner.max_mappings

    def fail(self, call: str, number: int = 1, always: bool = False) -> None:
        """Fail the `number`-th `call` from now on, counted from 1, and with `always` every later one."""
        self._fail[call] = (self.calls[call] + number, always)

    def hold(self, call: str) -> None:
        """Let every `call` wait until `go_on`."""
        self._held[call] = threading.Event()

    def go_on(self) -> None:
        for event in self._held.values():
            event.set()
        self._held.clear()

    def mend(self) -> None:
        self._fail.clear()
        self.go_on()

    def _count(self, call: str, nbytes: int = 0) -> None:
        with self._lock:
            self.calls[call] += 1
            count = self.calls[call]
        if call in self._held:
            assert self._held[call].wait(60)
        number, always = self._fail.get(call, (0, False))
        if count == number or (always and count > number):
            kind = OutOfMemoryError if self.out_of_memory else PageDriverError
            raise kind(call, "made to fail", nbytes, self.device)

    @property
    def granule(self):
        return self.inner.granule

    max_mappings = None  # can be set

    def reserve(self, nbytes):
        self._count("reserve", nbytes)
        return self.inner.reserve(nbytes)

    def unreserve(self, address, nbytes):
        self._count("unreserve", nbytes)
        self.inner.unreserve(address, nbytes)

    def create(self, nbytes, address=0):
        self._count("create", nbytes)
        handle = self.inner.create(nbytes, address)
        self.live.add(handle)
        return handle

    def release(self, handle):
        self._count("release")
        self.inner.release(handle)
        self.live.discard(handle)

    def map(self, address, handle, usable=True):
        self._count("map")
        self.inner.map(address, handle, usable)

    def make_usable(self, handles):
        self._count("make_usable")
        self.inner.make_usable(handles)

    def unmap(self, handle):
        self._count("unmap")
        self.inner.unmap(handle)

    def split(self, handle, nbytes):
        self._count("split", nbytes)
        rest = self.inner.split(handle, nbytes)
        self.live.add(rest)
        return rest

    def synchronize(self):
        self._count("synchronize")
        self.inner.synchronize()

    def available_bytes(self):
        return self.inner.available_bytes()

    def total_bytes(self):
        return self.inner.total_bytes()

    def reported_bytes(self, address, nbytes):
        return self.inner.reported_bytes(address, nbytes)

    def tensor(self, address, nbytes, on_free=None):
        return self.inner.tensor(address, nbytes, on_free)


def mappings(address: int = 0, nbytes: int = 1 << 63) -> list[tuple[int, int, str]]:
    """The process's mappings in a range, as start, end and permissions."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if start < address + nbytes and end > address:
            found.append((start, end, permissions))
    return found


def mapping_flags() -> list[tuple[int, list[str]]]:
    """First address and flags of each of the process's mappings."""
    found, address = [], 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if name == "VmFlags:":
            found.append((address, fields))
        elif not name.endswith(":"):
            address = int(name.split("-")[0], 16)
    return found


def resident_bytes() -> int:
    """The process's resident set, as the system tells it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
