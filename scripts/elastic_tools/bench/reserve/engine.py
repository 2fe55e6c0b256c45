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
WAIT_S = 0.3  # longer than it takes until the reserve may be lent again
LEND_LIMIT_S = 60  # until all is lent, or something is wrong


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

    def round(self, number: int, bursts: list[int], length: int, tokens: int, fill: int) -> dict[str, Any]:
        """While ``DECODERS`` requests decode, bursts of prompts come, each after a while without one.

        Args:
            number: Of the round; no other one has its prompts.
            bursts: Prompts that come at the same time, for each burst.
            length: Tokens of each of them.
            tokens: Of each answer.
            fill: Tokens of the short prompts that fill the cache with prefixes before each burst; 0: nothing does.

        Returns:
            ``ttft_ms`` is of each long prompt, by burst. ``busy_gaps_ms`` and ``quiet_gaps_ms`` are the times between
            tokens of those that decode, while long prompts are computed and while none is. ``decoding`` is the state
            when only decoding is done.

        """
        self.resizes = []
        for index in range(DECODERS):
            self._add(f"{number} decoder {index}", prompt(number, index, 16), 4000)
        busy, quiet, ttft, output = [], [], [], []
        state: dict[str, Any] = {}
        for place, prompts in enumerate(bursts):
            quiet += self._decode()
            if fill:
                self._fill(f"{number} {place}", 1000 * number + 100 * place, fill)
                quiet += self._decode()
            state = self.state()
            first = {f"{number} {place} long {index}": 0.0 for index in range(prompts)}
            answers: dict[str, list[int]] = {}
            before = asked = time.perf_counter()
            for index, name in enumerate(first):
                self._add(name, prompt(number, DECODERS + 10 * place + index, length), tokens)
            while len(answers) < prompts:
                now, outputs = self.step()
                busy.append(now - before)
                before = now
                for one in outputs:
                    if one.request_id in first and one.outputs[0].token_ids:
                        first[one.request_id] = first[one.request_id] or now
                        if one.finished:
                            answers[one.request_id] = list(one.outputs[0].token_ids)
            ttft.append([1000 * (at - asked) for at in first.values()])
            output += [answers[name] for name in first]
        self.engine.abort_request([f"{number} decoder {index}" for index in range(DECODERS)])
        while self.engine.has_unfinished_requests():
            self.step()
        return {
            "ttft_ms": ttft,
            "busy_gaps_ms": [1000 * each for each in busy],
            "quiet_gaps_ms": [1000 * each for each in quiet],
            "decoding": state,
            "resizes": self.resizes,
            "output": output,
        }

    def _add(self, name: str, tokens: dict[str, list[int]], answer: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self.engine.add_request(name, tokens, sampling)

    def _decode(self) -> list[float]:
        """Decodes until what may be lent is lent. Returns the seconds between tokens."""
        gaps: list[float] = []
        begin = before = time.perf_counter()
        more = WARM_STEPS  # the last ones end the resize
        while more:
            now, _ = self.step()
            gaps.append(now - before)
            before = now
            blocks, passed = self.state()["blocks"], now - begin
            lending = blocks["resident"] < blocks["allowed"]
            if lending and passed > LEND_LIMIT_S:
                raise RuntimeError(f"not all is lent after {LEND_LIMIT_S} s: {blocks}")
            more = WARM_STEPS if lending or passed < WAIT_S else more - 1
        return gaps[1:]

    def _fill(self, name: str, seed: int, length: int) -> None:
        """Sends one short prompt after the other until no block is left that holds nothing of use."""
        most = self.state()["blocks"]["capacity"]
        for index in range(most):
            state = self.state()
            if state["blocks"]["free"] * state["block_size"] < length:
                return
            request = f"{name} short {index}"
            self._add(request, prompt(seed, 5000 + index, length), 1)
            while not any(one.request_id == request and one.finished for one in self.step()[1]):
                pass
        raise RuntimeError(f"{most} prompts of {length} tokens do not fill the cache")


def prompt(number: int, index: int, length: int) -> dict[str, list[int]]:
    """A prompt that no other one of a benchmark begins like: with its own two numbers, below 40,000 each."""
    return {"prompt_token_ids": [10 + number, 10 + index, *((37 * place) % 40000 + 10 for place in range(length - 2))]}


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
