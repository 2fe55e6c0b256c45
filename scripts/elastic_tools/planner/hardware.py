"""The GPUs that the planner knows: ``configs/hardware.toml``."""

import tomllib
from dataclasses import dataclass, field, replace

from elastic_tools.pins import ROOT
from elastic_tools.planner.errors import PlanError, nearest, positive

TABLE = ROOT / "configs" / "hardware.toml"


@dataclass(frozen=True)
class GPU:
    """One GPU and what it costs.

    ``memory`` is what the CUDA runtime reports as total, in bytes; ``bandwidth`` in bytes/s; ``flops`` in dense FLOP/s
    by bits of an element; ``link`` in bytes/s and direction; ``tables`` names its measured data in
    ``aiconfigurator-core``. ``price`` is dollars for one GPU and hour.
    """

    name: str
    memory: int
    bandwidth: float
    flops: dict[int, float] = field(hash=False)
    link: float
    sm: int
    tables: str
    engine: str
    price: float
    chunk: int
    max_seqs: int

    def at(self, price: float | None) -> "GPU":
        """The same GPU at another price per hour."""
        return self if price is None else replace(self, price=positive("The price per GPU hour", price))


def gpus() -> dict[str, GPU]:
    """Every GPU of the table, by name."""
    with open(TABLE, "rb") as file:
        table = tomllib.load(file)
    return {
        name: GPU(
            name=name,
            memory=round(entry["memory_gib"] * 2**30),
            bandwidth=entry["bandwidth_gb_s"] * 1e9,
            flops={16: entry["tflops_16"] * 1e12, 8: entry["tflops_8"] * 1e12},
            link=entry["link_gb_s"] * 1e9,
            sm=entry["sm"],
            tables=entry["tables"],
            engine=entry["engine"],
            price=entry["price_hour"],
            chunk=entry["chunk"],
            max_seqs=entry["max_seqs"],
        )
        for name, entry in table["gpu"].items()
    }


def gpu(name: str) -> GPU:
    """A GPU by name, whatever the case. Raises ``PlanError``."""
    known = {key.lower(): value for key, value in gpus().items()}
    if name.lower() not in known:
        raise PlanError(f"There is no GPU {name!r} in configs/hardware.toml; the nearest is {nearest(name, gpus())}.")
    return known[name.lower()]
