"""Runs the policies by turns, and lets `always-lent` die."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_tools.bench.arms import Arm, BenchError, orders, running
from elastic_tools.model import tiny_llama
from elastic_tools.pins import CACHE

POLICIES = ("static", "small-chunk", "reclaim", "adaptive")
CRASHING = "always-lent"
MIB = 2**20
PROGRAM = Path(__file__).with_name("engine.py")
MODEL = "2 layers, hidden 64, MLP 4096, random weights, SmolLM2's vocabulary of 49,152, float32"


@dataclass(frozen=True)
class Settings:
    """Sizes of the benchmark. Tokens, and rounds that count beside one of warm-up."""

    rounds: int = 8
    prompts: int = 2
    most: int = 6144  # tokens of the largest step, and of a long prompt
    small: int = 512
    answer: int = 4
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

    def engine(self, model: Path) -> dict[str, Any]:
        """The arguments of every engine."""
        return {
            "model": str(model),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": self.most + 1024,
            "block_size": 32,
            "max_num_seqs": 8,
            "max_num_batched_tokens": self.most,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }


QUICK = Settings(rounds=1, prompts=1, small=1024)


@dataclass
class Measured:
    """What came of it: for each policy its rounds, and the answer of the engine that may not live."""

    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    crash: dict[str, Any] = field(default_factory=dict)


def measure(settings: Settings, policies: Sequence[str] = POLICIES) -> Measured:
    """Runs all of it.

    Raises ``BenchError`` where an engine that should live does not, or where tokens differ between policies.
    """
    model = tiny_llama(CACHE / "bench" / "reserve-model", intermediate=4096)
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "0-1"
    command = {"prompts": settings.prompts, "length": settings.most - 64, "tokens": settings.answer}

    def arms(names: Sequence[str]) -> list[tuple[Arm, dict[str, Any]]]:
        return [(Arm(name, True, settings.elastic(name)), settings.engine(model)) for name in names]

    measured = Measured({policy: [] for policy in policies})
    with running(arms(policies), environment, PROGRAM) as processes:
        for process in processes:  # warm-up
            answered(process.round(number=0, **command), process.arm.name)
        for number, order in enumerate(orders(len(processes), settings.rounds), 1):
            for place in order:
                name = processes[place].arm.name
                measured.rounds[name].append(answered(processes[place].round(number=number, **command), name))
    with running(arms([CRASHING]), environment, PROGRAM) as (process,):
        measured.crash = process.round(number=1, **command)
    check_tokens(measured)
    return measured


def answered(answer: dict[str, Any], policy: str) -> dict[str, Any]:
    """The answer of an engine that lives."""
    if "error" in answer:
        raise BenchError(f"the engine with the policy {policy} ended: {answer['error']}")
    return answer


def check_tokens(measured: Measured) -> None:
    """The long prompts' tokens have to be the same under every policy."""
    outputs = {policy: [one["output"] for one in rounds] for policy, rounds in measured.rounds.items()}
    reference, *others = outputs
    for policy in others:
        if outputs[policy] != outputs[reference]:
            raise BenchError(f"the tokens of {policy} differ from those of {reference}")
