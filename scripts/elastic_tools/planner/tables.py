"""Operator times that were measured on GPUs, from the data of ``aiconfigurator-core``.

The package keeps them as Parquet files, which take seconds to read. The first use turns what the planner needs of one
GPU into one NumPy file under ``.cache``; after that a plan reads it in milliseconds. Times are milliseconds, axes are
sorted.
"""

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_tools.pins import CACHE
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.hardware import GPU

Array = npt.NDArray[np.float64]
PACKAGE = "aiconfigurator-core"
FORMAT = 3  # of the cached file
SKEW = "power_law_1.01"  # how unevenly tokens choose experts, as measured


@dataclass(frozen=True)
class Tables:
    """What was measured on one GPU.

    ``arrays`` maps names to grids: ``gemm/<dtype>`` [m, n, k], ``context/<head dim>/<cache>`` [heads, KV heads,
    length], ``decode/<head dim>/<cache>`` [heads, KV heads, batch, context], ``allreduce`` [GPUs, elements], each with
    its axes under ``<name>/<axis>``; ``moe/<dtype>`` is a list of rows. A grid point that was not measured is NaN.
    """

    gpu: str
    version: str
    arrays: dict[str, Array]

    def names(self, prefix: str) -> list[str]:
        """The grids below a prefix."""
        return sorted({"/".join(name.split("/")[:3]) for name in self.arrays if name.startswith(prefix)})


def load(gpu: GPU) -> Tables:
    """The tables of a GPU; makes the cached file where it is missing or was made from another release."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise PlanError(f"The measured operator times are missing: install {PACKAGE}, or run scripts/setup.") from None
    path = CACHE / "planner" / f"{gpu.tables}-{version}-{FORMAT}.npz"
    if not path.exists():
        print(f"plan: reading the measurements of the {gpu.name} once ...", file=sys.stderr, flush=True)
        build(gpu, path)
    with np.load(path) as file:
        return Tables(gpu.name, version, {name: file[name] for name in file.files})


def data_folder() -> Path:
    """Where the package keeps its measurements. Does not import it: that alone takes longer than a plan may."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "systems"


def build(gpu: GPU, path: Path) -> None:
    """Writes the cached file of a GPU."""
    arrays: dict[str, Array] = {}
    root = data_folder() / "data" / gpu.tables
    for dtype, rows in split(rows_of(root, "gemm", gpu.engine, "gemm_perf"), "gemm_dtype").items():
        add_grid(arrays, f"gemm/{dtype}", rows, ("m", "n", "k"))
        fill(arrays[f"gemm/{dtype}"], arrays[f"gemm/{dtype}/m"])
    attention = rows_of(root, "attention", gpu.engine, "context_attention_perf")
    add_attention(arrays, "context", attention, ("num_heads", "num_key_value_heads", "isl"), batch=1)
    attention = rows_of(root, "attention", gpu.engine, "generation_attention_perf")
    add_attention(arrays, "decode", attention, ("num_heads", "num_key_value_heads", "batch_size", "step"))
    reduce = rows_of(root, "comm", None, "custom_allreduce_perf")
    graph = {key: values[reduce["backend"] == "vllm_graph"] for key, values in reduce.items()}
    add_grid(arrays, "allreduce", graph, ("num_gpus", "message_size"))
    experts = rows_of(root, "moe", gpu.engine, "moe_perf")
    wanted = (experts["moe_ep_size"] == 1) & (experts["distribution"] == SKEW)
    columns = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "num_tokens", "latency")
    for dtype in ("bfloat16", "fp8"):
        chosen = wanted & (experts["moe_dtype"] == dtype)
        arrays[f"moe/{dtype}"] = np.stack([experts[name][chosen].astype(float) for name in columns], axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes that start together must not write one file, so each has its own until it is whole.
    temporary = path.with_suffix(f".{os.getpid()}.npz")
    np.savez_compressed(temporary, allow_pickle=False, **arrays)
    temporary.replace(path)


def rows_of(root: Path, family: str, engine: str | None, name: str) -> dict[str, npt.NDArray[Any]]:
    """The columns of one table: of vLLM at a version, or at the newest that has the table."""
    from pyarrow import parquet

    if engine is None:
        found = sorted(
            (root / family / "vllm").glob(f"*/{name}.parquet"), key=lambda p: [*map(int, p.parts[-2].split("."))]
        )
        path = found[-1]
    else:
        path = root / family / "vllm" / engine / f"{name}.parquet"
    table = parquet.read_table(path)
    return {column: table[column].to_numpy() for column in table.column_names}


def split(rows: dict[str, npt.NDArray[Any]], column: str) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """The rows by the value of a column."""
    parts = {}
    for value in sorted(set(rows[column].tolist())):
        chosen = rows[column] == value
        parts[str(value)] = {key: values[chosen] for key, values in rows.items()}
    return parts


def add_grid(arrays: dict[str, Array], name: str, rows: dict[str, npt.NDArray[Any]], axes: tuple[str, ...]) -> None:
    """Spreads rows over a grid. Where several kernels were measured for a point, the fastest counts."""
    values = [np.unique(rows[axis]).astype(float) for axis in axes]
    grid = np.full([len(value) for value in values], np.inf)
    index = tuple(np.searchsorted(value, rows[axis]) for value, axis in zip(values, axes, strict=True))
    np.minimum.at(grid, index, rows["latency"].astype(float))
    grid[np.isinf(grid)] = np.nan
    arrays[name] = grid
    for axis, value in zip(axes, values, strict=True):
        arrays[f"{name}/{axis}"] = value


def add_attention(
    arrays: dict[str, Array],
    kind: str,
    rows: dict[str, npt.NDArray[Any]],
    axes: tuple[str, ...],
    batch: int | None = None,
) -> None:
    """Grids of full attention, one for each head size and cache type."""
    chosen = np.ones(len(rows["latency"]), bool)
    if "window_size" in rows:
        chosen &= rows["window_size"] == 0
    if batch is not None:
        chosen &= rows["batch_size"] == batch
    rows = {key: values[chosen] for key, values in rows.items()}
    for dim, of_dim in split(rows, "head_dim").items():
        for dtype, of_dtype in split(of_dim, "kv_cache_dtype").items():
            name = f"{kind}/{dim}/{dtype}"
            add_grid(arrays, name, of_dtype, axes)
            fill(np.moveaxis(arrays[name], -1, 0), arrays[f"{name}/{axes[-1]}"])


def fill(grid: Array, axis: Array) -> None:
    """Fills holes along the first axis in place, by interpolating logarithms; what has no neighbour on a side stays
    NaN.
    """
    for position in np.ndindex(grid.shape[1:]):
        line = grid[(slice(None), *position)]  # a view
        known = ~np.isnan(line)
        if 2 <= known.sum() < len(line):
            inner = np.interp(np.log(axis), np.log(axis[known]), np.log(line[known]), left=np.nan, right=np.nan)
            line[~known] = np.exp(inner[~known])
