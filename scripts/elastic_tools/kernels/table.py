"""The ahead-of-time gate: compiles every configuration for every target, and judges and writes down what came out."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from elastic_tools.kernels.cases import LAUNCHES, Case, tiles_of
from elastic_tools.kernels.compiling import SHARED, compiling_for
from elastic_tools.kernels.inspecting import Found, inspect

KERNELS = {"ours": "attend", "unguarded": "attend", "upstream": "kernel_unified_attention"}
SCAN = 128  # entries that the guard's kernel looks up with one of each thread
GUARD_BAR = 0.03


@dataclass
class Row:
    """A configuration on a target. `upstream` is None where upstream has no such kernel."""

    target: str
    case: Case
    ours: Found
    guard: Found
    unguarded: Found
    upstream: Found | None
    tile: int

    @property
    def guard_cost(self) -> float:
        """Instructions that the guard adds to those of a KV tile, as a part of them. Its own kernel runs once for a
        sequence, and counts here as if the sequence had one KV head and one block of queries.
        """
        scan = self.guard.scan * self.tile / (SCAN * self.case.block_size)
        return (self.ours.loop + scan) / self.unguarded.loop - 1

    @property
    def faults(self) -> list[str]:
        """What the gate does not let pass."""
        found = []
        if self.ours.shared_bytes > SHARED[self.target]:
            found.append(f"{self.ours.shared_bytes} bytes of shared memory")
        if spills := self.ours.spills + self.guard.spills:
            found.append(f"{spills} spills")
        if self.guard_cost > GUARD_BAR:
            found.append(f"the guard costs {self.guard_cost:.1%}")
        return found


def compile_case(target: str, case: Case) -> Row:
    """Compile a configuration three times: as it is, without the guard, and upstream's."""
    found: dict[str, Found | None] = {}
    for name, launch in LAUNCHES.items():
        if name == "upstream" and case.cache == "int4":
            found[name] = None
            continue
        with compiling_for(target) as compiled:
            launch(case)
            positions = tiles_of(case).positions
        found[name] = inspect(compiled[KERNELS[name]])
        if "check_tables" in compiled:
            found["guard"] = inspect(compiled["check_tables"])
    ours, guard, unguarded = found["ours"], found["guard"], found["unguarded"]
    assert ours is not None
    assert guard is not None
    assert unguarded is not None
    return Row(target, case, ours, guard, unguarded, found["upstream"], positions)


def markdown(rows: Iterable[Row], command: str) -> str:
    """The table, and the sentence that judges it."""
    rows = list(rows)
    bad = [f"- {row.target} {row.case}: {', '.join(row.faults)}" for row in rows if row.faults]
    worst = max(rows, key=lambda row: row.guard_cost)
    parked = max(row.ours.parked for row in rows)
    lines = [
        "# The attention kernels, compiled ahead of time",
        "",
        f"{len(rows)} configurations. The gate "
        + (f"does not pass in {len(bad)} of them. " if bad else "passes: no spills, and at most 3% for the guard. ")
        + f"The guard costs {median(row.guard_cost for row in rows):+.1%} of the instructions of a KV tile at the "
        f"median and at most {worst.guard_cost:+.1%} ({worst.target}, {worst.case}).",
        "",
        *([*bad, ""] if bad else []),
        "`loop`: instructions of the innermost loop, for one KV tile of `tile` positions. `scan`: of the loop of the "
        f"guard's kernel, for {SCAN} table entries, one for each thread. `guard`: the instructions per KV tile with "
        "the guard against those of the same kernel without it. The guard's kernel runs once for a sequence, and "
        "counts as if that had one KV head and one block of queries. It is a launch of its own, which is not weighed. "
        "`mix`: matrix/global/shared/float/integer/control instructions of the loop.",
        "",
        "A spill touches memory. Scalar registers that AMD's compiler keeps in lanes of vector registers touch none "
        f"and are not counted: up to {parked} of them.",
        "",
        "Upstream's columns are its `kernel_unified_attention` as `TRITON_ATTN` launches it; its tiles are smaller.",
        "",
        "| target | configuration | registers | spills | shared | tile | loop | scan | guard | mix "
        "| upstream: registers | spills | shared | loop |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        o, u = row.ours, row.upstream
        mix = "/".join(
            str(o.mix.get(kind, 0)) for kind in ("matrix", "global", "shared", "float", "integer", "control")
        )
        theirs = [u.registers, u.spills, u.shared_bytes, u.loop] if u else ["-"] * 4
        cells = [
            row.target,
            row.case,
            o.registers,
            o.spills,
            o.shared_bytes,
            row.tile,
            o.loop,
            row.guard.scan,
            f"{row.guard_cost:+.1%}",
            mix,
            *theirs,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"Made by `{command}`.", ""])


def write(rows: list[Row], folder: Path, command: str) -> None:
    """The table as Markdown and as JSON."""
    (folder / "kernels.md").write_text(markdown(rows, command))
    report: list[dict[str, Any]] = [asdict(row) | {"guard_cost": row.guard_cost} for row in rows]
    (folder / "kernels.json").write_text(json.dumps(report) + "\n")
