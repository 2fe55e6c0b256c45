"""Runs the policies by turns, and lets `always-lent` die."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from elastic_tools.bench.arms import Arm, BenchError, Process, orders, running
from elastic_tools.model import tiny_llama
from elastic_tools.pins import CACHE

WORKLOADS = {"empty": "with room", "full": "full of prefixes"}  # what the cache is, beside the requests that decode
POLICIES = ("static", "small-chunk", "reclaim", "adaptive")
CRASHING = "always-lent"
MIB = 2**20
PROGRAM = Path(__file__).with_name("engine.py")
MODEL = "2 layers, hidden 64, 4 heads of 128, MLP 4096, random weights, SmolLM2's vocabulary of 49,152, float32"


@dataclass(frozen=True)
class Settings:
    """Sizes of the benchmark. Tokens, and rounds that count beside one of warm-up."""

    rounds: int = 6
    bursts: tuple[int, ...] = (1, 3)  # long prompts that come together
    most: int = 6144  # tokens of the largest step, and of a long prompt
    small: int = 512
    fill: int = 96  # tokens of a prompt that fills the cache: few enough for a step while the reserve is lent
    answer: int = 4
    ranks: tuple[int, ...] = (1, 2)  # and chunks at which it is only looked how large the reserve is
    chunks: tuple[int, ...] = (512, 2048, 6144)
    room_mib: int = 1536  # beside what a process has when vLLM is imported

    def elastic(self, policy: str) -> dict[str, Any]:
        """The elastic configuration of a policy."""
        return {
            "policy": policy,
            "room": self.room_mib * MIB,
            "capacity": self.room_mib * MIB,
            "margin": 192 * MIB,
            "small_chunk": self.small,
            "lend_after_s": 0.2,
            "unsafe_always_lent": policy == CRASHING,
        }

    def engine(self, model: Path, workload: str) -> dict[str, Any]:
        """The arguments of every engine."""
        return {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": self.most + 1024,
            "block_size": 32,
            "max_num_seqs": 8,
            "max_num_batched_tokens": self.most,
            "enable_prefix_caching": workload == "full",
            "disable_log_stats": True,
        }


QUICK = Settings(rounds=1, chunks=(512,))


@dataclass
class Measured:
    """What came of it: for each workload and policy its rounds, the answer of the engine that may not live, and what
    engines measured as the reserve of a rank, in bytes, by chunk and number of ranks."""

    rounds: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    crash: dict[str, Any] = field(default_factory=dict)
    reserves: dict[int, dict[int, int]] = field(default_factory=dict)


def measure(settings: Settings, policies: Sequence[str] = POLICIES) -> Measured:
    """Runs all of it.

    Raises ``BenchError`` where an engine that should live does not, or where tokens differ between policies.
    """
    model = tiny_llama(CACHE / "bench" / "reserve-model", heads=4, kv_heads=4, head_dim=128, intermediate=4096)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    cores = {1: {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, 2: {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    command: dict[str, Any] = {
        "bursts": list(settings.bursts),
        "length": settings.most - 64,
        "tokens": settings.answer,
        "fill": 0,
    }

    def arms(names: Sequence[str], workload: str) -> list[tuple[Arm, dict[str, Any]]]:
        return [(Arm(name, True, settings.elastic(name)), settings.engine(model, workload)) for name in names]

    measured = Measured()
    sizes = list(itertools.product(settings.chunks, settings.ranks))
    steps = len(WORKLOADS) * (settings.rounds + 1) * len(policies) + 1 + len(sizes)
    with tqdm(total=steps, desc="rounds") as bar:

        def once(process: Process, number: int) -> dict[str, Any]:
            answer = process.round(number=number, **command)
            bar.update()
            return answer

        for workload in WORKLOADS:
            command["fill"] = settings.fill if workload == "full" else 0
            kept: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
            with running(arms(policies, workload), environment | cores[1], PROGRAM) as processes:
                for process in processes:  # warm-up
                    answered(once(process, 0), process.arm.name)
                for number, order in enumerate(orders(len(processes), settings.rounds), 1):
                    for process in (processes[place] for place in order):
                        kept[process.arm.name].append(answered(once(process, number), process.arm.name))
            check_tokens(kept)
            measured.rounds[workload] = kept
        command["fill"] = 0
        with running(arms([CRASHING], "empty"), environment | cores[1], PROGRAM) as (process,):
            measured.crash = once(process, 1)
        for chunk, ranks in sizes:
            arm = Arm(f"reserve of {chunk} tokens on {ranks}", True, settings.elastic("static"))
            engine = settings.engine(model, "empty")
            engine |= {"max_num_batched_tokens": chunk, "tensor_parallel_size": ranks}
            with running([(arm, engine)], environment | cores[ranks], PROGRAM) as (process,):
                reserve = process.identity["state"]["reserve"]
            measured.reserves.setdefault(chunk, {})[ranks] = reserve["reserve_bytes"]
            bar.update()
    return measured


def answered(answer: dict[str, Any], policy: str) -> dict[str, Any]:
    """The answer of an engine that lives."""
    if "error" in answer:
        raise BenchError(f"the engine with the policy {policy} ended: {answer['error']}")
    return answer


def check_tokens(rounds: dict[str, list[dict[str, Any]]]) -> None:
    """The long prompts' tokens have to be the same under every policy."""
    outputs = {policy: [one["output"] for one in each] for policy, each in rounds.items()}
    reference, *others = outputs
    for policy in others:
        if outputs[policy] != outputs[reference]:
            raise BenchError(f"the tokens of {policy} differ from those of {reference}")
