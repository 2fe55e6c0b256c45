"""What the greedy requests answer while the size stays: the texts that a resize must not change."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from elastic_tools.storm.plan import Ask, Prompt
from elastic_tools.storm.stream import Record, ask

# Between the best token and the next one, in log probability. Batches of other shapes add up in another order, which
# moves a log probability by about 1e-5 in float32; where two tokens lie nearer than this, neither is the right one.
LEAST_MARGIN = 1e-3
FEWEST_TOKENS = 4


class NoReferenceError(Exception):
    """The server does not answer as it must before a storm."""


@dataclass(frozen=True)
class References:
    """The prompts that can be compared, their answers, and how many prompts were left out."""

    prompts: list[Prompt]
    tokens: dict[str, list[int]]
    shortened: int = 0  # a tie is near, so only the tokens before it are asked for
    left_out: int = 0  # a tie comes at once
    unsteady: tuple[str, ...] = ()  # two runs at the same size differ


async def record(
    http: aiohttp.ClientSession,
    model: str,
    prompts: Sequence[Prompt],
    patience_s: float,
    progress: Callable[[], None],
) -> References:
    """Asks everything twice: a few at a time, then all at once. What differs without a resize proves nothing later."""
    few = asyncio.Semaphore(4)

    async def first(prompt: Prompt) -> tuple[Prompt, list[int]]:
        async with few:
            tokens, margins = await _with_margins(http, model, prompt, patience_s)
        progress()
        near = next((place for place, margin in enumerate(margins) if margin < LEAST_MARGIN), len(tokens))
        return replace(prompt, tokens=near), tokens[:near]

    async def again(number: int, prompt: Prompt) -> list[int]:
        told = await ask(http, model, Ask(-1, number, "greedy", prompt, prompt.tokens), patience_s)
        progress()
        if told.outcome != "done":
            raise NoReferenceError(f"before the storm, {told.ask.name}: {told.why}")
        return told.tokens[0]

    answers = await asyncio.gather(*map(first, prompts))
    usable = [(prompt, tokens) for prompt, tokens in answers if prompt.tokens >= FEWEST_TOKENS]
    repeated = await asyncio.gather(*(again(number, prompt) for number, (prompt, _) in enumerate(usable)))
    steady = {prompt.name: tokens for (prompt, tokens), other in zip(usable, repeated, strict=True) if tokens == other}
    asked = {prompt.name: prompt.tokens for prompt in prompts}
    return References(
        prompts=[prompt for prompt, _ in usable if prompt.name in steady],
        tokens=steady,
        shortened=sum(prompt.tokens < asked[prompt.name] for prompt, _ in usable),
        left_out=len(prompts) - len(usable),
        unsteady=tuple(prompt.name for prompt, _ in usable if prompt.name not in steady),
    )


def difference(references: References, record: Record) -> str | None:
    """Where a greedy answer, or the part that the client waited for, leaves the reference."""
    wanted, got = references.tokens[record.ask.prompt.name], record.tokens[0]
    place = next((n for n, (one, other) in enumerate(zip(wanted, got, strict=False)) if one != other), None)
    if place is None:
        return None
    return f"{record.ask.name}: token {place} is {got[place]}, not {wanted[place]}"


def without_unsteady(references: References, records: Sequence[Record]) -> References:
    """Leaves out the prompts of which a greedy answer differs among `records`, made while the size stayed."""
    greedy = [record for record in records if record.ask.greedy]
    unsteady = {record.ask.prompt.name for record in greedy if difference(references, record)}
    prompts = [prompt for prompt in references.prompts if prompt.name not in unsteady]
    return replace(references, prompts=prompts, unsteady=(*references.unsteady, *sorted(unsteady)))


async def _with_margins(
    http: aiohttp.ClientSession, model: str, prompt: Prompt, patience_s: float
) -> tuple[list[int], list[float]]:
    """The greedy tokens, and by how much each one won."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt.text,
        "max_tokens": prompt.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # two tokens may have the same text
    }
    limit = aiohttp.ClientTimeout(total=prompt.tokens * patience_s)
    async with http.post("/v1/completions", json=body, timeout=limit) as reply:
        if reply.status != 200:
            raise NoReferenceError(f"before the storm: HTTP {reply.status}: {(await reply.text())[:300]}")
        choice = (await reply.json())["choices"][0]
    margins = []
    for best in choice["logprobs"]["top_logprobs"]:
        first, second = sorted(best.values(), reverse=True)[:2]
        margins.append(first - second)
    return choice["token_ids"], margins
