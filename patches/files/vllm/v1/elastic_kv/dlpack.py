# SPDX-License-Identifier: Apache-2.0
"""Tensors over device memory that is not torch's.

DLPack, the exchange format of tensors, names the device. Other interfaces ask the driver about
the pointer, which fails while nothing is mapped there. Source: dlpack.h, version 0.
"""

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

CPU, CUDA = 1, 2  # kinds of devices
_INT = 0


class _ManagedTensor(ctypes.Structure):
    """DLPack's description of a tensor, and behind it the shape and strides of one dimension."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("own_shape", ctypes.c_int64),
        ("own_strides", ctypes.c_int64),
    ]


_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_libc.free.restype, _libc.free.argtypes = None, (ctypes.c_void_p,)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_NAME = b"dltensor"  # a capsule keeps the pointer, not a copy


def tensor_over(address: int, nbytes: int, device: tuple[int, int]) -> "torch.Tensor":
    """An int8 tensor of shape `[nbytes]` over memory that outlives it, without a copy.

    Args:
        address: Of the first byte.
        nbytes: The length.
        device: DLPack's kind of device, and which one of them.

    """
    from torch.utils.dlpack import from_dlpack

    # The description is the C library's, and its deleter is `free`, since torch may call that on any thread, and
    # as the process ends, when a function of Python's cannot run any more.
    at = _libc.malloc(ctypes.sizeof(_ManagedTensor))
    if not at:
        raise MemoryError("no memory for the description of a tensor")
    deleter = ctypes.cast(_libc.free, ctypes.c_void_p).value
    shape, strides = at + _ManagedTensor.own_shape.offset, at + _ManagedTensor.own_strides.offset
    described = _ManagedTensor(address, *device, 1, _INT, 8, 1, shape, strides, 0, None, deleter, nbytes, 1)
    ctypes.memmove(at, ctypes.addressof(described), ctypes.sizeof(described))
    try:
        tensor: torch.Tensor = from_dlpack(_new_capsule(at, _NAME, None))
    except BaseException:  # whatever it is, torch has not taken the description; it is raised again
        _libc.free(at)
        raise
    return tensor
