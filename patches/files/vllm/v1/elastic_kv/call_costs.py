# SPDX-License-Identifier: Apache-2.0
"""How long a run of handles that cannot be cut should be.

A long run is cheap to attach: the calls are counted once for it. A short one is
cheap to leave in part: what stays of it is copied, half of it on average, and each of its
handles needs as much memory again for the time of its own copy.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallCosts:
    """What the driver's calls cost, in microseconds, whatever the size of the handle.

    Attributes:
        create, map, set_access, unmap, release: One call each.
        copy_gib_per_s: What a copy within the device moves in a second, read and written.
        source: Where the figures are from, but for those that are
        assumed: By name, and why the figure was taken although nobody measured it.

    """

    create: float
    map: float
    set_access: float
    unmap: float
    release: float
    copy_gib_per_s: float
    source: str
    assumed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError where a figure is no cost."""
        for name in ("create", "map", "set_access", "unmap", "release", "copy_gib_per_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} ({value}) is no cost")

    def attach_us(self, segments: int, runs: int) -> float:
        """To attach consecutive chunks as so many runs. Access is allowed once for each segment."""
        return segments * (runs * (self.create + self.map) + self.set_access)

    def detach_us(self, segments: int, runs: int) -> float:
        """To unmap whole runs. Release goes on in the background."""
        return segments * runs * self.unmap

    def cut_us(self, segments: int, run_bytes: int) -> float:
        """To cut a run of so many bytes over all segments in two halves, of which one stays."""
        each = 2 * self.create + 3 * self.map + 2 * self.set_access + 2 * self.unmap + self.release
        return segments * each + run_bytes / 2 / (self.copy_gib_per_s * 2**30) * 1e6


PUBLISHED = CallCosts(
    create=193.32,
    map=1.45,
    set_access=35.99,
    unmap=25.63,
    release=25.63,
    copy_gib_per_s=724.0,
    source="kvcached, benchmarks/bench_vmm/README.md: averages on an A100, handles of 2 MiB, one thread",
    assumed={
        "release": "nothing is published; as unmap",
        "copy_gib_per_s": "half of the 1,555 GB/s in the data sheet of the A100 40 GB, since a copy reads and writes",
    },
)


TYPICAL_RESIZE_BYTES = 4 << 30  # a resize for which the length of runs is chosen


def table_of(card: str, folder: Path) -> Path:
    """Where the measured costs of a card are kept. `folder` is vLLM's cache (VLLM_CACHE_ROOT)."""
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return folder / "elastic_kv" / f"driver-calls-{name}.json"


def save_costs(costs: CallCosts, card: str, folder: Path) -> Path:
    """Keep the measured costs of a card for `costs_of`. Returns where."""
    table = table_of(card, folder)
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(json.dumps({"card": card, "costs": asdict(costs)}, indent=2) + "\n")
    return table


def costs_of(card: str, folder: Path) -> CallCosts:
    """The costs that were measured on a card, or else the published ones."""
    table = table_of(card, folder)
    try:
        return CallCosts(**json.loads(table.read_text())["costs"])
    except FileNotFoundError:
        return PUBLISHED
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning(
            "Elastic KV cache: %s is no table of driver calls, so that the published one is used: %s", table, error
        )
        return PUBLISHED


def best_run_bytes(costs: CallCosts, segments: int, resize_bytes: int, most_bytes: int) -> int:
    """Bytes over all segments that a run should have.

    It makes `attach + detach + cut` of a resize least: a resize of R bytes in runs of r makes
    R/r times the calls of a run, and cuts one run, of which half is copied. So r is the
    square root of 2·R·(calls of a run)·(bytes copied in a second).

    Args:
        costs: Of the calls.
        segments: Handles of a run.
        resize_bytes: What a resize changes, typically.
        most_bytes: What a run may have at most, so that there is memory to cut it.

    """
    run_s = segments * (costs.create + costs.map + costs.unmap) / 1e6
    best = math.isqrt(int(2 * resize_bytes * run_s * costs.copy_gib_per_s * 2**30))
    return min(best, most_bytes)
