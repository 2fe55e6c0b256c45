# SPDX-License-Identifier: Apache-2.0
"""The elastic cache of one rank. The engine core calls these functions on every
worker, and gets plain values back: what went wrong on a rank is part of its report.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from vllm import envs
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.v1.elastic_kv.arena import KVArena
from vllm.v1.elastic_kv.call_costs import CallCosts, costs_of
from vllm.v1.elastic_kv.layout import segments_of
from vllm.v1.elastic_kv.moves import check_runner, copy_blocks, repoint
from vllm.v1.elastic_kv.page_driver import PageDriver, PageDriverError, make_driver, node_name
from vllm.v1.elastic_kv.residency import Residency, report_faults
from vllm.v1.elastic_kv.torch_memory import spare_bytes

if TYPE_CHECKING:
    import torch
    from vllm.v1.elastic_kv.block_pool import Move
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


class ProbeReport(TypedDict):
    """What a rank's device and driver offer, in bytes."""

    driver: str
    node: str | None  # ranks with the same name share their memory; None: a device of its own
    granule: int
    max_mappings: int | None
    available_bytes: int
    spare_bytes: int  # torch has them from the device, and nobody uses them
    total_bytes: int
    costs: CallCosts | None  # of the driver's calls; None where handles can be cut


class RankReport(TypedDict):
    """How a call went on a rank."""

    rank: int
    error: str | None
    elapsed_ms: float


class RankState(TypedDict):
    """What a rank holds, by its own account and as the system or the driver reports it."""

    rank: int
    resident_bytes: int
    reported_bytes: int
    handles: int
    busy: bool  # pages are being made or given back in the background
    unreleased_bytes: int  # detached, and not given back yet
    elapsed_ms: float


def allocate(kv_cache_config: "KVCacheConfig", device: "torch.device") -> "torch.Tensor":
    """Reserve the cache's range on this rank and attach what it starts with.

    Returns:
        The int8 buffer of shape `[capacity bytes]` that all layers are views of. Its
        memory is given back when the last view is gone.

    Raises:
        PageDriverError: There is no address space for the capacity, or no memory
            for the start.

    """
    layout = kv_cache_config.elastic_kv
    assert layout is not None
    segments = segments_of(kv_cache_config.kv_cache_tensors, layout.capacity_blocks)
    arena = KVArena(
        _driver(layout.driver, device, layout.keep_bytes),
        segments,
        layout.chunk_blocks,
        layout.capacity_chunks,
        layout.ranks_sharing,
        sys.maxsize if layout.run_blocks is None else layout.run_blocks // layout.chunk_blocks,
    )
    first = layout.start_blocks if layout.first_blocks is None else layout.first_blocks
    try:
        arena.attach(range(first // layout.chunk_blocks))
        buffer = arena.owned_tensor()
        layout.residency = Residency(layout, buffer)
        layout.residency.mark(arena.attached, True)
    except Exception:  # whatever it is, torch's errors among them, nobody gets to have the range; it is raised again
        arena.close()
        raise
    layout.arena = arena
    logger.info(
        "Elastic KV cache: reserved %d bytes in %d segments at %#x, of which %d are resident",
        arena.nbytes,
        len(segments),
        arena.address,
        arena.resident_bytes,
    )
    return buffer


def probe(worker: Any, driver: str) -> ProbeReport:
    """What this rank's device offers to the page driver called `driver`."""
    page_driver = _driver(driver, worker.device)
    return ProbeReport(
        driver=page_driver.name,
        node=node_name() if page_driver.name == "host" else None,
        granule=page_driver.granule,
        max_mappings=page_driver.max_mappings,
        available_bytes=page_driver.available_bytes(),
        spare_bytes=spare_bytes(worker.device),
        total_bytes=page_driver.total_bytes(),
        costs=costs_of(page_driver.card, Path(envs.VLLM_CACHE_ROOT)) if page_driver.card else None,
    )


def prepare(worker: Any, chunks: Sequence[int]) -> RankReport:
    """Start to make pages for `chunks` on this rank, and return at once. `attach` is fast after that."""
    return _report(worker, lambda arena: arena.prepare(chunks))


def discard(worker: Any) -> RankReport:
    """Give all pages back on this rank that were prepared and not attached."""
    return _report(worker, lambda arena: arena.discard_prepared())


def attach(worker: Any, chunks: Sequence[int]) -> RankReport:
    """Give pages to `chunks` on this rank, all or none."""

    def do(arena: KVArena) -> None:
        arena.attach(chunks)
        _residency(worker).mark(chunks, True)

    return _report(worker, do)


def detach(worker: Any, chunks: Sequence[int]) -> RankReport:
    """Take the pages of `chunks` away on this rank, all or none."""

    def do(arena: KVArena) -> None:
        _residency(worker).mark(chunks, False)
        try:
            arena.detach(chunks)
        except PageDriverError:
            _residency(worker).mark(chunks, True)
            raise

    return _report(worker, do)


def with_faults(worker: Any, output: Any) -> Any:
    """The output of a step, with the requests of it that named blocks without memory, on whichever rank."""
    residency = worker.model_runner.kv_cache_config.elastic_kv.residency
    return report_faults(residency, output, get_tp_group())


def begin_attach(worker: Any, chunks: Sequence[int]) -> float:
    """Start to `attach` on this rank while steps go on. Returns the milliseconds that it took."""
    start = time.perf_counter()
    _arena(worker).begin_attach(chunks)
    return (time.perf_counter() - start) * 1000


def begin_detach(worker: Any, chunks: Sequence[int]) -> float:
    """Start to `detach` on this rank while steps go on, which do not touch `chunks` any more. The pages are held
    until `let_go` or `take_back`. Returns the milliseconds that it took. `ended` tells what failed.
    """
    start = time.perf_counter()
    _residency(worker).mark(chunks, False)
    _arena(worker).begin_detach(chunks)
    return (time.perf_counter() - start) * 1000


def whole(worker: Any, chunks: Sequence[int]) -> list[int]:
    """Those of `chunks` that this rank can detach without a cut, and so without memory for one."""
    return _arena(worker).whole(chunks)


def ended(worker: Any) -> RankReport | None:
    """How it went what was begun last on this rank; None while it goes on."""
    has_ended = True

    def do(arena: KVArena) -> None:
        nonlocal has_ended
        try:
            has_ended = arena.ended()
        finally:
            # What was attached, and what a failure left attached. What is on its way has no mark yet, or none any more.
            if has_ended:
                _residency(worker).mark(arena.attached, True)

    report = _report(worker, do)
    return report if has_ended else None


def let_go(worker: Any) -> RankReport:
    """Give back what was detached on this rank, now that every rank has done so."""
    return _report(worker, lambda arena: arena.let_go())


def take_back(worker: Any, chunks: Sequence[int]) -> RankReport:
    """Undo a detach of `chunks` on this rank, since another one failed. It takes no memory."""

    def do(arena: KVArena) -> None:
        arena.take_back(chunks)
        _residency(worker).mark(chunks, True)

    return _report(worker, do)


def busy(worker: Any) -> bool:
    """Whether pages are being made, or given back."""
    return _arena(worker).busy


def move(worker: Any, moves: Sequence["Move"]) -> RankReport:
    """Copy blocks on this rank, and let its block tables name the copies. Called with
    no step in flight.
    """
    sources, destinations = zip(*moves, strict=True)

    def do(arena: KVArena) -> None:
        copy_blocks(arena, sources, destinations)
        _repoint(worker, sources, destinations)

    return _report(worker, do)


def unmove(worker: Any, moves: Sequence["Move"]) -> RankReport:
    """Let the block tables name the blocks again that `move` copied; they are as they were."""
    sources, destinations = zip(*moves, strict=True)
    return _report(worker, lambda _: _repoint(worker, destinations, sources))


def check(worker: Any) -> None:
    """Raise TypeError where blocks could not be moved, because this rank's model runner is not a known one."""
    check_runner(worker.model_runner)


def on_ranks(
    worker: Any, function: Callable[[Any, Sequence[Any]], RankReport], ranks: Sequence[int], what: Sequence[Any]
) -> RankReport:
    """Call `function` if this rank is one of `ranks`."""
    if worker.rank in ranks:
        return function(worker, what)
    return RankReport(rank=worker.rank, error=None, elapsed_ms=0.0)


def measure(worker: Any) -> RankState:
    """Tell this rank's state and change nothing. Takes milliseconds per resident GiB."""
    arena = _arena(worker)
    start = time.perf_counter()
    reported_bytes = arena.reported_bytes()
    return RankState(
        rank=worker.rank,
        resident_bytes=arena.resident_bytes,
        reported_bytes=reported_bytes,
        handles=arena.num_handles,
        busy=arena.busy,
        unreleased_bytes=arena.unreleased_bytes,
        elapsed_ms=(time.perf_counter() - start) * 1000,
    )


def _driver(name: str, device: "torch.device", keep_bytes: int = 0) -> PageDriver:
    # The index of torch's device is the driver's own: both count what CUDA_VISIBLE_DEVICES leaves of the
    # machine, as Ray sets it for each worker. Neither a rank nor NVML's index would do.
    return make_driver(name, device.type, device.index or 0, keep_bytes)


def _report(worker: Any, call: Callable[[KVArena], None]) -> RankReport:
    error = None
    start = time.perf_counter()
    try:
        call(_arena(worker))
    except PageDriverError as failure:
        error = "; ".join([str(failure), *getattr(failure, "__notes__", [])])
    return RankReport(rank=worker.rank, error=error, elapsed_ms=(time.perf_counter() - start) * 1000)


def _repoint(worker: Any, old: Sequence[int], new: Sequence[int]) -> None:
    layout = worker.model_runner.kv_cache_config.elastic_kv
    repoint(worker.model_runner, dict(zip(old, new, strict=True)), layout.capacity_blocks)


def _residency(worker: Any) -> Residency:
    residency: Residency = worker.model_runner.kv_cache_config.elastic_kv.residency
    return residency


def _arena(worker: Any) -> KVArena:
    arena: KVArena = worker.model_runner.kv_cache_config.elastic_kv.arena
    return arena
