"""Small arenas, and what has to hold of them."""

from pathlib import Path

import torch
from support.cuda_stand_in import cuda_stand_in as device
from vllm.v1.elastic_kv.arena import KVArena
from vllm.v1.elastic_kv.layout import Segment

from .drivers import in_host_memory, mappings

PAGE = 4096
CHUNK_BLOCKS = 2
CAPACITY = 8  # chunks
SEGMENTS = 3
SETTLE_S = 60.0  # far more than it takes


def strides_of(driver) -> tuple[int, ...]:
    """Bytes per block in each segment: a chunk fills whole granules, a block does not."""
    return (driver.granule, driver.granule // 2, 3 * driver.granule // 2)


def make_arena(driver, strides=None, chunk_blocks=CHUNK_BLOCKS, capacity=CAPACITY, **options) -> KVArena:
    segments, offset = [], 0
    for stride in strides or strides_of(driver):
        segments.append(Segment(offset, stride))
        offset += stride * chunk_blocks * capacity
    return KVArena(driver, segments, chunk_blocks, capacity, **options)


def detach(arena: KVArena, chunks, aside: bool) -> None:
    """Detach in the foreground, or in the background and wait for it."""
    if not aside:
        arena.detach(chunks)
        return
    arena.begin_detach(chunks)
    assert arena.settle(SETTLE_S)
    assert arena.ended()
    arena.let_go()


def chunk_bytes(arena: KVArena, chunk: int) -> list[torch.Tensor]:
    """The bytes of a chunk, one tensor per segment."""
    whole = arena.tensor()
    size = arena.chunk_blocks
    return [
        whole[segment.offset + chunk * size * segment.stride : segment.offset + (chunk + 1) * size * segment.stride]
        for segment in arena.segments
    ]


def fill(arena: KVArena, chunk: int, value: int) -> None:
    """Write to a chunk, as a step does: the stand-in is busy with all that is attached until somebody waits for it."""
    for part in chunk_bytes(arena, chunk):
        part.fill_(value)
    if isinstance(getattr(arena.driver, "inner", arena.driver), device.StandInDriver):
        device.submit()


def holds(arena: KVArena, chunk: int, value: int) -> bool:
    return all(bool((part == value).all()) for part in chunk_bytes(arena, chunk))


def holds_or_zero(arena: KVArena, chunk: int, value: int) -> bool:
    """Whether a chunk is as it was, or reads as zero, in each segment: what may be of one that was to leave."""
    return all(bool((part == value).all()) or not bool(part.any()) for part in chunk_bytes(arena, chunk))


def spans(arena: KVArena) -> list[tuple[int, int, str]]:
    """Which addresses of the range can be touched, whatever mappings they are made of. Nothing where a GPU has them."""
    if not in_host_memory(arena.driver):
        return []
    merged: list[tuple[int, int, str]] = []
    for start, end, permissions in mappings(arena.address, arena.nbytes):
        start, end = max(start, arena.address), min(end, arena.address + arena.nbytes)
        if merged and merged[-1][1:] == (start, permissions):
            start = merged.pop()[0]
        merged.append((start, end, permissions))
    return merged


def picture(arena: KVArena) -> dict[str, object]:
    """All that a failed operation has to leave as it was, once the background is quiet."""
    assert arena.settle(SETTLE_S)
    return {
        "attached": arena.attached,
        "prepared": arena.prepared_bytes,
        "unreleased": arena.unreleased_bytes,
        "unknown handles": len(arena.driver.live) - arena.num_handles,
        "resident": arena.resident_bytes,
        "reported": arena.reported_bytes(),
        "spans": spans(arena),
    }


def check(arena: KVArena, prepared: int = 0) -> None:
    """Nothing but attached and `prepared` chunks holds memory, once the background is quiet."""
    assert arena.settle(SETTLE_S)
    assert not arena.busy
    chunks = len(arena.attached)
    assert arena.reported_bytes() == arena.resident_bytes == chunks * arena.chunk_bytes
    assert arena.prepared_bytes == prepared * arena.chunk_bytes
    assert arena.unreleased_bytes == 0
    most = (chunks + prepared) * len(arena.segments)
    assert len(arena.driver.live) == arena.num_handles
    assert arena.num_handles <= most
    assert bool(arena.num_handles) == bool(most)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
