"""What has to hold, one function each. A check says what it found, or raises `Failed` or `Skipped`."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from elastic_tools.smoke.client import Answer, Client, Failed, Skipped
from elastic_tools.smoke.memory import Meter, meter
from elastic_tools.storm.watch import idle_inconsistencies

MIB = 1 << 20
TOKENS = 16
BATCHES = (1, 2, 4, 8)  # graphs are captured for each of these; without graphs the ends are enough
PROMPTS = (
    "The capital of France is",
    "Question: name three things that are blue.\nAnswer:",
    "Once upon a time there was a lighthouse",
    "1, 2, 3, 4, 5, 6,",
    "The opposite of hot is",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "Dear Sir or Madam, I am writing to",
)
# Between the best token and the next. Batches of other shapes add up in another order, which moves a log probability
# by about 1e-2 in bfloat16; where two tokens lie nearer than this, neither is the right one.
LEAST_MARGIN = 0.05
FEWEST_TOKENS = 16  # over all prompts, that have to be compared
LOAD = 8  # requests under way while the size changes
SETTLE_SECONDS = 15.0  # blocks of a request that ended and measurements of ranks take a moment
GAUGES: dict[str, Callable[[dict[str, Any]], float]] = {  # each has to say what `GET /elastic_kv` does
    "vllm:elastic_kv_resident_blocks": lambda state: state["blocks"]["resident"],
    "vllm:elastic_kv_capacity_blocks": lambda state: state["blocks"]["capacity"],
    "vllm:elastic_kv_base_blocks": lambda state: state["blocks"]["base"],
    "vllm:elastic_kv_resident_bytes": lambda state: state["bytes"]["resident"],
}
RESIZES = "vllm:elastic_kv_resizes_total"


@dataclass
class Smoke:
    """A server, and what earlier checks found out about it."""

    client: Client
    begin: dict[str, Any] = field(default_factory=dict)  # the state at first
    counted: float = 0.0  # resizes in the metrics at first
    wanted: dict[int, list[list[int]]] = field(default_factory=dict)  # by batch size: tokens at the first size
    meter: Meter | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """A small and a large number of blocks, both whole chunks."""
        blocks, chunk = self.begin["blocks"], self.begin["chunk_blocks"]
        large = blocks["resident"] if blocks["resident"] >= 4 * blocks["base"] else blocks["capacity"]
        return max(blocks["base"], large // 4 // chunk * chunk), large


def health(smoke: Smoke) -> str:
    """`GET /health` answers 200, and a model is there."""
    smoke.client.get("/health")
    return smoke.client.model


def state(smoke: Smoke) -> str:
    """The cache is elastic, and its account adds up on an idle server."""
    smoke.begin = _idle_state(smoke)
    smoke.counted = _resizes(smoke)
    if smoke.begin["policy"] != "static":
        raise Failed(f"the policy is {smoke.begin['policy']}; a smoke test decides the sizes alone, which takes static")
    blocks, size = smoke.begin["blocks"], smoke.begin["bytes"]
    return (
        f"driver {smoke.begin['driver']}, {len(smoke.begin['ranks'])} ranks, {blocks['resident']} of "
        f"{blocks['capacity']} blocks, {size['resident'] / MIB:.0f} MiB on each rank"
    )


def completion(smoke: Smoke) -> str:
    """Batches of prompts are answered, the same way twice."""
    for size in BATCHES if smoke.begin["driver"] == "cuda" else (min(BATCHES), max(BATCHES)):
        first, second = (smoke.client.complete(PROMPTS[:size], TOKENS) for _ in range(2))
        smoke.wanted[size] = [_certain(one, other) for one, other in zip(first, second, strict=True)]
    count = sum(map(len, smoke.wanted[max(BATCHES)]))
    if count < FEWEST_TOKENS:
        raise Failed(f"only {count} tokens are the same in two runs and not a near tie: the answers are not steady")
    return f"{first[0].text!r}"


def streaming(smoke: Smoke) -> str:
    """A streamed answer comes in pieces, and is the one that comes at once."""
    answer, pieces = smoke.client.stream(PROMPTS[0], TOKENS)
    _compare(smoke, 1, [answer])
    if pieces < 2:
        raise Failed(f"all {TOKENS} tokens came in one piece")
    return f"{pieces} pieces"


def shrink(smoke: Smoke) -> str:
    """Down to a quarter; the memory goes back."""
    return _resized(smoke, smoke.sizes[0])


def grow(smoke: Smoke) -> str:
    """Up again; the memory comes back."""
    return _resized(smoke, smoke.sizes[1])


def answers(smoke: Smoke) -> str:
    """The answers are those of the first size."""
    return _compare(smoke, max(BATCHES), smoke.client.complete(PROMPTS, TOKENS))


def graphs(smoke: Smoke) -> str:
    """Graphs captured at the first size are replayed at another: every batch size, after down and after up."""
    if smoke.begin["driver"] != "cuda":
        raise Skipped(f"there are no CUDA graphs with the page driver {smoke.begin['driver']}")
    log = smoke.client.log
    if log and "Graph capturing finished" not in log.read_text(errors="replace"):
        raise Skipped("the server captured no graphs")
    for blocks in smoke.sizes:
        smoke.client.resize(blocks=blocks)
        for size in BATCHES:
            _compare(smoke, size, smoke.client.complete(PROMPTS[:size], TOKENS))
    return f"batches of {', '.join(map(str, BATCHES))} at {' and '.join(map(str, smoke.sizes))} blocks"


def load(smoke: Smoke) -> str:
    """Resizes while requests stream: none fails, and no token differs."""
    pool = ThreadPoolExecutor(LOAD)
    try:
        asked = [pool.submit(smoke.client.stream, PROMPTS[number], TOKENS) for number in range(LOAD)]
        resizes = 0
        while resizes < 4 or not all(one.done() for one in asked):
            smoke.client.resize(blocks=smoke.sizes[resizes % 2])
            resizes += 1
        found = _compare(smoke, LOAD, [one.result()[0] for one in asked])
    finally:
        pool.shutdown(wait=False)  # where the time is over, nothing waits for answers that do not come
    smoke.client.resize(blocks=smoke.sizes[1])
    return f"{resizes + 1} resizes, {LOAD} requests, {found}"


def ranks(smoke: Smoke) -> str:
    """All ranks hold the same, by their own account and by the system's."""
    now = _idle_state(smoke)
    if len(now["ranks"]) == 1:
        raise Skipped("there is one rank")
    return f"{len(now['ranks'])} ranks of {now['bytes']['resident'] / MIB:.0f} MiB"


def metrics(smoke: Smoke) -> str:
    """The gauges say what the state says, at another size than the first, and every resize was counted."""
    smoke.client.resize(blocks=smoke.sizes[0])
    now = _idle_state(smoke)
    done = now["transactions"]["done"] - smoke.begin["transactions"]["done"]

    def wrong() -> list[str]:
        found = {sample.name: sample.value for sample in _samples(smoke)}
        expected = {name: value(now) for name, value in GAUGES.items()}
        differ = [
            f"{name} is {found.get(name)}, not {value}" for name, value in expected.items() if found.get(name) != value
        ]
        counted = _resizes(smoke) - smoke.counted
        return differ + [f"{RESIZES} counted {counted:.0f} resizes that were done, and the state {done}"] * (
            counted != done
        )

    _settle(wrong)
    return f"{len(GAUGES)} gauges, {done} resizes"


def refusal(smoke: Smoke) -> str:
    """A size that cannot be had is refused, and nothing changes."""
    before = smoke.client.state()["blocks"]["resident"]
    reply = smoke.client.http.post("/elastic_kv/resize", json={"blocks": smoke.begin["blocks"]["capacity"] + 1})
    if reply.status_code != 400:
        raise Failed(f"more than the capacity is answered with {reply.status_code}: {reply.text[:300]}")
    if (after := smoke.client.state()["blocks"]["resident"]) != before:
        raise Failed(f"it was refused, and the size went from {before} to {after}")
    return "400"


def back(smoke: Smoke) -> str:
    """The size at the end is the one at first."""
    smoke.client.resize(blocks=smoke.begin["blocks"]["resident"])
    smoke.client.get("/health")
    return f"{smoke.begin['blocks']['resident']} blocks"


Check = Callable[[Smoke], str]
CHECKS: tuple[tuple[str, Check], ...] = (
    ("health", health),
    ("state", state),
    ("completion", completion),
    ("streaming", streaming),
    ("shrink", shrink),
    ("answers after the shrink", answers),
    ("grow", grow),
    ("answers after the growth", answers),
    ("graph replay after resizes", graphs),
    ("resizes under load", load),
    ("ranks", ranks),
    ("metrics", metrics),
    ("refusal", refusal),
    ("back to the first size", back),
)


def _resized(smoke: Smoke, blocks: int) -> str:
    """Resizes an idle server and holds the memory to it."""
    smoke.meter = smoke.meter or meter(smoke.client)
    before, read = smoke.client.state()["blocks"]["resident"], smoke.meter.read()
    answer = smoke.client.resize(blocks=blocks)
    changed, now = smoke.meter.read() - read, _idle_state(smoke)
    if not answer["to"] == now["blocks"]["resident"] == blocks:
        raise Failed(f"{blocks} blocks were asked for, {answer['to']} answered, {now['blocks']['resident']} are there")
    expected = (blocks - before) * now["bytes"]["per_block"] * len(now["ranks"])
    found = f"{before} to {blocks} blocks in {answer['duration_ms']:.0f} ms; memory {changed / MIB:+.1f} MiB"
    if abs(changed - expected) > smoke.meter.tolerance:
        raise Failed(f"{found}, where {expected / MIB:+.1f} MiB are due ({smoke.meter.name})")
    if abs(expected) <= 2 * smoke.meter.tolerance:
        raise Failed(f"{found}: too little to be told apart ({smoke.meter.name}); give the server a larger cache")
    return f"{found} ({smoke.meter.name})"


def _certain(one: Answer, other: Answer) -> list[int]:
    """The tokens, up to where two runs differ or a near tie comes."""
    for place, margin in enumerate(one.margins):
        if margin < LEAST_MARGIN or one.tokens[place] != other.tokens[place]:
            return one.tokens[:place]
    return one.tokens


def _compare(smoke: Smoke, size: int, got: Sequence[Answer]) -> str:
    """Holds the answers to those of the first size."""
    for prompt, wanted, answer in zip(PROMPTS, smoke.wanted[size], got, strict=False):
        for place, token in enumerate(wanted):
            if answer.tokens[place] != token:
                raise Failed(f"{prompt!r}: token {place} is {answer.tokens[place]}, and was {token} at the first size")
    return f"{sum(map(len, smoke.wanted[size]))} tokens compared"


def _samples(smoke: Smoke) -> list[Sample]:
    """All that `/metrics` has."""
    return [
        one for family in text_string_to_metric_families(smoke.client.get("/metrics").text) for one in family.samples
    ]


def _resizes(smoke: Smoke) -> float:
    """The resizes that the metrics count as done."""
    return sum(one.value for one in _samples(smoke) if one.name == RESIZES and one.labels.get("outcome") == "done")


def _idle_state(smoke: Smoke) -> dict[str, Any]:
    """The state of a server that has nothing to do, which has to add up."""
    now: dict[str, Any] = {}

    def wrong() -> list[str]:
        now.update(smoke.client.state())
        return idle_inconsistencies(now)

    _settle(wrong)
    return now


def _settle(wrong: Callable[[], list[str]]) -> None:
    """Waits until nothing is wrong, for a while; raises `Failed` with what still is."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while found := wrong():
        if time.monotonic() > deadline:
            raise Failed("; ".join(found))
        time.sleep(0.1)
