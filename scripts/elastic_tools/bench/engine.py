"""One arm of a comparison: a process with an engine that runs rounds of a fixed workload on command.

Started by ``arms.py`` with a JSON object on the command line. It answers on a pipe, one JSON object per command:
first what it is, then one answer per round. It waits for a command without using the CPU.
"""

import gc
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SUBJECTS = ["a storm", "the sea", "an old map", "two dogs", "a letter", "the lamp", "winter", "a ship"]


def prompts(number: int, count: int) -> list[str]:
    """The prompts of a round. No two are alike, so that no round finds its prompts in the prefix cache."""
    return [
        f"Note {number}-{index}. The keeper of the lighthouse wrote in his log every evening, whatever the weather "
        f"was. That evening he wrote about {SUBJECTS[index % len(SUBJECTS)]}:"
        for index in range(count)
    ]


def check_identity(expected: dict[str, Any]) -> dict[str, Any]:
    """Refuses to run as another engine than the one that the comparison names."""
    import vllm

    found = Path(vllm.__file__).resolve().parent
    if found != Path(expected["package"]).resolve():
        raise SystemExit(f"vllm was imported from {found}, not from {expected['package']}")
    patched = importlib.util.find_spec("vllm.v1.elastic_kv") is not None
    if patched != expected["patched"]:
        raise SystemExit(
            f"the vllm in {found} is {'patched' if patched else 'not patched'}, unlike what this arm is for"
        )
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch", "transformers")}
    return {"patched": patched, "versions": versions}


class Engine:
    """An in-process engine, stepped by hand so that every token's time is known."""

    def __init__(self, arguments: dict[str, Any], elastic: dict[str, Any] | None) -> None:
        from vllm import LLM

        self.llm: Any = LLM(**arguments | ({"elastic_kv_config": elastic} if elastic else {}))
        self.engine: Any = self.llm.llm_engine
        config = self.engine.vllm_config
        if (getattr(config, "elastic_kv_config", None) is not None) != bool(elastic):
            raise SystemExit("the cache of this engine is not of the kind that this arm is for")
        self.state = self.llm.elastic_kv_state() if elastic else {}
        self.blocks = self.state["blocks"]["resident"] if elastic else config.cache_config.num_gpu_blocks

    def round(self, number: int, requests: int, tokens: int) -> dict[str, Any]:
        """Generates ``tokens`` greedy tokens for each of ``requests`` prompts at once.

        ``seconds`` is from the first step to the last token, ``tpot_ms`` the mean over requests of the time between a
        request's tokens after its first one, ``cpu_s`` the processor time of the whole process.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for index, prompt in enumerate(prompts(number, requests)):
            self.engine.add_request(f"{number}-{index:04d}", prompt, params)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        output: dict[str, list[int]] = {}
        gc.collect()
        cpu, begin = time.process_time(), time.perf_counter()
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for one in outputs:
                ids = list(one.outputs[0].token_ids)
                if ids:
                    first.setdefault(one.request_id, now)
                if one.finished:
                    last[one.request_id], output[one.request_id] = now, ids
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        tpot = [(last[name] - first[name]) / (len(output[name]) - 1) for name in output]
        return {
            "tokens_per_s": sum(map(len, output.values())) / seconds,
            "tpot_ms": 1000 * sum(tpot) / len(tpot),
            "seconds": seconds,
            "cpu_s": cpu,
            "output": [output[name] for name in sorted(output)],
        }


def main() -> None:
    """Serves commands until the pipe closes."""
    settings = json.loads(sys.argv[1])
    commands, answers = os.fdopen(settings["commands"]), os.fdopen(settings["answers"], "w", buffering=1)
    identity = check_identity(settings)
    engine = Engine(settings["engine"], settings["elastic"])
    print(json.dumps(identity | {"blocks": engine.blocks, "elastic": engine.state}), file=answers)
    idle_cpu, idle_since = time.process_time(), time.perf_counter()
    for line in commands:
        waited = {"idle_s": time.perf_counter() - idle_since, "idle_cpu_s": time.process_time() - idle_cpu}
        print(json.dumps(engine.round(**json.loads(line)) | waited), file=answers)
        idle_cpu, idle_since = time.process_time(), time.perf_counter()


if __name__ == "__main__":
    main()
