"""The CUDA page driver over the stand-in for NVIDIA's library, and a vLLM plugin that gives it to a CPU engine.

The plugin is loaded where this directory is on PYTHONPATH. The engine's configuration stays that of a CPU.

STAND_IN_BYTES: memory of the device.
STAND_IN_GRANULE: bytes that can be mapped at least.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from vllm.v1.elastic_kv import page_driver
from vllm.v1.elastic_kv.cuda_driver import CudaPageDriver
from vllm.v1.elastic_kv.dlpack import CPU

SOURCE = Path(__file__).with_name("cuda.c")


@cache
def library() -> ctypes.CDLL:
    """The stand-in, compiled and loaded. From now on NVIDIA's bindings find it and nothing else."""
    import triton.backends.nvidia

    folder = Path(tempfile.gettempdir()) / f"cuda-stand-in-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not built.exists():
        include = Path(triton.backends.nvidia.__path__[0]) / "include"
        part = built.with_suffix(f".{os.getpid()}")
        options = ["-Wall", "-Wextra", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["cc", *options, f"-I{include}", "-o", part, SOURCE, "-lpthread"], check=True)
        part.rename(built)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it is about the machine's own
    loaded = ctypes.CDLL(str(built))
    loaded.stand_in_used.restype = ctypes.c_size_t
    loaded.stand_in_name.restype = ctypes.c_char_p
    loaded.stand_in_reset.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    return loaded


def reset(nbytes: int = 1 << 30, granule: int = 4096) -> None:
    """A device of `nbytes`, without faults."""
    library().stand_in_reset(nbytes, granule)


def forget() -> None:
    """Drop what earlier tests left behind, some of which leave an arena broken on purpose."""
    library().stand_in_forget()


def fail(call: str, number: int = 1, code: int = 1) -> None:
    """Fail the `number`-th `call` from now on. The code is CUDA_ERROR_INVALID_VALUE, or 2: out of memory."""
    library().stand_in_fail(call.encode(), number, code)


def delay(call: str, number: int = 1, milliseconds: int = 50) -> None:
    """Let the `number`-th `call` from now on take so long. Calls of other threads go on meanwhile."""
    library().stand_in_delay(call.encode(), number, milliseconds)


def calls(call: str) -> int:
    """How often `call` was made since the last reset."""
    return library().stand_in_calls(call.encode())


def all_calls() -> dict[str, int]:
    """How often each call was made since the last reset, of those that were."""
    stand_in = library()
    names = [stand_in.stand_in_name(number).decode() for number in range(stand_in.stand_in_count())]
    return {name: count for name in names if (count := calls(name))}


def submit(ordinal: int = 0) -> None:
    """Let a device work, on all that it can touch now, until somebody waits for it."""
    library().stand_in_submit(ordinal)


def enter(ordinal: int) -> None:
    """The calling thread has the context of a device and no other; none with -1."""
    library().stand_in_enter(ordinal)


def current() -> int:
    """The device whose context the calling thread has, or -1."""
    return library().stand_in_current()


def wait() -> None:
    """Wait for the work of the device whose context the calling thread has, as a stream's `synchronize` does."""
    assert library().cuCtxSynchronize() == 0


def retained(ordinal: int = 0) -> int:
    """How often the context of a device is held."""
    return library().stand_in_retained(ordinal)


def left() -> tuple[int, int, int, int]:
    """What the device has: reservations, mappings, handles, bytes."""
    stand_in = library()
    counts = (stand_in.stand_in_reservations(), stand_in.stand_in_mappings(), stand_in.stand_in_handles())
    return (*counts, stand_in.stand_in_used(0) + stand_in.stand_in_used(1))


class StandInDriver(CudaPageDriver):
    """As the driver is, but the device's memory is the host's: tensors are CPU tensors, and zeroing has no stream."""

    def __init__(self, ordinal: int = 0, keep_bytes: int = 0, shareable: bool = False) -> None:
        library()
        super().__init__(ordinal, keep_bytes, shareable)
        self._dl_device = (CPU, 0)

    def _zero(self, places):
        self._fill(places)


def register() -> None:
    if getattr(page_driver, "stand_in", False):
        return
    page_driver.stand_in = True
    reset(int(os.environ.get("STAND_IN_BYTES", 1 << 30)), int(os.environ.get("STAND_IN_GRANULE", 4096)))

    def make_driver(name, device_type, ordinal=0, keep_bytes=0):
        return StandInDriver(ordinal or 0, keep_bytes)

    page_driver.make_driver = make_driver
