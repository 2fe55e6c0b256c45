"""The store kernel writes the bytes that the format says, and no others."""

import pytest
import torch

from kernels.caches import FORMATS, Cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_bytes(name, dtype):
    """Of usual rows, a row of zeros, one of equal values, very large and very small ones; in blocks in any order.
    Unwritten bytes, NaN, count too. The sign of zero does not.
    """
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 7, 1, 24, generator=rng) * torch.tensor([1, 1, 1, 1, 1e3, 1e-5, 1])[:, None, None]
    keys[2], values[2] = 0, 0
    keys[3], values[3] = 0.3, -0.7
    slots = torch.tensor([5 * 16 + 3, 16, 17, 2 * 16 + 15, 8 * 16, 31, 11 * 16 + 8])
    caches = [Cache(heads=1, head_size=24, name=name, dtype=dtype) for _ in range(2)]
    for write in (caches[0].store, caches[1].write):
        write(keys.to(dtype), values.to(dtype), slots)
    for part in ("keys", "values", "key_scales", "value_scales"):
        stored, written = (getattr(cache.views, part) for cache in caches)
        if stored is not None:
            torch.testing.assert_close(stored.double(), written.double(), atol=0, rtol=0, equal_nan=True)


def test_rows_of_a_larger_tensor():
    """As a model gives them: keys and values are parts of one projection, and padding comes last."""
    projected = torch.randn(6, 5, 32, generator=torch.Generator().manual_seed(0))
    keys, values = projected[:, 1:3], projected[:, 3:]
    slots = torch.tensor([40, 41, 42, 100, -1, -1])
    stored, written = Cache(), Cache()
    stored.store(keys, values, slots)
    written.write(keys[:4], values[:4], slots[:4])
    assert torch.equal(stored.buffer, written.buffer)
