"""One policy: a process with an engine under a memory budget, into whose decoding long prompts burst on command.

Started by ``arms.py`` with a JSON object on the command line, and answers as ``bench/engine.py`` does.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

DECODERS = 3
WARM_STEPS = 8  # steps in which requests only decode, before a long prompt comes
WAIT_S = 0.3  # longer than it takes until the reserve is lent again


class Engine:
    """An in-process engine, stepped by hand so that every token's time is known."""

    def __init__(self, arguments: dict[str, Any], elastic: dict[str, Any]) -> None:
        from vllm import LLM

        room = elastic.pop("room")
        elastic["memory_budget"] = data_bytes() + room
        self.llm: Any = LLM(**arguments, elastic_kv_config=elastic)
        self.engine: Any = self.llm.llm_engine
        self.resizes: list[dict[str, Any]] = []
        self._last = self.state()["last"]

    def state(self) -> dict[str, Any]:
        """As `GET /elastic_kv` gives it."""
        state: dict[str, Any] = self.llm.elastic_kv_state()
        return state

    def step(self) -> tuple[float, list[Any]]:
        """One step; when it ended, and its outputs. Resizes that ended in it are kept."""
        outputs = self.engine.step()
        now = time.perf_counter()
        last = self.state()["last"]
        if last is not None and last is not self._last:
            self._last = last
            self.resizes.append(last)
        return now, outputs

    def round(self, number: int, prompts: int, length: int, tokens: int) -> dict[str, Any]:
        """While ``DECODERS`` requests decode, ``prompts`` prompts of ``length`` tokens come, one after the other, each
        after a while in which nothing else was done.

        ``ttft_ms`` is of each long prompt, ``gaps_ms`` are the times between tokens of those that decode, while a
        long prompt is computed and while none is. ``decoding`` is the state when only decoding is done.
        """
        from vllm import SamplingParams

        self.resizes = []
        endless = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
        for index in range(DECODERS):
            self.engine.add_request(f"{number} decoder {index}", prompt(number, index, 16), endless)
        ttft, busy, quiet, output = [], [], [], []
        state: dict[str, Any] = {}
        for index in range(prompts):
            warm = time.perf_counter()
            before, steps = 0.0, 0
            while steps < WARM_STEPS or time.perf_counter() - warm < WAIT_S:
                now, _ = self.step()
                quiet += [now - before] if before else []
                before, steps = now, steps + 1
            state = self.state()
            name = f"{number} long {index}"
            asked = time.perf_counter()
            long = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            self.engine.add_request(name, prompt(number, DECODERS + index, length), long)
            first, done = 0.0, False
            while not done:
                now, outputs = self.step()
                busy += [] if first else [now - before]
                before = now
                for one in outputs:
                    if one.request_id == name and one.outputs[0].token_ids:
                        first = first or now
                        done = one.finished
                        output += list(one.outputs[0].token_ids) if done else []
            ttft.append(first - asked)
        self.engine.abort_request([f"{number} decoder {index}" for index in range(DECODERS)])
        while self.engine.has_unfinished_requests():
            self.step()
        return {
            "ttft_ms": [1000 * each for each in ttft],
            "busy_gaps_ms": [1000 * each for each in busy],
            "quiet_gaps_ms": [1000 * each for each in quiet],
            "decoding": state,
            "resizes": self.resizes,
            "output": output,
        }


def prompt(number: int, index: int, length: int) -> dict[str, list[int]]:
    """A prompt that no other one of a benchmark begins like."""
    return {"prompt_token_ids": [(37 * place + 101 * index + 1009 * number) % 40000 + 10 for place in range(length)]}


def data_bytes() -> int:
    """What of this process counts against a memory budget."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def main() -> None:
    """Serves commands until the pipe closes. An engine that dies of its policy answers with the error."""
    settings = json.loads(sys.argv[1])
    commands, answers = os.fdopen(settings["commands"]), os.fdopen(settings["answers"], "w", buffering=1)
    engine = Engine(settings["engine"], settings["elastic"])
    print(json.dumps({"state": engine.state()}), file=answers)
    for line in commands:
        try:
            answer = engine.round(**json.loads(line))
        except RuntimeError as error:
            answer = {"error": str(error).splitlines()[0]}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
