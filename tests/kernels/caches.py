"""A paged cache for tests, in host memory with holes in it, and a batch that uses it."""

import ctypes
import mmap
from dataclasses import dataclass, field

import torch
from vllm.v1.elastic_kv.kernels.formats import Format, row_bytes, views_of
from vllm.v1.elastic_kv.kernels.launch import Features, Guard, Scratch, paged_attention
from vllm.v1.elastic_kv.kernels.store import store

from kernels.reference import attention, quantise, quantise_int4

NAN_BYTE = -1  # 0xff..: NaN in float16, float32 and both kinds of fp8
UNUSED = 2**31 - 1  # what table entries beyond a sequence's length name
# Format, dtype of the elements in the cache, where it is not the model's.
FORMATS = {
    "native": (Format.NATIVE, None),
    "fp8_e4m3": (Format.TENSOR, torch.float8_e4m3fn),
    "fp8_e5m2": (Format.TENSOR, torch.float8_e5m2),
    "int8": (Format.TOKEN_HEAD, torch.int8),
    "fp8_token_head": (Format.TOKEN_HEAD, torch.float8_e4m3fn),
    "int4": (Format.INT4, torch.uint8),
}
TENSOR_SCALES = (torch.tensor([0.05]), torch.tensor([0.02]))
# Two roundings to the model's dtype, of the softmax's weights and of the output, and the order of sums. Values are
# of the order of 1, so this is absolute.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4 * 2**-11, torch.bfloat16: 4 * 2**-8}


def encode(x, name, tensor_scale):
    """What a format holds of keys or values, x, [..., d]: its elements, its scale words, and what they stand for."""
    format, dtype = FORMATS[name]
    if format is Format.NATIVE:
        return x, None, x.float()
    if format is Format.TENSOR:
        largest = torch.finfo(dtype).max
        elements = (x.float() / tensor_scale).clamp(-largest, largest).to(dtype)
        return elements, None, elements.float() * tensor_scale
    if format is Format.TOKEN_HEAD:
        scale, elements = quantise(x, dtype)
        return elements, scale[..., 0], elements.float() * scale
    step, minimum, steps = quantise_int4(x)
    low, high = steps.to(torch.uint8).chunk(2, -1)
    step_bits, minimum_bits = (n[..., 0].half().view(torch.int16).int() for n in (step, minimum))
    return low | high << 4, step_bits & 0xFFFF | minimum_bits << 16, minimum + step * steps


@dataclass
class Cache:
    """One layer's cache of `blocks` blocks. Every byte that nothing was written to is NaN."""

    blocks: int = 12
    heads: int = 2
    block_size: int = 16
    head_size: int = 32
    name: str = "native"
    dtype: torch.dtype = torch.float32
    buffer: torch.Tensor | None = None  # int8, instead of one of our own
    block_stride: int | None = None  # bytes
    resident: torch.Tensor = field(init=False)

    def __post_init__(self):
        format, element = FORMATS[self.name]
        element = element or self.dtype
        content = 2 * row_bytes(format, self.head_size, element)
        stride = self.block_stride or self.heads * self.block_size * content
        if self.buffer is None:
            self.buffer = torch.full([self.blocks * stride], NAN_BYTE, dtype=torch.int8)
        shape = (self.blocks, self.heads, self.block_size, content)
        raw = torch.as_strided(self.buffer, shape, (stride, self.block_size * content, content, 1))
        self.views = views_of(raw, format, self.head_size, element)
        self.resident = torch.ones(self.blocks, dtype=torch.uint8)

    @property
    def scales(self):
        return TENSOR_SCALES if self.views.format is Format.TENSOR else None

    def store(self, keys, values, slots):
        """With the kernel."""
        store(keys, values, self.views, slots, self.resident, self.scales)

    def write(self, keys, values, slots):
        """The same without it, which is faster. Returns what a reader makes of the keys and of the values."""
        block, at = slots // self.block_size, slots % self.block_size
        views, read = self.views, []
        for x, rows, words, scale in (
            (keys, views.keys, views.key_scales, TENSOR_SCALES[0]),
            (values, views.values, views.value_scales, TENSOR_SCALES[1]),
        ):
            elements, scales, meant = encode(x, self.name, scale)
            if rows.element_size() == 1:
                rows, elements = rows.view(torch.uint8), elements.view(torch.uint8)
            rows[block, :, at] = elements
            if words is not None:
                words[block, :, at] = scales
            read.append(meant)
        return read


@dataclass
class Batch:
    """Sequences in a cache: how many positions each has, and how many of them are new."""

    cache: Cache
    lengths: list[int]
    new: list[int]
    group: int = 2
    seed: int = 0
    columns: int = 16

    def __post_init__(self):
        rng = torch.Generator().manual_seed(self.seed)
        cache = self.cache
        self.scale = cache.head_size**-0.5
        self.keys, self.values = (
            [torch.randn(n, cache.heads, cache.head_size, generator=rng).to(cache.dtype) for n in self.lengths]
            for _ in range(2)
        )
        self.q = torch.randn(sum(self.new), cache.heads * self.group, cache.head_size, generator=rng).to(cache.dtype)
        free = (torch.randperm(cache.blocks - 1, generator=rng) + 1).tolist()
        self.table = torch.full((len(self.lengths), self.columns), UNUSED, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            for entry in range(-(-length // cache.block_size)):
                self.table[row, entry] = free.pop()
        self.starts = torch.tensor([0, *torch.tensor(self.new).cumsum(0).tolist()], dtype=torch.int32)
        pairs = zip(self.keys, self.values, strict=True)
        self.read = [cache.write(*pair, self.slots(row)) for row, pair in enumerate(pairs)]

    def slots(self, row):
        positions = torch.arange(self.lengths[row])
        size = self.cache.block_size
        return self.table[row, positions // size].long() * size + positions % size

    def run(self, splits=1, features=Features(), faults=None, tiles=None):  # noqa: B008
        """The kernel's output; rows it leaves out are NaN."""
        out = torch.full_like(self.q, torch.nan)
        scratch = Scratch.make(len(self.q) * self.q.shape[1] * splits, self.q.shape[2], self.q.device)
        scratch.parts.fill_(torch.nan)
        scratch.stats.fill_(torch.nan)
        paged_attention(
            self.q,
            self.cache.views,
            out,
            self.table,
            torch.tensor(self.lengths, dtype=torch.int32),
            self.starts,
            max(self.new),
            self.scale,
            Guard(self.cache.resident, faults),
            features=features,
            tensor_scales=self.cache.scales,
            splits=splits,
            scratch=scratch,
            tiles=tiles,
        )
        return out

    def expected(self, features=Features(), live=None):  # noqa: B008
        """What it should be. `live`: for each sequence, bool [positions]."""
        outs = []
        for row, (keys, values) in enumerate(self.read):
            q = self.q[self.starts[row] : self.starts[row + 1]]
            if not len(keys):
                outs.append(torch.zeros_like(q, dtype=torch.float32))
                continue
            outs.append(
                attention(
                    q,
                    keys,
                    values,
                    self.scale,
                    features.window,
                    features.soft_cap,
                    features.sinks,
                    features.slopes,
                    True if live is None else live[row],
                )
            )
        return torch.cat(outs)

    def check(self, splits=1, features=Features(), tolerance=None):  # noqa: B008
        """Compare the kernel with the reference; no fault is counted."""
        faults = torch.zeros(len(self.lengths), dtype=torch.int32)
        out, expected = self.run(splits, features, faults), self.expected(features)
        if tolerance is None:
            tolerance = TOLERANCE[self.cache.dtype]
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=0)
        assert not faults.any()


class Holes:
    """A large range of addresses of which only the pages that are opened can be touched: elsewhere the process dies."""

    def __init__(self, nbytes):
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.tensor = torch.frombuffer(self._map, dtype=torch.int8)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._protect(0, nbytes, mmap.PROT_READ & 0)

    def _protect(self, offset, nbytes, access):
        start = (self._address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(self._address + offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        result = self._libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), access)
        assert result == 0, ctypes.get_errno()

    def open(self, offset, nbytes):
        self._protect(offset, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self.tensor[offset : offset + nbytes] = NAN_BYTE

    def close(self, offset, nbytes):
        self._protect(offset, nbytes, 0)
