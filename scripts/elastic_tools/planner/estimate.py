"""What a plan gives and costs: memory, requests at a time, latencies, dollars for a million tokens."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from elastic_tools.planner.cache import CacheDtype
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.hardware import GPU
from elastic_tools.planner.memory import GIB, UTILIZATION, Budget, budget
from elastic_tools.planner.model import ModelConfig
from elastic_tools.planner.operators import Source
from elastic_tools.planner.simulate import simulate
from elastic_tools.planner.step import StepTimes
from elastic_tools.planner.tables import Tables, load
from elastic_tools.planner.traffic import Engine, Loan, Outcome
from elastic_tools.planner.workload import Workload

MARGIN = 0.9  # what a plan that misses its SLOs in the simulation is reduced to, again and again
MOST_REQUESTS = 8000  # of a simulation
PROBES = 8  # chunks of a long prompt that the analytical search looks at


@dataclass(frozen=True)
class Plan:
    """One way to serve a model. ``chunk`` and ``sequences`` are vLLM's limits for a step; None takes its defaults."""

    model: ModelConfig
    gpu: GPU
    dtype: CacheDtype
    tp: int = 1
    chunk: int | None = None
    sequences: int | None = None
    utilization: float = UTILIZATION
    ideal: bool = False  # whether dequantisation of the cache is taken to be free

    @property
    def step_tokens(self) -> int:
        """Tokens of a step at most."""
        return self.gpu.chunk if self.chunk is None else self.chunk

    @property
    def step_sequences(self) -> int:
        """Requests of a step at most."""
        return self.gpu.max_seqs if self.sequences is None else self.sequences

    @property
    def price(self) -> float:
        """Dollars an hour for all GPUs."""
        return self.tp * self.gpu.price

    def memory(self) -> Budget:
        """Where the memory of one rank goes. Raises ``PlanError`` for what vLLM refuses."""
        for name, value in (("The chunk", self.step_tokens), ("The number of sequences", self.step_sequences)):
            if value < 1:
                raise PlanError(f"{name} is {value}, and must be 1 or more.")
        if self.step_tokens < self.step_sequences:
            raise PlanError(
                f"A chunk of {self.step_tokens} tokens is below the {self.step_sequences} sequences of a step; "
                f"the nearest that vLLM takes is --chunk {self.step_sequences} or --sequences {self.step_tokens}."
            )
        return budget(
            self.model,
            self.gpu,
            self.dtype,
            self.tp,
            self.step_tokens,
            self.step_sequences,
            self.utilization,
        )


@dataclass(frozen=True)
class Steady:
    """A steady state by arithmetic: output tokens a second, TTFT and TPOT in ms."""

    tokens: float
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Estimate:
    """A plan and what comes of it for a workload. ``users`` are requests of full length that the cache holds;
    ``most_rate`` is how many requests it can answer in a second, where a rate was asked for.
    """

    plan: Plan
    memory: Budget
    users: float
    concurrency: int | None
    outcome: Outcome | None
    met: bool
    sources: dict[str, Source]
    problem: str | None = None
    most_rate: float | None = None

    @property
    def dollars(self) -> float:
        """Dollars for a million output tokens."""
        if self.outcome is None or not self.outcome.tokens:
            return math.inf
        return self.plan.price / (self.outcome.tokens * 3600) * 1e6


@lru_cache(maxsize=8)
def tables(gpu: GPU) -> Tables:
    """The measurements of a GPU, read once."""
    return load(gpu)


@lru_cache(maxsize=64)
def step_times(model: ModelConfig, gpu: GPU, dtype: CacheDtype, tp: int, ideal: bool) -> StepTimes:
    """The step times of a plan; prices and prompts do not matter to them."""
    return StepTimes(model, gpu, dtype, tp, ideal, tables(gpu))


def times_of(plan: Plan) -> StepTimes:
    """The step times of a plan."""
    return step_times(plan.model, plan.gpu.at(1.0), plan.dtype, plan.tp, plan.ideal)


def users(memory: Budget, length: int) -> float:
    """Requests of ``length`` tokens that the cache holds. One block is the null block and belongs to none."""
    return max(0, memory.blocks - 1) / memory.request_blocks(length)


def why_not(plan: Plan, memory: Budget, length: int) -> str | None:
    """Why a plan cannot serve one request of ``length`` tokens, or None."""
    if memory.cache <= 0:
        need = (memory.requested - memory.cache) / GIB
        return (
            f"weights of {memory.weights / GIB:.1f} GiB and {need - memory.weights / GIB:.1f} GiB for "
            "steps and framework "
            f"exceed the {memory.requested / GIB:.1f} GiB that vLLM may use of a {plan.gpu.name}"
        )
    if users(memory, length) < 1:
        need = memory.request_blocks(length)
        return (
            f"the cache has {memory.blocks:,} blocks, and one request of {length:,} tokens needs {need:,} "
            "and the null block"
        )
    return None


def steady(times: StepTimes, chunk: int, concurrency: int, prompt: int, output: int) -> Steady:
    """The steady state with ``concurrency`` requests in the system.

    While each of them gives ``output`` tokens, the engine makes ``output`` decode steps and computes as many prompts
    as there are requests, which lengthens steps: cycle = output x decode + concurrency x prompt's share.
    """
    context = prompt + output / 2
    decode = times.step(concurrency, context, [])
    room = max(1, chunk - concurrency)
    if prompt <= room:
        together = max(1, min(room // prompt, concurrency))
        extra = (times.step(concurrency, context, [(prompt, 0)] * together) - decode) / together
        steps = 1.0
    else:
        steps = prompt / room
        probes = [round(index * (prompt - room) / (PROBES - 1)) for index in range(PROBES)]
        mean = sum(times.step(concurrency, context, [(room, before)]) for before in probes) / PROBES - decode
        extra = mean * steps
    cycle = output * decode + concurrency * extra
    return Steady(
        tokens=concurrency * output / cycle * 1e3,
        ttft=extra + steps * decode,
        tpot=decode + (concurrency - 1) * extra / output,
    )


def most(times: StepTimes, plan: Plan, workload: Workload, room: float) -> int:
    """The most requests at a time that keep the SLOs by arithmetic and fit ``room``; at least 1."""
    prompt, output = round(workload.prompt.mean), round(workload.output.mean)

    def keeps(concurrency: int) -> bool:
        found = steady(times, plan.step_tokens, concurrency, prompt, output)
        return found.ttft <= (workload.ttft or math.inf) and found.tpot <= (workload.tpot or math.inf)

    low, high = 1, max(1, min(plan.step_sequences, math.floor(room), plan.step_tokens - 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle - 1)
    return low


def keeps_slos(outcome: Outcome, workload: Workload) -> bool:
    """Whether the 90th percentiles are within the SLOs and nothing was refused."""
    return (
        outcome.refused == 0
        and outcome.ttft["p90"] <= (workload.ttft or math.inf)
        and outcome.tpot["p90"] <= (workload.tpot or math.inf)
    )


def answered(times: StepTimes, plan: Plan, workload: Workload, room: float) -> float:
    """Requests that a plan answers in a second when its cache is full, by arithmetic. More that arrive wait ever
    longer, whatever a simulation of some minutes says.
    """
    prompt, output = round(workload.prompt.mean), round(workload.output.mean)
    together = max(1, min(plan.step_sequences, math.floor(room), plan.step_tokens - 1))
    return steady(times, plan.step_tokens, together, prompt, output).tokens / output


def requests_of(times: StepTimes, plan: Plan, workload: Workload) -> int:
    """How many requests to simulate for a steady state."""
    if workload.concurrency is not None:
        return max(48, 4 * workload.concurrency)
    assert workload.rate is not None
    prompt, output = round(workload.prompt.mean), round(workload.output.mean)
    alone = steady(times, plan.step_tokens, 1, prompt, output)
    seconds = max(60.0, 10 * (alone.ttft + alone.tpot * output) / 1e3)
    return int(min(MOST_REQUESTS, max(200, seconds * workload.rate)))


def run(plan: Plan, memory: Budget, workload: Workload, seed: int = 0, loan: Loan | None = None) -> Outcome:
    """Simulates a workload that has a rate or a concurrency, long enough for a steady state."""
    times = times_of(plan)
    engine = Engine(times, memory.layout, memory.blocks, plan.step_tokens, plan.step_sequences, loan=loan)
    return simulate(engine, workload, requests_of(times, plan, workload), seed, plan.model.max_len)


def estimate(plan: Plan, workload: Workload, seed: int = 0) -> Estimate:
    """What a plan gives. Where neither rate nor concurrency is given: as many requests at a time as keep the SLOs.

    Raises ``PlanError`` for what vLLM refuses; that a plan does not fit is said in ``problem``.
    """
    memory = plan.memory()
    room = users(memory, workload.length)
    if problem := why_not(plan, memory, workload.length):
        return Estimate(plan, memory, room, None, None, False, {}, problem)
    times = times_of(plan)
    if workload.rate or workload.concurrency:
        outcome = run(plan, memory, workload, seed)
        rate = answered(times, plan, workload, room) if workload.rate else None
        met = keeps_slos(outcome, workload) and (rate is None or workload.rate is None or workload.rate <= rate)
        return Estimate(plan, memory, room, workload.concurrency, outcome, met, times.sources(), most_rate=rate)
    concurrency = most(times, plan, workload, room)
    while True:
        outcome = run(plan, memory, replace(workload, concurrency=concurrency), seed)
        met = keeps_slos(outcome, workload)
        if met or concurrency == 1:
            return Estimate(plan, memory, room, concurrency, outcome, met, times.sources())
        concurrency = max(1, int(concurrency * MARGIN))
