# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's driver API for one device: its context on each thread, and its error codes as exceptions.

The bindings are imported when an object is made, not with this module.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .page_driver import OutOfMemoryError, PageDriverError


class CudaCalls:
    """Calls the driver in the primary context of a device, which is retained meanwhile. torch works in it as well."""

    def __init__(self, ordinal: int) -> None:
        """Take hold of a device.

        Args:
            ordinal: Which one, by the driver's numbering, which begins with the first of CUDA_VISIBLE_DEVICES.

        Raises:
            ValueError: There is no NVIDIA driver here, or no such device.
            PageDriverError: The driver refuses.

        """
        try:
            from cuda.bindings import driver as api
        except ImportError as error:
            raise ValueError(f"The page driver 'cuda' needs the package cuda-bindings: {error}.") from error
        self.api: Any = api
        self.name = f"cuda:{ordinal}"
        self._thread = threading.local()
        self.device = self._find(ordinal)
        self.context = self("cuDevicePrimaryCtxRetain", 0, self.device)
        # Not at exit: other threads and libraries may still compute then.
        weakref.finalize(self, api.cuDevicePrimaryCtxRelease, self.device).atexit = False

    def __call__(self, call: str, nbytes: int, *arguments: Any) -> Any:
        """Call the driver. Returns what it gives: nothing, a value, or several."""
        code, *values = getattr(self.api, call)(*arguments)
        results = self.api.CUresult
        if code != results.CUDA_SUCCESS:
            kind = OutOfMemoryError if code == results.CUDA_ERROR_OUT_OF_MEMORY else PageDriverError
            raise kind(call, getattr(code, "name", str(code)), nbytes, self.name)
        return values[0] if len(values) == 1 else values

    def enter(self) -> None:
        """See to it that the calling thread has a context.

        Which one it is does not matter to calls that name the device or an address, so it is enough to look once,
        and an attach makes no more calls for it.
        """
        if not getattr(self._thread, "entered", False):
            if not int(self("cuCtxGetCurrent", 0)):
                self("cuCtxSetCurrent", 0, self.context)
            self._thread.entered = True

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """The calling thread works in the device's context, and is back in its own, or in none, afterwards."""
        if int(self("cuCtxGetCurrent", 0)) == int(self.context):
            yield
            return
        self("cuCtxPushCurrent", 0, self.context)
        try:
            yield
        finally:
            self("cuCtxPopCurrent", 0)

    def _find(self, ordinal: int) -> Any:
        """The driver's own name for a device."""
        try:
            self("cuInit", 0, 0)
        except PageDriverError as error:
            if error.code == "CUDA_ERROR_NO_DEVICE":
                raise ValueError("The page driver 'cuda' needs an NVIDIA GPU, and the driver finds none.") from error
            raise
        except RuntimeError as error:  # the bindings' own, when they load the library
            raise ValueError(
                f"The page driver 'cuda' needs NVIDIA's driver library, and there is none: {error}"
            ) from error
        count = self("cuDeviceGetCount", 0)
        if not 0 <= ordinal < count:
            raise ValueError(f"The page driver 'cuda' finds {count} devices, so that there is no device {ordinal}.")
        return self("cuDeviceGet", 0, ordinal)
