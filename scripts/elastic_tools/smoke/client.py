"""What is asked of the server. Answers that are not as they should be raise `Failed`, with the reason."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

NO_KEY = "VLLM_API_KEY has to hold the server's key, and does not: "
MEANINGS = {  # of a status, for a path
    (404, "/elastic_kv"): "the server has no elastic KV cache: ",
    (404, "/elastic_kv/resize"): "the server's cache cannot be resized over HTTP, which takes admin_api: ",
}


class Failed(Exception):
    """A check does not hold; the message says why."""


class Skipped(Exception):
    """A check makes no sense for this server; the message says why."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer. `margins`: by how much, in log probability, each token won; empty where it was not asked."""

    tokens: list[int]
    text: str
    margins: list[float] = field(default_factory=list)


@dataclass
class Client:
    """A server. `log` is what it logged, where that can be read."""

    http: httpx.Client
    log: Path | None = None

    def get(self, path: str) -> httpx.Response:
        """The answer, which is 200."""
        return _ok(self.http.get(path))

    @cached_property
    def model(self) -> str:
        """The first name under which the server has a model."""
        return str(_json(self.get("/v1/models"))["data"][0]["id"])

    def state(self) -> dict[str, Any]:
        """`GET /elastic_kv`."""
        return _json(self.get("/elastic_kv"))

    def resize(self, **wanted: Any) -> dict[str, Any]:
        """The answer to a resize, which has to be done."""
        answer = _json(self.http.post("/elastic_kv/resize", json=wanted))
        if answer["outcome"] != "done":
            raise Failed(f"{wanted} came to {answer['outcome']}: {answer['reason']}")
        return answer

    def complete(self, prompts: Sequence[str], tokens: int) -> list[Answer]:
        """The greedy answers to prompts that are sent in one request, and so are computed in one batch."""
        body = self._body(list(prompts), tokens) | {"logprobs": 2}
        choices = _json(self.http.post("/v1/completions", json=body))["choices"]
        if len(choices) != len(prompts):
            raise Failed(f"{len(choices)} answers to {len(prompts)} prompts")
        answers = []
        for choice in sorted(choices, key=lambda one: one["index"]):
            found = choice["token_ids"] or []
            if len(found) != tokens or choice["finish_reason"] != "length":
                raise Failed(f"{len(found)} tokens and {choice['finish_reason']!r}, where {tokens} were asked for")
            best = [sorted(one.values(), reverse=True) for one in choice["logprobs"]["top_logprobs"]]
            answers.append(Answer(found, choice["text"], [one[0] - one[1] for one in best]))
        return answers

    def stream(self, prompt: str, tokens: int) -> tuple[Answer, int]:
        """A greedy answer that comes in pieces, and their number."""
        found: list[int] = []
        text, pieces, ended, reason = "", 0, False, None
        with self.http.stream("POST", "/v1/completions", json=self._body(prompt, tokens) | {"stream": True}) as reply:
            if reply.status_code != 200:
                reply.read()
            _ok(reply)
            for line in reply.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or ended:
                    continue
                if data == "[DONE]":
                    ended = True
                    continue
                piece = json.loads(data)
                if "choices" not in piece:  # an error that came after the first piece
                    raise Failed(f"the stream says {data[:300]}")
                for choice in piece["choices"]:
                    found += choice["token_ids"] or []
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                    pieces += bool(choice["token_ids"])
        if not ended:
            raise Failed(f"the stream broke off after {len(found)} of {tokens} tokens")
        if len(found) != tokens or reason != "length":
            raise Failed(f"{len(found)} tokens and {reason!r}, where {tokens} were asked for")
        return Answer(found, text), pieces

    def _body(self, prompt: str | list[str], tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # two tokens may have the same text
        }


def _ok(reply: httpx.Response) -> httpx.Response:
    if reply.status_code != 200:
        path = reply.request.url.path
        meaning = NO_KEY if reply.status_code == 401 else MEANINGS.get((reply.status_code, path), "")
        raise Failed(f"{meaning}{reply.request.method} {path} answers {reply.status_code}: {_excerpt(reply)}")
    return reply


def _json(reply: httpx.Response) -> dict[str, Any]:
    """The object in an answer that is 200."""
    try:
        found = _ok(reply).json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        request = reply.request
        raise Failed(f"{request.method} {request.url.path} answers with something else than JSON: {_excerpt(reply)}")
    return found


def _excerpt(reply: httpx.Response) -> str:
    """The begin of an answer, on one line."""
    return " ".join(reply.text.split())[:300]
