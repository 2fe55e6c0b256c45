"""What the driver, or the system, says of the memory behind the cache."""

from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pynvml

from elastic_tools.smoke.client import Client
from elastic_tools.storm.memory import cache_ranges, resident_in

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# What a driver keeps for itself comes and goes with handles; what runs beside the server is its user's to stop.
NVML_TOLERANCE = 64 << 20


@dataclass(frozen=True)
class Meter:
    """One way to read the memory. `read` gives bytes, `tolerance` is what a change of them may be off."""

    name: str
    read: Callable[[], int]
    tolerance: int = 0


def meter(client: Client) -> Meter:
    """The closest look that can be had at this server's memory."""
    local = httpx.URL(str(client.http.base_url)).host in LOOPBACK
    if client.state()["driver"] == "cuda" and local and gpus():
        return Meter(f"NVML, {gpus()} GPUs", used_on_gpus, NVML_TOLERANCE)
    ranges = cache_ranges(client.log) if client.log else {}
    if ranges:
        return Meter(
            f"smaps of {len(ranges)} processes",
            lambda: sum(resident_in(pid, first, last) for pid, (first, last) in ranges.items()),
        )
    return Meter("as the server has it from the system", lambda: reported(client))


def reported(client: Client) -> int:
    """Bytes behind the cache, over all ranks, as the server has them from the system or the driver."""
    return sum(rank["reported_bytes"] for rank in client.state()["ranks"])


def gpus() -> int:
    """How many GPUs NVML knows; 0 where it is not there."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def used_on_gpus() -> int:
    """Bytes in use on all GPUs together."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(gpus())]
    return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
