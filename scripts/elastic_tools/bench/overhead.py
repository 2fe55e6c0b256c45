"""What the patches cost where nothing is resized: unpatched against patched with elastic off, and on but idle."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from elastic_tools.bench import machine
from elastic_tools.bench.arms import Arm, BenchError, Process, orders, running
from elastic_tools.bench.paired import Ratio, ratio
from elastic_tools.model import smollm2

CONTROL = "unpatched again"
METRICS = {"tokens_per_s": True, "tpot_ms": False}  # whether more is better


@dataclass(frozen=True)
class Settings:
    """The workload. Every arm has a cache of ``cache_bytes``; the elastic one may grow to ``capacity_bytes``."""

    rounds: int
    warm_up: int
    requests: int
    tokens: int
    cache_bytes: int
    capacity_bytes: int
    control: bool

    @property
    def arms(self) -> list[Arm]:
        """The reference first."""
        elastic = {"start": self.cache_bytes, "capacity": self.capacity_bytes}
        arms = [Arm("unpatched", False), Arm("patched, off", True), Arm("patched, on but idle", True, elastic)]
        return arms + [Arm(CONTROL, False)] * self.control

    def engine(self, arm: Arm) -> dict[str, Any]:
        """The arguments of ``LLM`` for ``arm``."""
        size = {} if arm.elastic else {"kv_cache_memory_bytes": self.cache_bytes}
        return size | {
            "model": str(smollm2()),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 1024,
            "max_num_seqs": max(self.requests, 1),
        }


def environment() -> dict[str, str]:
    """The environment of every arm: one process each, on the same cores, no network."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Runs all rounds. Returns, for each arm, what it is and what each round gave; raises where texts differ."""
    smollm2()
    arms = settings.arms
    rounds: list[dict[str, dict[str, Any]]] = []
    total = (settings.warm_up + settings.rounds) * len(arms)
    with running([(arm, settings.engine(arm)) for arm in arms], environment()) as processes:
        bar = tqdm(total=total, desc="rounds", unit="round", file=sys.stderr)
        for number, order in enumerate(orders(len(arms), settings.warm_up + settings.rounds)):
            results = {}
            for index in order:
                process = processes[index]
                bar.set_postfix_str(process.arm.name)
                results[process.arm.name] = watched_round(process, number, settings)
                bar.update()
            check_same_output(number, results)
            rounds.append(results)
        bar.close()
        check_same_size(processes)
        told = [process.identity for process in processes]
    return {
        arm.name: identity | {"rounds": [{k: v for k, v in r[arm.name].items() if k != "output"} for r in rounds]}
        for arm, identity in zip(arms, told, strict=True)
    }


def watched_round(process: Process, number: int, settings: Settings) -> dict[str, Any]:
    """One round, with ``others_cores``: how many cores all other work on the machine kept busy meanwhile."""
    busy = machine.busy_seconds()
    result = process.round(number=number, requests=settings.requests, tokens=settings.tokens)
    others = machine.busy_seconds() - busy - result["cpu_s"]
    return result | {"others_cores": max(0.0, others / result["seconds"])}


def check_same_output(number: int, results: dict[str, dict[str, Any]]) -> None:
    """Greedy tokens must not depend on the arm."""
    reference, *others = results
    for name in others:
        pairs = zip(results[reference]["output"], results[name]["output"], strict=True)
        different = [index for index, (one, other) in enumerate(pairs) if one != other]
        if different:
            raise BenchError(f"round {number}: '{name}' and '{reference}' differ in the tokens of requests {different}")


def check_same_size(processes: Sequence[Process]) -> None:
    """The caches must hold the same number of blocks, or the comparison means nothing."""
    blocks = {process.arm.name: process.identity["blocks"] for process in processes}
    if len(set(blocks.values())) != 1:
        raise BenchError(f"the arms have caches of different sizes, in blocks: {blocks}")


def compare(measured: dict[str, Any], warm_up: int) -> dict[str, dict[str, Ratio]]:
    """The ratios of every other arm to the first one, per metric, without the warm-up."""
    reference, *others = measured

    def column(arm: str, metric: str) -> list[float]:
        return [one[metric] for one in measured[arm]["rounds"][warm_up:]]

    return {arm: {m: ratio(column(arm, m), column(reference, m)) for m in METRICS} for arm in others}
