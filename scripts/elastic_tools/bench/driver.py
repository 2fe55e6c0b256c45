"""``scripts/bench driver``: the driver calls of an attach, and what they cost, measured on a GPU or as published."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from vllm import envs
from vllm.v1.elastic_kv.call_costs import PUBLISHED, TYPICAL_RESIZE_BYTES, CallCosts, best_run_bytes, save_costs
from vllm.v1.elastic_kv.cuda_calls import CudaCalls
from vllm.v1.elastic_kv.cuda_driver import CudaPageDriver

from elastic_tools.bench.report import MIB, RESULTS

PAGE = 2 * MIB  # the granule of NVIDIA's GPUs
REPEATS = 21


@dataclass(frozen=True)
class Calls:
    """How often an attach, and the detach of the same, calls the driver. Zeroing is one kernel, or a few, beside it."""

    create: int
    map: int
    set_access: int
    unmap: int


def calls_of(segments: int, runs: int) -> Calls:
    """Of consecutive chunks over so many segments, in so many runs of handles."""
    return Calls(segments * runs, segments * runs, segments, segments * runs)


def measure(driver: CudaPageDriver, nbytes: int = 128 * MIB, repeats: int = REPEATS) -> CallCosts:
    """The median cost of each call on the device, for handles of ``nbytes``."""
    took: dict[str, list[float]] = {name: [] for name in ("create", "map", "set_access", "unmap", "release")}
    space = driver.reserve(2 * nbytes)

    def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        took[name].append((time.perf_counter() - start) * 1e6)
        return result

    for _ in range(repeats):
        handle = timed("create", driver.create, nbytes)
        timed("map", driver.map, space, handle, False)
        driver.make_usable([handle])  # zeroes
        driver.synchronize()
        timed("unmap", driver.unmap, handle)
        driver.map(space, handle, usable=False)  # again: to allow what is allowed already may cost nothing
        timed("set_access", driver.make_usable, [handle])
        driver.unmap(handle)
        timed("release", driver.release, handle)
    handles = [driver.create(nbytes) for _ in range(2)]
    for number, handle in enumerate(handles):
        driver.map(space + number * nbytes, handle)
    source, target = (driver.tensor(space + number * nbytes, nbytes) for number in range(2))
    copies = []
    for _ in range(repeats):
        driver.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        driver.synchronize()
        copies.append(time.perf_counter() - start)
    for handle in handles:
        driver.unmap(handle)
        driver.release(handle)
    driver.unreserve(space, 2 * nbytes)
    date, version = datetime.now(UTC).date().isoformat(), CudaCalls(0)("cuDriverGetVersion", 0)
    cost = {name: round(median(values), 1) for name, values in took.items()}
    return CallCosts(
        create=cost["create"],
        map=cost["map"],
        set_access=cost["set_access"],
        unmap=cost["unmap"],
        release=cost["release"],
        copy_gib_per_s=round(nbytes / median(copies) / 2**30, 1),
        source=f"measured on {driver.card}, driver {version}, handles of {nbytes // MIB} MiB, {date}",
    )


def rows(costs: CallCosts, nbytes: int, segments: int, margin: int) -> list[dict[str, Any]]:
    """One row for each way to lay ``nbytes`` out. The default is what the engine does without a setting."""
    run = best_run_bytes(costs, segments, TYPICAL_RESIZE_BYTES, margin * segments)
    pages = nbytes // PAGE
    ways = {
        "pages of 2 MiB": pages // segments,
        "runs of 256 MiB (`run`)": -(-nbytes // (256 * MIB)),
        f"default: runs of up to {run // MIB:,} MiB": -(-nbytes // run),
    }
    made = []
    for name, runs in ways.items():
        calls = calls_of(segments, runs)
        attach = costs.attach_us(segments, runs)
        longest = -(-nbytes // runs)
        made.append(
            {
                "way": name,
                # A run of one chunk is never cut.
                "cut_ms": round(costs.cut_us(segments, longest) / 1e3, 1) if longest > PAGE * segments else 0.0,
                "cut_mib": -(-longest // segments) // MIB if longest > PAGE * segments else 0,
                "handles": calls.create,
                **asdict(calls),
                "attach_calls": calls.create + calls.map + calls.set_access,
                "attach_ms": round(attach / 1e3, 1),
                "of_which_in_the_background_ms": round(calls.create * costs.create / 1e3, 1),
                "attach_ms_if_create_costs_by_the_byte": round(
                    (attach + (pages - calls.create) * costs.create) / 1e3, 1
                ),
                "detach_ms": round(costs.detach_us(segments, runs) / 1e3, 1),
            }
        )
    return made


def table(made: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| layout | create | map | set access | calls to attach | attach | of which create, ahead of it "
        "| attach, if create costs by the byte | unmap | detach | cut | memory for a cut |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {row['create']:,} | {row['map']:,} | {row['set_access']} | {row['attach_calls']:,} | "
        f"{row['attach_ms']:.1f} ms | {row['of_which_in_the_background_ms']:.1f} ms | "
        f"{row['attach_ms_if_create_costs_by_the_byte']:.1f} ms | {row['unmap']:,} | {row['detach_ms']:.1f} ms | "
        f"{row['cut_ms']:.1f} ms | {row['cut_mib']} MiB |"
        for row in made
    ]
    return "\n".join(lines)


def figures(costs: CallCosts) -> str:
    """The costs in Markdown, and what each of them is worth."""
    lines = ["| figure | value | standing | source |", "|---|---|---|---|"]
    standing = "published" if costs is PUBLISHED else "measured"
    for name in ("create", "map", "set_access", "unmap", "release", "copy_gib_per_s"):
        unit = "GiB/s" if name == "copy_gib_per_s" else "µs"
        where = ("**assumed**", costs.assumed[name]) if name in costs.assumed else (standing, costs.source)
        lines.append(f"| {name.removesuffix('_gib_per_s')} | {getattr(costs, name)} {unit} | {' | '.join(where)} |")
    return "\n".join(lines)


def by_size(costs: CallCosts, segments: int, margin: int) -> str:
    """The attaches of a grow and their calls by size, in Markdown."""
    run = best_run_bytes(costs, segments, TYPICAL_RESIZE_BYTES, margin * segments)
    lines = ["| size | attaches | calls of the longest | calls in all |", "|---|---|---|---|"]
    for gib in (1, 4, 16, 64):
        attaches = -(-gib * 1024 * MIB // run)
        calls = calls_of(segments, 1)
        each = calls.create + calls.map + calls.set_access
        lines.append(f"| {gib} GiB | {attaches} | {each} | {attaches * each:,} |")
    return "\n".join(lines)


def report(costs: CallCosts, made: list[dict[str, Any]], mib: int, segments: int, margin: int) -> str:
    """All that is known, in Markdown."""
    text = (
        f"# Driver calls to attach {mib:,} MiB over {segments} segments\n\n{table(made)}\n\n"
        "The counts are those that the stand-in driver counts (`tests/bench/test_driver.py`). Whatever its size, an\n"
        "attach makes up to 8 calls more, for the context and the free memory (`tests/arena/test_cuda_driver.py`).\n"
        "The engine attaches run by run, at the start as in a grow, so that no attach makes more than 3 calls for\n"
        "each segment and those 8. How many attaches it takes depends on the size:\n\n"
        f"{by_size(costs, segments, margin)}\n\n"
        "Zeroing what is new is a kernel beside these calls, and is in no column. What long runs cost is in the last\n"
        "two columns: where a part of a run leaves, its handles are copied one after the other, here with half of the\n"
        "run staying. The engine stands still for that time, and needs as much free memory as one handle has. Whole\n"
        "runs that leave cost the engine nothing but the call that begins it.\n\n"
        f"Times are counts times costs:\n\n{figures(costs)}\n\n"
    )
    if costs is PUBLISHED:
        text += (
            "**No GPU was there: no time here was measured.** The costs were published for handles of 2 MiB and are\n"
            "**assumed** to be the same for larger ones, which nobody has shown. So `attach` is the least that can be\n"
            "expected. If create costs by the byte, it is the column beside it, most of which is still ahead of the\n"
            "attach, in the background.\n\n"
        )
    return text + (
        "The cost model (`call_costs.py`) has these figures. On a card that `make bench-driver` has measured, it has\n"
        "that card's, without being told ([operating](../operating.md#on-a-gpu)). Made by `make bench-driver`.\n"
    )


def main(arguments: list[str]) -> int:
    """Measures or reads the costs, prints the table and writes it."""
    parser = argparse.ArgumentParser(prog="scripts/bench driver", description=__doc__)
    parser.add_argument("--mib", type=int, default=4096, help="what is attached (default %(default)s MiB)")
    parser.add_argument("--segments", type=int, default=32, help="over so many (default %(default)s)")
    parser.add_argument("--margin-mib", type=int, default=256, help="the longest handle (default %(default)s MiB)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write (default docs/results)")
    given = parser.parse_args(arguments)
    if given.segments < 1 or given.margin_mib < 1 or given.mib < 2 * given.segments:
        parser.error("at least a segment, a margin of 1 MiB and 2 MiB for each segment are needed")
    try:
        driver = CudaPageDriver()
        costs = measure(driver)
        assert driver.card is not None  # a CUDA device has a name
        print(f"bench: for engines on this machine: {save_costs(costs, driver.card, Path(envs.VLLM_CACHE_ROOT))}")
    except ValueError as error:
        print(f"bench: not measured, as published instead: {error}", file=sys.stderr)
        costs = PUBLISHED
    made = rows(costs, given.mib * MIB, given.segments, given.margin_mib * MIB)
    print(table(made))
    given.output.mkdir(parents=True, exist_ok=True)
    name = given.output / "driver-calls"
    name.with_suffix(".md").write_text(report(costs, made, given.mib, given.segments, given.margin_mib * MIB))
    content = {"costs": asdict(costs), "rows": made}
    name.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    return 0
