# SPDX-License-Identifier: Apache-2.0
"""Pages of an NVIDIA GPU, by the driver's virtual memory management.

A call costs about the same for 2 MiB and for 2 GiB, so handles are large: to attach
is to create and map one handle for each segment, to allow access once for each
contiguous range, and to zero all that is new with one kernel.

Source: CUDA driver API, "Virtual Memory Management" (cuMemCreate and what goes with it).
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .cuda_calls import CudaCalls
from .dlpack import CUDA, tensor_over
from .ledger import Ledger
from .page_driver import OutOfMemoryError, PageDriver, PageDriverError, torch_errors
from .ranges import evenly_spaced, joined

if TYPE_CHECKING:
    import torch


class CudaPageDriver(PageDriver):
    """Memory of one GPU behind the rules of `PageDriver`.

    The device's primary context, which torch works in as well, is retained for the
    life of the driver. A thread that calls and has no context gets it. What is asked of a
    context rather than a device is asked of this one, whichever the thread has, and the thread
    has its own again afterwards. Work that uses pages may be on any stream: `synchronize`
    waits for the whole context.

    With `keep_bytes`, released memory up to that size stays at hand for a `create`
    of the same size. It counts as available, and goes back to the device as soon as a
    `create` finds too little, or by `give_up_kept`.
    """

    name = "cuda"
    divisible = False

    def __init__(self, ordinal: int = 0, keep_bytes: int = 0, shareable: bool = False) -> None:
        """Take hold of a device.

        Args:
            ordinal: Which one, by the driver's numbering, which is torch's as well: it begins
                at 0 with the first of CUDA_VISIBLE_DEVICES.
            keep_bytes: Released memory to keep at hand, at most.
            shareable: Whether handles can be exported as file descriptors.

        Raises:
            ValueError: There is no NVIDIA driver here, or no such device.
            PageDriverError: The driver refuses.

        """
        self._do = CudaCalls(ordinal)
        api = self._do.api
        self.device = self._do.name
        self.card = self._do("cuDeviceGetName", 0, 256, self._do.device).split(b"\0")[0].decode()
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()  # guards the tables below; the driver's own calls need none
        self._native: dict[int, Any] = {}  # handle -> the driver's
        self._sizes: dict[int, int] = {}
        self._unwritten: set[int] = set()  # handles whose pages are to be zeroed before they are used
        self._kept: dict[int, list[Any]] = defaultdict(list)  # bytes -> the driver's handles
        attribute = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._do("cuDeviceGetAttribute", 0, attribute, self._do.device):
            raise ValueError(f"{self.device} has no virtual memory management, which the page driver 'cuda' needs.")
        self._property = api.CUmemAllocationProp()
        self._property.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = ordinal
        if shareable:
            self._property.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._access = api.CUmemAccessDesc()
        self._access.location = self._property.location
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._granule = int(self._do("cuMemGetAllocationGranularity", 0, self._property, smallest))
        self._ledger = Ledger(self._granule)
        self._dl_device = (CUDA, ordinal)
        self._stream: torch.cuda.Stream | None = None  # that zeroes; made when it is needed first
        weakref.finalize(self, _let_go, self._do, self._kept).atexit = False

    @property
    def granule(self) -> int:
        return self._granule

    @property
    def max_mappings(self) -> None:
        return None

    @property
    def kept_bytes(self) -> int:
        """Released memory that is kept at hand."""
        with self._lock:
            return self._count_kept()

    def reserve(self, nbytes: int) -> int:
        self._ledger.check_size(nbytes)
        self._do.enter()
        address = int(self._do("cuMemAddressReserve", nbytes, nbytes, 0, 0, 0))
        self._ledger.reserved(address, nbytes)
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self._ledger.check_unreserve(address, nbytes)
        self._do.enter()
        self._do("cuMemAddressFree", nbytes, address, nbytes)
        self._ledger.unreserved(address)

    def create(self, nbytes: int, address: int = 0) -> int:
        self._ledger.check_size(nbytes)
        self._do.enter()
        with self._lock:
            native = self._kept[nbytes].pop() if self._kept.get(nbytes) else None
        if native is None:
            try:
                native = self._do("cuMemCreate", nbytes, nbytes, self._property, 0)
            except OutOfMemoryError:
                if not self.give_up_kept():
                    raise
                native = self._do("cuMemCreate", nbytes, nbytes, self._property, 0)
        handle = self._ledger.created(nbytes)
        with self._lock:
            self._native[handle], self._sizes[handle] = native, nbytes
            self._unwritten.add(handle)
        return handle

    def release(self, handle: int) -> None:
        self._ledger.check_release(handle)
        self._do.enter()
        native, nbytes = self._native[handle], self._sizes[handle]
        with self._lock:
            keep = self._count_kept() + nbytes <= self._keep_bytes
            if keep:
                self._kept[nbytes].append(native)
        if not keep:
            self._do("cuMemRelease", nbytes, native)
        with self._lock:
            del self._native[handle], self._sizes[handle]
            self._unwritten.discard(handle)
        self._ledger.released(handle)

    def give_up_kept(self) -> int:
        """Give all kept memory back to the device. Returns how much that was, in bytes."""
        self._do.enter()
        given = 0
        while True:
            with self._lock:
                nbytes = next((nbytes for nbytes, handles in self._kept.items() if handles), 0)
                if not nbytes:
                    return given
                native = self._kept[nbytes].pop()
            try:
                self._do("cuMemRelease", nbytes, native)
            except PageDriverError:
                with self._lock:
                    self._kept[nbytes].append(native)
                raise
            given += nbytes

    def map(self, address: int, handle: int, usable: bool = True) -> None:
        self._ledger.check_map(address, handle)
        self._do.enter()
        nbytes = self._sizes[handle]
        self._do("cuMemMap", nbytes, address, nbytes, 0, self._native[handle], 0)
        self._ledger.mapped(address, handle)
        if not usable:
            return
        try:
            self.make_usable([handle])
        except PageDriverError as error:
            try:
                self.unmap(handle)
            except PageDriverError as lost:
                # No PageDriverError: what is mapped is not as the caller believes, so nothing may go on.
                raise RuntimeError(f"{error}; and the pages could not be unmapped: {lost}") from lost
            raise

    def make_usable(self, handles: Iterable[int]) -> None:
        self._do.enter()
        places = {handle: (self._ledger.place(handle), self._sizes[handle]) for handle in handles}
        for address, nbytes in joined(places.values()):
            self._do("cuMemSetAccess", nbytes, address, nbytes, [self._access], 1)
        with self._lock:
            new = [handle for handle in places if handle in self._unwritten]
        if new:
            nbytes = sum(places[handle][1] for handle in new)
            with self._do.in_context(), torch_errors("zero_", nbytes, self.device):
                self._zero(sorted(places[handle] for handle in new))
            with self._lock:
                self._unwritten.difference_update(new)

    def unmap(self, handle: int) -> None:
        self._ledger.check_unmap(handle)
        self._do.enter()
        nbytes = self._sizes[handle]
        self._do("cuMemUnmap", nbytes, self._ledger.place(handle), nbytes)
        self._ledger.unmapped(handle)

    def split(self, handle: int, nbytes: int) -> int:
        raise ValueError("a handle of a CUDA device cannot be cut: cuMemUnmap takes whole mappings only")

    def synchronize(self) -> None:
        """Wait for all streams of the context. The caller has seen to it that none is being captured."""
        with self._do.in_context():
            self._do("cuCtxSynchronize", 0)

    def available_bytes(self) -> int:
        with self._do.in_context():
            return int(self._do("cuMemGetInfo", 0)[0]) + self.kept_bytes

    def total_bytes(self) -> int:
        with self._do.in_context():
            return int(self._do("cuMemGetInfo", 0)[1])

    def reported_bytes(self, address: int, nbytes: int) -> int:
        """Asks the driver about each mapping that there should be, and about each gap between them."""
        reported, at = 0, address
        with self._do.in_context():
            for start, end in self._ledger.pieces(address, address + nbytes):
                if at < start and self._is_mapped(at):
                    reported += self._granule
                reported += (end - start) * self._is_mapped(start)
                at = end
            if at < address + nbytes and self._is_mapped(at):
                reported += self._granule
        return reported

    def tensor(self, address: int, nbytes: int, on_free: Callable[[], None] | None = None) -> "torch.Tensor":
        tensor = tensor_over(address, nbytes, self._dl_device)
        if on_free is not None:
            # torch keeps one Python object for a storage as long as any tensor has it.
            weakref.finalize(tensor.untyped_storage(), on_free).atexit = False
        return tensor

    def _zero(self, places: Sequence[tuple[int, int]]) -> None:
        """Zero places that nobody uses yet, and wait for that alone.

        Not on the stream that computes: the wait would be for the steps in flight as well. Since
        it is waited for here, work that is submitted later, on whatever stream, finds zeros.
        """
        import torch

        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        try:
            with torch.cuda.stream(stream):
                self._fill(places)
            stream.synchronize()
        except BaseException:  # whatever it is, a part may be under way, and the pages are unmapped next
            self.synchronize()
            raise

    def _fill(self, places: Sequence[tuple[int, int]]) -> None:
        import torch

        for group in evenly_spaced(places):
            (first, nbytes), last = group[0], group[-1][0]
            words = self.tensor(first, last + nbytes - first).view(torch.int64)
            step = (group[1][0] - first) // 8 if len(group) > 1 else 0
            torch.as_strided(words, (len(group), nbytes // 8), (step, 1)).zero_()

    def _is_mapped(self, address: int) -> bool:
        # The call for several attributes: that for one fails where an address belongs to nothing.
        attribute = self._do.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
        return bool(self._do("cuPointerGetAttributes", 0, 1, [attribute], address)[0])

    def _count_kept(self) -> int:
        """`kept_bytes`, for callers that hold the lock."""
        return sum(nbytes * len(handles) for nbytes, handles in self._kept.items())


def _let_go(do: CudaCalls, kept: dict[int, list[Any]]) -> None:
    """Give back what a driver has when nobody uses it any more. Nobody is there to tell of a failure."""
    do.api.cuCtxPushCurrent(do.context)
    for handles in kept.values():
        while handles:
            do.api.cuMemRelease(handles.pop())
    do.api.cuCtxPopCurrent()
