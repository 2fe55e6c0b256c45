"""Page drivers for tests, and what tests ask the system about memory."""

from collections import Counter
from pathlib import Path

from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriver, PageDriverError

# Every driver that has to keep the contract, by the name that a failing test shows.
CONTRACT = {"host": HostPageDriver}

CALLS = ("reserve", "create", "map", "unmap", "release", "unreserve", "synchronize")


class LargeGranule(HostPageDriver):
    """The host driver with granules of CUDA's size."""

    granule = 2 << 20


class FaultyDriver(PageDriver):
    """Passes every call on to `inner`, counts it, and fails the ones that `fail` names."""

    name = "faulty"

    def __init__(self, inner: PageDriver) -> None:
        self.inner = inner
        self.device = inner.device
        self.calls: Counter[str] = Counter()
        self.live: set[int] = set()  # handles that were created and not released
        self._fail: dict[str, tuple[int, bool]] = {}
        self.out_of_memory = False

    def fail(self, call: str, number: int = 1, always: bool = False) -> None:
        """Fail the `number`-th `call` from now on, counted from 1, and with `always` every later one."""
        self._fail[call] = (self.calls[call] + number, always)

    def mend(self) -> None:
        self._fail.clear()

    def _count(self, call: str, nbytes: int = 0) -> None:
        self.calls[call] += 1
        number, always = self._fail.get(call, (0, False))
        if self.calls[call] == number or (always and self.calls[call] > number):
            kind = OutOfMemoryError if self.out_of_memory else PageDriverError
            raise kind(call, "made to fail", nbytes, self.device)

    @property
    def granule(self):
        return self.inner.granule

    @property
    def max_mappings(self):
        return self.inner.max_mappings

    def reserve(self, nbytes):
        self._count("reserve", nbytes)
        return self.inner.reserve(nbytes)

    def unreserve(self, address, nbytes):
        self._count("unreserve", nbytes)
        self.inner.unreserve(address, nbytes)

    def create(self, nbytes):
        self._count("create", nbytes)
        handle = self.inner.create(nbytes)
        self.live.add(handle)
        return handle

    def release(self, handle):
        self._count("release")
        self.inner.release(handle)
        self.live.discard(handle)

    def map(self, address, handle):
        self._count("map")
        self.inner.map(address, handle)

    def unmap(self, handle):
        self._count("unmap")
        self.inner.unmap(handle)

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


def resident_bytes() -> int:
    """The process's resident set, as the system tells it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
