"""Chat requests, sent through the official client, as many at a time as is wanted."""

import asyncio
import random
import time
from dataclasses import dataclass, field

from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

TOPICS = (
    "the tides", "bread", "a lighthouse", "bees", "glaciers", "the printing press", "chess", "volcanoes", "bridges",
    "the number zero", "owls", "maps", "rivers", "clocks", "salt", "the moon", "libraries", "sailing", "rain", "coffee",
)  # fmt: skip
TASKS = (
    "Explain {topic} to a child.",
    "Write a short story about {topic}.",
    "List surprising facts about {topic}.",
    "Write a letter to a friend about {topic}.",
    "Compare {topic} with {other}.",
)
NOTE = "Note {number}: in the year {year}, a traveller from {place} wrote that {topic} reminded them of {other}."
PLACES = ("Lisbon", "Oslo", "Cairo", "Lima", "Osaka", "Quebec", "Perth", "Riga")


def make_messages(seed: int) -> list[ChatCompletionMessageParam]:
    """A question with up to six notes to read first; the same seed gives the same."""
    rng = random.Random(seed)

    def words() -> dict[str, str]:
        topic, other = rng.sample(TOPICS, 2)
        return {"topic": topic, "other": other, "place": rng.choice(PLACES), "year": str(rng.randint(1500, 1999))}

    notes = [NOTE.format(number=number + 1, **words()) for number in range(rng.randint(0, 6))]
    return [
        {"role": "system", "content": f"You are assistant number {seed}. Be brief."},
        {"role": "user", "content": "\n".join([*notes, rng.choice(TASKS).format(**words())])},
    ]


@dataclass
class Load:
    """Keeps `wanted` requests running until `stop`."""

    client: AsyncOpenAI
    model: str
    wanted: int = 0
    sent: int = 0
    finished: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def open(self) -> int:
        """Requests that have been sent and not been answered to the end."""
        return len(self._tasks)

    async def run(self) -> None:
        """Sends requests until cancelled."""
        while True:
            self._fill()
            await asyncio.sleep(0.05)

    async def drain(self, limit_s: float) -> None:
        """Sends nothing more and waits for the requests that are open.

        Requests that are still open after `limit_s` count as failed.
        """
        self.wanted = 0
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=limit_s)
            self.failures += [f"a request was not answered within {limit_s:.0f} s of the end"] * len(late)

    async def cancel(self) -> None:
        """Gives up what is open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fill(self) -> None:
        while len(self._tasks) < self.wanted:
            task = asyncio.create_task(self._ask(self.sent))
            self.sent += 1
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, seed: int) -> None:
        begin, counted, reason = time.monotonic(), 0, None
        try:
            stream = await self.client.chat.completions.create(
                model=self.model,
                messages=make_messages(seed),
                max_tokens=random.Random(seed).randint(60, 200),
                temperature=0.8,
                seed=seed,
                stream=True,
                # vLLM's own option: every piece then tells how many tokens there are so far.
                extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            )
            async for piece in stream:
                if piece.usage is not None:
                    if not counted and piece.usage.completion_tokens:
                        self.first_token_s.append(time.monotonic() - begin)
                    self.tokens += max(0, piece.usage.completion_tokens - counted)
                    counted = max(counted, piece.usage.completion_tokens)
                for choice in piece.choices:
                    reason = choice.finish_reason or reason
        except OpenAIError as error:
            self.failures.append(f"request {seed}: {type(error).__name__}: {error}")
            return
        if reason not in ("stop", "length") or not counted:
            self.failures.append(f"request {seed} ended with {reason!r} after {counted} tokens")
            return
        self.finished += 1
