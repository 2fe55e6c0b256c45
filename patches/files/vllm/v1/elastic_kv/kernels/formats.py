# SPDX-License-Identifier: Apache-2.0
"""How keys and values lie in a block, for each of vLLM's KV cache dtypes that the kernels know."""

import math
from dataclasses import dataclass
from enum import IntEnum

import torch

SCALE_BYTES = 4  # of a key or a value with a scale of its own


class Format(IntEnum):
    """What the cache holds. The kernels take it as a constant."""

    NATIVE = 0  # float16, bfloat16 or float32, as the model computes
    TENSOR = 1  # fp8, with one scale for all keys of a layer and one for all values
    TOKEN_HEAD = 2  # int8 or fp8, with a float32 scale for each token and head
    INT4 = 3  # two values a byte, with a float16 step and a float16 minimum for each token and head


@dataclass(frozen=True)
class CacheViews:
    """One layer's cache as the kernels take it: views of the same bytes.

    `keys` and `values` are `[blocks, kv_heads, block_size, row]` and have equal strides, the values
    behind the keys; a row is a head's elements, or half as many bytes in INT4. The dimensions of a head lie in
    order; in INT4 the first half of them lies in the low nibbles and the second in the high ones.
    `key_scales` and `value_scales` are `[blocks, kv_heads, block_size]`: float32, or in INT4
    int32 words with the step in the low and the minimum in the high half. None in the other formats.
    """

    format: Format
    head_size: int
    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def scales(
        self, tensor_scales: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the kernels scale keys and values by: one number each where the format is TENSOR."""
        if self.format is not Format.TENSOR:
            return self.key_scales, self.value_scales
        if tensor_scales is None:
            raise ValueError("this cache has one scale for all keys and one for all values, and they are not given")
        return tensor_scales

    @property
    def value_offset(self) -> int:
        """From the keys to the values, in elements."""
        return int(self.values.storage_offset() - self.keys.storage_offset())

    @property
    def unit(self) -> int:
        """Elements, up to 16, that all rows begin at a multiple of: as wide as a load of them may be."""
        return math.gcd(16, self.value_offset, *self.keys.stride()[:3])

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """Of blocks, heads and positions; zero where no scales are in the cache."""
        return (0, 0, 0) if self.key_scales is None else self.key_scales.stride()


def row_bytes(format: Format, head_size: int, dtype: torch.dtype) -> int:
    """Bytes that a key or a value takes in the cache, with its scale."""
    if format is Format.INT4:
        return head_size // 2 + SCALE_BYTES
    return head_size * dtype.itemsize + (SCALE_BYTES if format is Format.TOKEN_HEAD else 0)


def views_of(cache: torch.Tensor, format: Format, head_size: int, dtype: torch.dtype) -> CacheViews:
    """Cut a layer's cache into keys, values and scales.

    Args:
        cache: `[blocks, kv_heads, block_size, content]`, in any order of strides but the last
            one, which is 1. The content of a token and head is its key, its value, the key's scale,
            the value's scale: scales between them would leave no row at a multiple of 8 bytes.
        format: What it holds.
        head_size: Elements of a key, and of a value.
        dtype: Of the elements; uint8 in INT4.

    Raises:
        ValueError: The content has another size than that.

    """
    row = row_bytes(format, head_size, dtype)
    content = cache.shape[-1] * cache.element_size()
    if content != 2 * row:
        raise ValueError(f"a key and a value take {2 * row} bytes in this format, the cache has room for {content}")
    elements = cache.view(dtype)
    width = head_size // 2 if format is Format.INT4 else head_size
    keys, values = elements[..., :width], elements[..., width : 2 * width]
    if format in (Format.NATIVE, Format.TENSOR):
        return CacheViews(format, head_size, keys, values)
    words = cache.view(torch.int32 if format is Format.INT4 else torch.float32)
    return CacheViews(format, head_size, keys, values, words[..., -2], words[..., -1])
