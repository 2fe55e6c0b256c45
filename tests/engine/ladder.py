"""The prompt ladder of vLLM #52872 under a memory budget: long prompts beside a request that decodes, up and down.

    python ladder.py '{"model": "...", "policies": ["static", ...], "room": BYTES, "most": TOKENS}'

Each policy runs in a process of its own, which is forked when vLLM is imported: an engine may die of its policy.
The last line of the output is JSON: by policy, what came of it.
"""

import json
import multiprocessing
import os
import re
import resource
import sys
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

MIB = 1 << 20


def data_bytes() -> int:
    """What counts against RLIMIT_DATA."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


class Ladder:
    """An engine, and what its steps were."""

    def __init__(self, policy: str, options: dict) -> None:
        self.most = options["most"]
        elastic = {
            "policy": policy,
            "memory_budget": data_bytes() + options["room"],
            "capacity": options["room"],
            "margin": options["margin"],
            "small_chunk": self.most // 12,
            "lend_after_s": 0.0,
            "unsafe_always_lent": True,
        }
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options["model"],
                dtype="float32",
                enforce_eager=True,
                max_model_len=self.most + 256,
                block_size=32,
                max_num_seqs=4,
                max_num_batched_tokens=self.most,
                disable_log_stats=True,
                enable_prefix_caching=False,
                elastic_kv_config=elastic,
            )
        )
        self.tokens: dict[str, list] = {}
        self.largest = 0  # tokens of a step
        scheduler = self.engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def watched(*arguments):
            output = schedule(*arguments)
            self.largest = max(self.largest, output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = watched

    def ask(self, name: str, length: int, tokens: int, **params) -> None:
        prompt = {"prompt_token_ids": [(37 * place) % 40000 + 10 for place in range(length)]}
        # Cumulative outputs would have only those of a request's answers that went on in a step.
        params = {
            "temperature": 0.0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        } | params
        self.engine.add_request(name, prompt, SamplingParams(**params))

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    self.tokens[output.request_id] = [list(one.token_ids) for one in output.outputs]

    def settle(self) -> None:
        """Let what is being lent be lent."""
        self.engine.engine_core.engine_core.elastic_kv.poll(wait=True)

    def climb(self, name: str, length: int, **params) -> dict:
        """One prompt beside a request that decodes, which was alone until all was lent. Returns what its largest step
        was, and the cache then.
        """
        self.ask(f"{name} decodes", 8, 12)
        self.engine.step()
        self.settle()
        self.largest = 0
        self.ask(name, length, 3, **params)
        self.run()
        return {"length": length, "largest": self.largest} | self.state()

    def state(self) -> dict:
        state = self.engine.elastic_kv_state()
        return {"resident": state["blocks"]["resident"], "reserve": state["reserve"], "last": state["last"]}


def climb(policy: str, options: dict) -> dict:
    most = options["most"]
    begun = time.monotonic()
    try:
        ladder = Ladder(policy, options)
    except ValueError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    result = {"per_block": ladder.engine.elastic_kv_state()["bytes"]["per_block"], "start": ladder.state()["resident"]}
    result["start_s"] = time.monotonic() - begun
    rungs: list[dict] = []
    result["rungs"] = rungs
    try:
        ladder.ask("alone", 8, 12)
        ladder.run()
        ladder.settle()
        result["decoding"] = ladder.state()
        for place, length in enumerate([most // 12, most // 4, most // 2, most - 8, most // 12, most // 2]):
            rungs.append(ladder.climb(f"rung {place}", length))
        rungs.append(ladder.climb("scored", most // 2, prompt_logprobs=1))
        choice = StructuredOutputsParams(choice=["yes", "no"])
        rungs.append(ladder.climb("structured", most - 8, structured_outputs=choice, ignore_eos=False))
        rungs.append(ladder.climb("several", most - 8, n=3, top_k=1, temperature=1.0))
        ladder.ask("alone again", 8, 12)
        ladder.run()
        ladder.settle()
        result["decoding_again"] = ladder.state()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["seconds"] = time.monotonic() - begun
    result["limit"] = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return result | {"tokens": ladder.tokens}


def main(options: dict) -> dict:
    fork = multiprocessing.get_context("fork")
    results = {}
    for policy in options["policies"]:
        ours, theirs = fork.Pipe()
        process = fork.Process(target=lambda: theirs.send(climb(policy, options)))  # noqa: B023
        process.start()
        theirs.close()
        try:
            results[policy] = ours.recv()
        except EOFError:
            results[policy] = {"error": "the process ended"}
        process.join()
    return results


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))))
