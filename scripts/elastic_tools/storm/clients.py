"""The clients: each sends one request after the other until the storm is over."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from elastic_tools.storm.plan import Prompt, Settings, requests_of
from elastic_tools.storm.stream import Record, ask

MOST_FAILURES = 50  # requests; more would say nothing new


@dataclass
class Clients:
    """All of them. `asked` is `len(records)` in the end, or a request did not end."""

    http: aiohttp.ClientSession
    model: str
    settings: Settings
    prompts: Sequence[Prompt]
    asked: int = 0
    failed: int = 0
    records: list[Record] = field(default_factory=list)
    too_many_failed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, go_on: Callable[[], bool], part: str = "storm") -> list["asyncio.Task[None]"]:
        """A task for each client. Each sends while `go_on`, and ends once its last request has."""
        return [asyncio.create_task(self._run(client, go_on, part)) for client in range(self.settings.clients)]

    async def _run(self, client: int, go_on: Callable[[], bool], part: str) -> None:
        for wanted in requests_of(client, self.settings, self.prompts, part):
            if not go_on() or self.too_many_failed.is_set():
                return
            self.asked += 1
            record = await ask(self.http, self.model, wanted, self.settings.patience_s)
            self.records.append(record)
            if record.outcome == "failed":
                self.failed += 1
                if self.failed >= MOST_FAILURES:
                    self.too_many_failed.set()
                await asyncio.sleep(1)  # a server that is gone fails at once
