"""Runs what the elastic cache is combined with: each combination on a fixed cache, and on one that is resized
before every step.

    python cells.py FOLDER NAME...

Prints one line of JSON for each name: what both engines answered, or why one of them did not start. FOLDER is
where the models are made. All engines run in this process, one after the other: importing vLLM takes longer.
"""

import functools
import gc
import json
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import msgspec
import zmq
from vllm import EngineArgs, LLMEngine, ModelRegistry, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash
from vllm.v1.elastic_kv.host_driver import HostPageDriver

from models.tiny import adapter, tiny

# Once for all engines: a second time it trips over modules that were imported meanwhile.
type(current_platform).register_triton_kernel_overrides = staticmethod(
    functools.cache(current_platform.register_triton_kernel_overrides)
)

EVENTS = "inproc://kv-events"
STORY = "The lighthouse keeper wrote in his log every evening, whatever the weather was. "
OBJECT = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue", "yellow"]},
        "round": {"type": "boolean"},
        "size": {"enum": [1, 2, 3, 5, 8]},
    },
    "required": ["colour", "round", "size"],
    "additionalProperties": False,
}


@dataclass
class Cell:
    """A combination: a model, what the engine is told, and what it is asked."""

    model: str = "full"
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: Callable[[int], dict[str, Any]] = lambda number: {}
    # Of the fixed engine alone, where the two shall differ in more than the cache.
    fixed: dict[str, Any] = field(default_factory=dict)
    adapters: int = 0
    capacity: int = 4 << 20  # bytes; 64 blocks or more
    granule: int = 64 << 10  # bytes; a chunk then has several blocks, so that blocks in use have to move
    preempt: bool = True  # whether resizes may
    engines: tuple[str, ...] = ("fixed", "elastic")


def seeded(number: int) -> dict[str, Any]:
    return {"temperature": 1.0, "top_p": 0.95, "seed": 100 + number}


def constrained(number: int) -> dict[str, Any]:
    kinds = [{"json": OBJECT}, {"regex": "[a-f]{3}-[0-9]{2,9}"}, {"choice": ["one", "three", "eleven"]}]
    return {"structured_outputs": StructuredOutputsParams(**kinds[number % 3]), "ignore_eos": False, "max_tokens": 60}


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
GRAMMARS = {"backend": "xgrammar", "disable_any_whitespace": True}  # random weights would write blanks for ever
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
WHOLE_PROMPTS = {"max_num_batched_tokens": 512}
CELLS = {
    # Models
    "full attention": Cell("full"),
    "sliding window": Cell("window", capacity=2 << 20),
    "full attention and sliding window": Cell("interleaved", capacity=4 << 20),
    "one group of both": Cell("interleaved", {"disable_hybrid_kv_cache_manager": True}, capacity=4 << 20),
    "shared-KV layers": Cell("shared"),
    "groups of different block sizes": Cell("sizes", capacity=4 << 20),
    "MLA": Cell("mla", {"block_size": 16} | WHOLE_PROMPTS, capacity=4 << 20, granule=16 << 10),
    "Mamba": Cell("mamba", engines=("elastic",)),
    "attention and Mamba": Cell("hybrid", engines=("elastic",)),
    # Features
    # Upstream's own tokens of a request with an adapter are not always the same after it was preempted.
    "LoRA": Cell("full", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, adapters=2, preempt=False),
    "ngram speculation": Cell("interleaved", {"speculative_config": NGRAM}, capacity=4 << 20),
    "draft model": Cell("full", {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}),
    "structured output": Cell(
        "full",
        {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
        sampling=constrained,
    ),
    "several outputs": Cell("full", sampling=lambda number: seeded(number) | {"n": 1 + number % 3}),
    "seed, prompts in chunks": Cell("full", {"max_num_batched_tokens": 48}, seeded, fixed=WHOLE_PROMPTS),
    "prompt logprobs": Cell("full", sampling=lambda number: {"prompt_logprobs": 2, "logprobs": 2}),
    "no prefix caching": Cell("full", {"enable_prefix_caching": False}),
    "KV events": Cell("full", {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": EVENTS}}),
    "KV events of two groups": Cell(
        "interleaved", {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": EVENTS}}, capacity=4 << 20
    ),
    # KV dtypes
    "bfloat16": Cell("full", {"dtype": "bfloat16"}, capacity=2 << 20),
    "float16": Cell("full", {"dtype": "float16"}, capacity=2 << 20),
    "fp8_e4m3": Cell("full", {"kv_cache_dtype": "fp8_e4m3"}, capacity=1 << 20, granule=16 << 10),
    "fp8_e5m2": Cell("full", {"kv_cache_dtype": "fp8_e5m2"}, capacity=1 << 20, granule=16 << 10),
    "mixed precision": Cell("interleaved", {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["sliding_window"]}),
    # Settings
    "KV connector": Cell("full", {"kv_transfer_config": CONNECTOR}, engines=("elastic",)),
    "native offload": Cell("full", {"kv_offloading_size": 1.0}, engines=("elastic",)),
    "sleep mode": Cell("full", {"enable_sleep_mode": True}, engines=("elastic",)),
}


class Events:
    """A consumer of KV events, which knows the cached prefixes from the events alone."""

    def __init__(self) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(EVENTS)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.cached: Counter[tuple] = Counter()
        self.kinds: Counter[str] = Counter()

    def read(self) -> None:
        while self._socket.poll(500):
            for event in self._decoder.decode(self._socket.recv_multipart()[-1]).events:
                self.kinds[type(event).__name__] += 1
                if not hasattr(event, "block_hashes"):
                    self.cached.clear()
                    continue
                change = 1 if isinstance(event, BlockStored) else -1
                for block_hash in event.block_hashes:
                    self.cached[event.group_idx or 0, block_hash] += change
        self._socket.close()

    def report(self, pool: Any) -> dict[str, Any]:
        """How often each prefix is cached, by the events and by the pool."""
        there: Counter[tuple] = Counter()
        for key, entry in pool.cached_block_hash_to_block._cache.items():
            copies = len(entry) if isinstance(entry, dict) else 1
            there[get_group_id(key), maybe_convert_block_hash(get_block_hash(key))] += copies
        return {"kinds": self.kinds, "cached": there.total(), "equal": +self.cached == there}


def asks(cell: Cell, folder: Path, rng: random.Random) -> list[tuple[str, SamplingParams, LoRARequest | None]]:
    """Prompts of up to 200 tokens, most of which share a prefix with others."""
    made = []
    for number in range(10):
        prompt = STORY * rng.randint(0, 8) + f"Evening {rng.randint(0, 3)}, {'rain and wind, ' * rng.randint(1, 8)}"
        sampling = {"temperature": 0, "max_tokens": rng.randint(6, 30), "ignore_eos": True} | cell.sampling(number)
        lora = None
        if cell.adapters and (which := number % (cell.adapters + 1)):
            lora = LoRARequest(f"adapter-{which}", which, adapter(f"adapter-{which}", folder, seed=which))
        made.append((prompt, SamplingParams(**sampling), lora))
    return made


def note(output: Any, told: dict[str, Any]) -> None:
    """Keep of a request's output what is compared; a later one replaces an earlier one."""
    for one in output.outputs:
        told["outputs"][one.index] = [list(one.token_ids), one.text, one.finish_reason]
        if one.logprobs is not None:
            told["logprobs"] = [place[token].logprob for place, token in zip(one.logprobs, one.token_ids, strict=True)]
    if output.prompt_logprobs is not None:
        places = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        told["prompt_logprobs"] = [place[token].logprob for place, token in places]


def start(cell: Cell, folder: Path, elastic: bool) -> LLMEngine:
    HostPageDriver.granule = cell.granule
    model = tiny(cell.model, folder)
    # vLLM looks at a model's class in a process of its own, which takes 15 s, unless it is registered.
    (architecture,) = json.loads((Path(model) / "config.json").read_text())["architectures"]
    ModelRegistry.register_model(architecture, ModelRegistry._try_load_model_cls(architecture))
    size = (
        {"elastic_kv_config": {"start": cell.capacity // 2, "capacity": cell.capacity}}
        if elastic
        else {"kv_cache_memory_bytes": 8 << 20}
    )
    options = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 256,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 128,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    options |= cell.engine | ({} if elastic else cell.fixed)
    if options.get("speculative_config", {}).get("method") == "draft_model":
        options["speculative_config"] = options["speculative_config"] | {"model": model}
    return LLMEngine.from_engine_args(EngineArgs(model=model, **options, **size))


class Resizes:
    """Resizes an engine at random, and checks it afterwards."""

    def __init__(self, engine: LLMEngine, rng: random.Random, preempt: bool) -> None:
        self._engine, self._rng, self._preempt = engine, rng, preempt
        self._core = engine.engine_core.engine_core
        self.outcomes: Counter[str] = Counter()
        self.done: Counter[str] = Counter(moved=0, preempted=0, evicted=0)
        self.sizes: list[int] = []

    def one(self) -> None:
        state = self._engine.elastic_kv_state()["blocks"]
        # Most of the sizes are tight. Seldom the least: then everything waits until the next resize.
        low = state["base"] if self._rng.random() < 0.25 else max(state["base"], state["capacity"] // 16)
        high = max(low, state["capacity"] // 6) if self._rng.random() < 0.7 else state["capacity"]
        if self._preempt and state["used"] > state["base"] and not self.done["preempted"]:
            # What is in use when the dice fall low depends on what the model answers: the first time it is made sure.
            low = high = state["base"]
        answer = self._engine.resize_kv_cache(blocks=self._rng.randint(low, high), allow_preemption=self._preempt)
        self.outcomes[answer["outcome"]] += 1
        self.done.update({name: answer[name] for name in self.done})
        self.sizes.append(answer["to"])
        pool = self._core.elastic_kv.pool
        pool.check()
        # What is handed out next lies anywhere, as after a long time under load.
        free = pool.free_block_queue.popleft_n(pool.get_num_free_blocks())
        self._rng.shuffle(free)
        pool.free_block_queue.append_n(free)
        now = self._engine.elastic_kv_state()
        assert now["bytes"]["reported"] == now["bytes"]["resident"], now["bytes"]
        assert now["blocks"]["resident"] == answer["to"], (now["blocks"], answer)


def run(cell: Cell, folder: Path, elastic: bool) -> dict[str, Any]:
    """Ask an engine everything, a few requests at a time."""
    rng = random.Random(0)
    todo = asks(cell, folder, rng)
    events = Events() if "kv_events_config" in cell.engine else None
    engine = start(cell, folder, elastic)
    try:
        core = engine.engine_core.engine_core
        resizes = Resizes(engine, random.Random(1), cell.preempt) if elastic else None
        answers: dict[str, dict[str, Any]] = {}
        lengths: Counter[tuple[str, int]] = Counter()
        steps = several = 0
        while todo or engine.has_unfinished_requests():
            for _ in range(rng.randint(0, 2)):
                if todo:
                    prompt, params, lora = todo.pop(0)
                    engine.add_request(f"request-{len(todo):02d}", prompt, params, lora_request=lora)
            for output in engine.step():
                for one in output.outputs:
                    place = output.request_id, one.index
                    several += len(one.token_ids) > lengths[place] + 1
                    lengths[place] = len(one.token_ids)
                told = answers.setdefault(output.request_id, {"outputs": {}})
                note(output, told)
            steps += 1
            if resizes is not None:
                resizes.one()
        told = {"answers": dict(sorted(answers.items())), "steps": steps, "accepted": several}
        groups = core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        told["groups"] = [[type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size] for group in groups]
        if resizes is not None:
            told |= {"outcomes": resizes.outcomes, "sizes": resizes.sizes} | resizes.done
        if events is not None:
            # The events of the last resizes come with the next step.
            engine.add_request("last", "The end.", SamplingParams(temperature=0, max_tokens=1))
            while engine.has_unfinished_requests():
                engine.step()
            events.read()
            told["events"] = events.report(core.scheduler.kv_cache_manager.block_pool)
        return told
    finally:
        engine.engine_core.shutdown()


def attempt(cell: Cell, folder: Path, elastic: bool) -> dict[str, Any]:
    try:
        return run(cell, folder, elastic)
    except Exception as error:  # what it is, is for the test to judge
        cleanup_dist_env_and_memory()
        return {"error": str(error), "traceback": traceback.format_exc()}


def main(folder: str, *names: str) -> None:
    gc.collect = lambda generation=2: 0  # each engine asks for it ten times, at 0.3 s; what is needed is done anyway
    for name in names:
        cell = CELLS[name]
        both = {kind: attempt(cell, Path(folder), kind == "elastic") for kind in cell.engines}
        print("\n" + json.dumps({"cell": name} | both), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
