"""One arm of a comparison: runs the same requests in an in-process engine and prints their tokens.

    python arm.py '{"model": "...", "elastic": {...} | null, "resize": true, "async_scheduling": false,
                    "requests": 32, "tokens": [8, 40], "seed": 0, "backend": null, "stale": false}'

The last line of the output is JSON: the token ids of every request, which vLLM was imported, and how
the resizes went. Which vLLM that is, patched or not, is up to PYTHONPATH.
"""

import importlib.util
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams


def requests(count: int, tokens: list[int], rng: random.Random) -> list[tuple[str, SamplingParams]]:
    """Short and long prompts, some with a prefix in common, greedy, of mixed output lengths."""
    story = "The lighthouse keeper wrote in his log every evening, whatever the weather was. " * 12
    subjects = ["a storm", "the sea", "an old map", "two dogs", "a letter", "the lamp", "winter", "a ship"]
    made = []
    for number in range(count):
        subject = subjects[number % len(subjects)]
        prompt = [
            f"Question {number}: name three things that are blue.\nAnswer:",
            f"{story}One evening he wrote about {subject}:",
            f"{story[: 80 * rng.randint(1, 6)]}Then came {subject}, and",
            f"Write a sentence about {subject} and the number {rng.randint(10, 99)}.\n",
        ][number % 4]
        made.append((prompt, SamplingParams(temperature=0, max_tokens=rng.randint(*tokens), ignore_eos=True)))
    return made


def scatter(pool, rng: random.Random) -> None:
    """Shuffle what is handed out next, so that live blocks lie all over the cache and a shrink has to move them."""
    free = pool.free_block_queue.popleft_n(pool.get_num_free_blocks())
    rng.shuffle(free)
    pool.free_block_queue.append_n(free)


def poison() -> list[int]:
    """Fill chunks with NaN before they go: were their pages to come back like that, it would spread over requests.

    Returns the chunks that were filled, as they come to be.
    """
    from vllm.v1.elastic_kv.arena import KVArena

    filled: list[int] = []

    def poisoning(plain):
        def detach(arena: KVArena, chunks: Iterable[int]) -> None:
            chunks = list(chunks)
            whole = arena.tensor()
            for segment in arena.segments:
                size = segment.stride * arena.chunk_blocks
                for chunk in chunks:
                    whole[segment.offset + chunk * size :][:size] = -1  # 0xFF bytes: NaN in every float format
            filled.extend(chunks)
            plain(arena, chunks)

        return detach

    for name in ("detach", "begin_detach"):
        setattr(KVArena, name, poisoning(getattr(KVArena, name)))
    return filled


def plant(core) -> str:
    """Let the worker's table of the first request name a block that has no memory, as its first; the request's id."""
    batch = core.model_executor.driver_worker.worker.model_runner.input_batch
    row = next(row for row, length in enumerate(batch.num_tokens_no_spec[: batch.num_reqs]) if length > 40)
    missing = core.elastic_kv.pool.layout.capacity_blocks - 1
    assert core.elastic_kv.pool.num_gpu_blocks <= missing
    batch.block_table[0].block_table.np[row, 0] = missing
    return batch.req_ids[row]


def main(options: dict) -> dict:
    rng = random.Random(options.get("seed", 0))
    todo = requests(options.get("requests", 32), options.get("tokens", [8, 40]), rng)
    elastic = options.get("elastic")
    if "granule" in options:
        # As large as a GPU's, so that a chunk has many blocks, and a shrink has to move those in use.
        from vllm.v1.elastic_kv.host_driver import HostPageDriver

        HostPageDriver.granule = options["granule"]
    poisoned = poison() if elastic else []
    size = {"elastic_kv_config": elastic} if elastic else {"kv_cache_memory_bytes": 1 << 29}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=options["model"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=32,
            max_num_seqs=12,
            max_num_batched_tokens=512,
            disable_log_stats=True,
            async_scheduling=options.get("async_scheduling", False),
            attention_backend=options.get("backend"),
            **size,
        )
    )
    core = engine.engine_core.engine_core
    outputs, outcomes, costs, sizes, in_flight = {}, Counter(), Counter(), [], 0
    planted, reasons = None, {}
    step = 0
    while todo or engine.has_unfinished_requests():
        for _ in range(rng.randint(0, 3)):
            if todo:
                prompt, params = todo.pop(0)
                engine.add_request(f"request-{len(todo):02d}", prompt, params)
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids)
                reasons[output.request_id] = [output.outputs[0].finish_reason, output.outputs[0].stop_reason]
        step += 1
        if options.get("stale") and planted is None and step == 3:
            planted = plant(core)
        if options.get("resize"):
            in_flight += bool(core.batch_queue)
            state = engine.elastic_kv_state()["blocks"]
            # Not always the least: then requests run one after the other until the next resize.
            low = state["base"] if rng.random() < 0.25 else 40
            paused = rng.random() < 0.15  # as a trainer pauses generation while it changes weights
            if paused:
                core.pause_scheduler("keep", clear_cache=False)
            answer = engine.resize_kv_cache(blocks=rng.randint(low, state["capacity"]))
            if paused:
                core.resume_scheduler()
            outcomes[answer["outcome"]] += 1
            costs.update({name: answer[name] for name in ("evicted", "moved", "preempted")})
            sizes.append(answer["to"])
            core.elastic_kv.pool.check()
            scatter(core.elastic_kv.pool, rng)
            now = engine.elastic_kv_state()
            assert now["bytes"]["reported"] == now["bytes"]["resident"], now["bytes"]
            assert now["blocks"]["resident"] == answer["to"], (now["blocks"], answer)
    return {
        "vllm": vllm.__file__,
        "patched": importlib.util.find_spec("vllm.v1.elastic_kv") is not None,
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__module__,
        "driver": core.elastic_kv.state()["driver"] if elastic else None,
        "async": core.batch_queue is not None,
        "steps": step,
        "steps_in_flight": in_flight,
        "outcomes": outcomes,
        "costs": costs,
        "sizes": sizes,
        "poisoned": len(poisoned),
        "planted": planted,
        "reasons": reasons,
        "faults": core.elastic_kv.take_stats().soft_page_faults if elastic else 0,
        "outputs": dict(sorted(outputs.items())),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
