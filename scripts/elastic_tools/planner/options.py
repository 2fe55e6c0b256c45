"""Command-line options that describe a model, GPUs and a workload, and what they mean."""

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_tools.planner.cache import CacheDtype, cache_dtype, cache_problem
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.errors import PlanError, nearest, positive
from elastic_tools.planner.estimate import Plan
from elastic_tools.planner.hardware import GPU, gpu, gpus
from elastic_tools.planner.memory import UTILIZATION
from elastic_tools.planner.model import ModelConfig
from elastic_tools.planner.workload import WORKLOADS, Workload, parse_lengths


@dataclass(frozen=True)
class Question:
    """What was asked: one model, a workload, and the plans that are open. The first of each is what a single plan
    takes.
    """

    model: ModelConfig
    gpus: tuple[GPU, ...]
    tps: tuple[int, ...]
    caches: tuple[CacheDtype, ...]
    chunks: tuple[int | None, ...]
    workload: Workload
    sequences: int | None
    utilization: float
    seed: int

    def plan(self, device: GPU, tp: int, dtype: CacheDtype, chunk: int | None = None) -> Plan:
        """A plan with the limits that were given. Without --sequences, as many as the chunk allows."""
        sequences = self.sequences
        if sequences is None and chunk:
            sequences = min(device.max_seqs, chunk)
        return Plan(self.model, device, dtype, tp, chunk, sequences, self.utilization)

    def plans(self) -> list[Plan]:
        """Every combination that vLLM takes; tensor parallel sizes that the model cannot have are left out."""
        return [
            self.plan(device, tp, dtype, chunk)
            for device in self.gpus
            for tp in self.tps
            if self.model.tp_problem(tp) is None
            for dtype in self.caches
            if cache_problem(self.model, dtype, device.sm) is None
            for chunk in self.chunks
        ]


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is served."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, help="a config.json, a folder with one, or a preset (`scripts/plan models`)"
    )
    group.add_argument("--weights", metavar="TYPE", help="precision of the linear layers: bf16, fp8, int8, int4")


def add_hardware(parser: argparse.ArgumentParser, several: bool) -> None:
    """What it is served on."""
    group = parser.add_argument_group("hardware and engine")
    many = "+" if several else None
    names = list(gpus())
    group.add_argument("--gpu", nargs=many, default=names if several else "H100", help=f"{', '.join(names)}")
    group.add_argument(
        "--tp", type=int, nargs=many, default=[1, 2, 4, 8] if several else 1, help="tensor parallel size"
    )
    default = ["auto", "fp8", "int8", "int4"] if several else "auto"
    group.add_argument(
        "--cache", nargs=many, default=default, help="cache dtype: vLLM's names, or bf16, int8, int4, 3bit"
    )
    group.add_argument(
        "--chunk", type=int, nargs=many, default=[None] if several else None, help="most tokens of a step"
    )
    group.add_argument("--sequences", type=int, help="most requests of a step")
    group.add_argument(
        "--utilization", type=float, default=UTILIZATION, help="share of the memory (default %(default)s)"
    )
    group.add_argument("--price", action="append", default=[], metavar="[GPU=]$", help="dollars for one GPU and hour")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """What comes."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload", default="chat", help=f"{', '.join(WORKLOADS)} (default %(default)s); the rest overrides it"
    )
    group.add_argument(
        "--prompt-tokens", metavar="N[~S]", help="median length, and the sigma of a log-normal around it"
    )
    group.add_argument("--output-tokens", metavar="N[~S]", help="the same for the answer")
    group.add_argument("--rate", type=float, help="requests that arrive in a second")
    group.add_argument(
        "--concurrency", type=int, help="requests in the system at a time; default: as many as keep the SLOs"
    )
    group.add_argument("--ttft", type=float, metavar="MS", help="SLO: time to the first token at the 90th percentile")
    group.add_argument(
        "--tpot", type=float, metavar="MS", help="SLO: time for each further token at the 90th percentile"
    )
    group.add_argument("--no-slo", action="store_true", help="any latency will do")
    group.add_argument("--seed", type=int, default=0, help="of the simulation (default %(default)s)")


def add_output(parser: argparse.ArgumentParser, plot: bool = True) -> None:
    """Where the answer goes besides the terminal."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON; - for the terminal, alone")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write a line for each plan")
    if plot:
        group.add_argument("--plot", type=Path, metavar="FILE", help=f"draw it: {', '.join(PICTURES)}")


PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp")  # what matplotlib writes


def check(given: argparse.Namespace) -> None:
    """Refuses, before any work, what would fail at its end. Raises ``PlanError``."""
    plot, seed = getattr(given, "plot", None), getattr(given, "seed", 0)
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise PlanError(f"--plot is {str(plot)!r}, which is no picture; the nearest is {plot.with_suffix('.png')}.")
    if seed < 0:
        raise PlanError(f"--seed is {seed}, and must be 0 or more.")
    if getattr(given, "csv", None) == Path("-"):
        raise PlanError("--csv is '-', and only --json can be the terminal; the nearest is --csv /dev/stdout.")
    paths: dict[Path, str] = {}
    for name in ("json", "csv", "plot"):
        path = getattr(given, name, None)
        if path is not None and path != Path("-"):
            _check_file(f"--{name}", path)
            if path in paths:
                raise PlanError(f"--{paths[path]} and --{name} are both {str(path)!r}; they need a file each.")
            paths[path] = name
    if (folder := getattr(given, "output", None)) is not None:
        exists = _existing(folder)
        if not exists.is_dir() or not os.access(exists, os.W_OK):
            raise PlanError(f"--output is {str(folder)!r}, and no folder can be made there; the nearest is '.'.")


def _existing(path: Path) -> Path:
    """The path, or the folder above it that is nearest to it and exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


def _check_file(name: str, path: Path) -> None:
    """Refuses a file that cannot be written. Raises ``PlanError``."""
    if path.is_dir():
        raise PlanError(f"{name} is {str(path)!r}, which is a folder; the nearest is {str(path / 'plan')!r}.")
    if not path.parent.is_dir():
        raise PlanError(f"{name} is in {str(path.parent)!r}, which is no folder; the nearest is {path.name!r}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlanError(f"{name} is {str(path)!r}, which cannot be written; the nearest is {path.name!r} here.")


def prices(given: list[str]) -> dict[str, float]:
    """``2.5`` for every GPU, or ``H100=2.5`` for one."""
    known = {name.lower(): name for name in gpus()}
    found = {}
    for text in given:
        name, equals, value = text.rpartition("=")
        if equals and name.lower() not in known:
            raise PlanError(f"--price names a GPU {name!r}; the nearest is {nearest(name, gpus())}.")
        try:
            price = positive("The price per GPU hour", float(value))
        except ValueError:
            raise PlanError(f"--price is {text!r}, and must be dollars such as 2.5, or H100=2.5 for one GPU.") from None
        for each in [known[name.lower()]] if name else list(gpus()):
            found[each] = price
    return found


def workload_of(given: argparse.Namespace) -> Workload:
    """The workload that the options describe."""
    if given.workload not in WORKLOADS:
        raise PlanError(
            f"There is no workload {given.workload!r}; the nearest is {nearest(given.workload, WORKLOADS)}."
        )
    workload = WORKLOADS[given.workload]
    if given.no_slo:
        workload = replace(workload, ttft=None, tpot=None)
    if given.prompt_tokens is not None:
        workload = replace(workload, prompt=parse_lengths("--prompt-tokens", given.prompt_tokens))
    if given.output_tokens is not None:
        workload = replace(workload, output=parse_lengths("--output-tokens", given.output_tokens))
    for name in ("rate", "concurrency", "ttft", "tpot"):
        if (value := getattr(given, name)) is not None:
            workload = replace(workload, **{name: value})
    return workload


def question(given: argparse.Namespace) -> Question:
    """What was asked. Raises ``PlanError`` for what makes no sense."""
    model = load_model(given.model, given.weights)
    price = prices(given.price)

    def several(value: Any) -> list[Any]:
        """One value or more, each once."""
        return list(dict.fromkeys(value)) if isinstance(value, list) else [value]

    devices = list(dict.fromkeys(gpu(name) for name in several(given.gpu)))
    tps = several(given.tp)
    if not any(model.tp_problem(tp) is None for tp in tps) or any(tp < 1 for tp in tps):
        model.check_tp(min(tps))
    caches = list(dict.fromkeys(cache_dtype(name) for name in several(given.cache)))
    lacking = [[cache_problem(model, dtype, device.sm) for device in devices] for dtype in caches]
    if all(all(problems) for problems in lacking):
        raise PlanError(str(lacking[0][0]))
    workload = workload_of(given)
    if workload.length > model.max_len:
        raise PlanError(
            f"A request of {workload.length:,} tokens is longer than {model.name} takes; the most is {model.max_len:,}."
        )
    left_out = [
        f"The memory of {part} of {model.name} is not counted: the planner knows decoders of text."
        for part in model.uncounted
    ]
    left_out += [f"TP {tp} is left out: {problem}." for tp in tps if (problem := model.tp_problem(tp))]
    left_out += [problem for problems in lacking for problem in problems if problem]
    for problem in dict.fromkeys(left_out):
        print(f"plan: {problem}", file=sys.stderr)
    return Question(
        model=model,
        gpus=tuple(device.at(price.get(device.name)) for device in devices),
        tps=tuple(tps),
        caches=tuple(caches),
        chunks=tuple(several(given.chunk)),
        workload=workload,
        sequences=given.sequences,
        utilization=given.utilization,
        seed=given.seed,
    )
