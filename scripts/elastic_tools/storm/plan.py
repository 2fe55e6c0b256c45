"""What is sent. Everything follows from the seed; only the times at which things happen do not."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, get_args

Kind = Literal["greedy", "sampled", "seeded", "pair", "aborted"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_WEIGHTS: dict[Kind, int] = {"greedy": 10, "sampled": 2, "seeded": 3, "pair": 2, "aborted": 3}

GROUPS = 4  # of prompts with a prefix in common
MEMBERS = 4  # prompts in each group
SINGLES = 8  # prompts that have nothing in common
LENGTHS = (8, 16, 24, 40, 64, 96)  # tokens to generate
SENTENCE_TOKENS = 32  # at most, with the tokenizers of today's models

MOST_TIMES = 5  # as long as asked
BASE_EVERY = 4  # where requests must be preempted, one resize of so many goes to the base, whatever is in use

SUBJECTS = ("the tides", "bread", "a lighthouse", "bees", "glaciers", "chess", "volcanoes", "bridges", "owls", "maps")
PLACES = ("Lisbon", "Oslo", "Cairo", "Lima", "Osaka", "Quebec", "Perth", "Riga")


@dataclass(frozen=True)
class Settings:
    """How hard it blows."""

    seconds: float = 600  # and up to MOST_TIMES as long while something is missing that has to happen
    clients: int = 32
    seed: int = 0
    warm_up_s: float = 15  # the same clients before it, with the size fixed
    resize_every_s: float = 0.25
    most_bytes: int | None = None  # the largest size that is asked for; None: the capacity
    resizes_at_once: int = 4  # asked and not answered; at that many, a turn is left out
    request_seeds: bool = True  # some requests carry a seed of their own
    patience_s: float = 120  # without a token, after which a request has failed
    must_move: bool = False  # moved blocks are part of the test
    must_preempt: bool = False  # so are preempted requests


@dataclass(frozen=True)
class Prompt:
    """A prompt, and how many tokens the greedy answer to it has."""

    name: str
    text: str
    tokens: int


@dataclass(frozen=True)
class Ask:
    """A request of a client."""

    client: int
    number: int
    kind: Kind
    prompt: Prompt
    tokens: int
    seed: int | None = None
    abort_after: int | None = None  # tokens after which the client hangs up

    @property
    def name(self) -> str:
        return f"client {self.client}, request {self.number} ({self.kind}, {self.prompt.name}, {self.tokens} tokens)"

    @property
    def greedy(self) -> bool:
        """Whether there is one right answer."""
        return self.kind in ("greedy", "aborted")

    @property
    def choices(self) -> int:
        """Answers that it wants."""
        return 2 if self.kind == "pair" else 1

    def body(self, model: str) -> dict[str, Any]:
        """For `POST /v1/completions`."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt.text,
            "max_tokens": self.tokens,
            "ignore_eos": True,  # so that the number of tokens is known
            "temperature": 0.0 if self.greedy else 0.8,
            "n": self.choices,
            "stream": True,
            "return_token_ids": True,
        }
        return body if self.seed is None else body | {"seed": self.seed}


def make_prompts(seed: int, longest: int) -> list[Prompt]:
    """The pool: groups that share a prefix of several blocks, and prompts of their own.

    Args:
        seed: The same gives the same.
        longest: Tokens of prompt and answer together that the server takes.

    """
    rng = random.Random(f"{seed}-prompts")
    most = max(1, min(20, (longest - max(LENGTHS)) // SENTENCE_TOKENS - 2))

    def sentence(number: int) -> str:
        subject, other = rng.sample(SUBJECTS, 2)
        place, year = rng.choice(PLACES), rng.randint(1500, 1999)
        return f"Note {number}: in {year}, a traveller from {place} wrote that {subject} reminded them of {other}. "

    def text(sentences: int) -> str:
        return "".join(sentence(number + 1) for number in range(sentences))

    prompts = []
    for group in range(GROUPS):
        prefix = text(max(1, most * (group + 1) // GROUPS))
        for member in range(MEMBERS):
            end = f"{sentence(100 + member)}Question {member}: what did they say of {rng.choice(SUBJECTS)}?\nAnswer:"
            prompts.append(Prompt(f"group {group}.{member}", prefix + end, rng.choice(LENGTHS)))
    for single in range(SINGLES):
        start = text(rng.randint(0, most))
        end = f"Write a line about {rng.choice(SUBJECTS)} and the number {rng.randint(10, 99)}.\n"
        prompts.append(Prompt(f"single {single}", start + end, rng.choice(LENGTHS)))
    return prompts


def requests_of(client: int, settings: Settings, prompts: Sequence[Prompt], part: str) -> Iterator[Ask]:
    """What a client sends in one part of the run, one after the other, without end."""
    rng = random.Random(f"{settings.seed}-{part}-client-{client}")
    kinds = [kind for kind in KINDS if kind != "seeded" or settings.request_seeds]
    number = 0
    while True:
        (kind,) = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])
        prompt, seed = rng.choice(prompts), rng.randrange(2**31)
        tokens = prompt.tokens if kind in ("greedy", "aborted") else rng.choice(LENGTHS)
        abort_after = rng.randint(1, max(1, tokens - 1))
        yield Ask(
            client,
            number,
            kind,
            prompt,
            tokens,
            seed if kind == "seeded" else None,
            abort_after if kind == "aborted" else None,
        )
        number += 1


@dataclass(frozen=True)
class Sizes:
    """The sizes that a server can have, in blocks, and what a block is."""

    base: int
    start: int
    most: int  # the largest that is asked for
    capacity: int
    chunk: int
    block_bytes: int
    block_tokens: int


def resizes(settings: Settings, sizes: Sizes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Bodies for `POST /elastic_kv/resize`, each with the blocks that it should come to, without end."""
    rng = random.Random(f"{settings.seed}-resizes")
    for turn in count():
        kind = rng.random()
        blocks = rng.randint(sizes.base, sizes.most)
        if kind < 0.1:
            blocks = sizes.base
        elif kind > 0.9:
            blocks = sizes.most
        preempting = settings.must_preempt and turn % BASE_EVERY == BASE_EVERY - 1
        if preempting:
            blocks = sizes.base
        unit = rng.choice(("blocks", "bytes", "tokens", "fraction"))
        body: dict[str, Any] = {
            unit: {
                "blocks": blocks,
                "bytes": blocks * sizes.block_bytes,
                "tokens": blocks * sizes.block_tokens,
                # Half a block more: a fraction that is rounded down must not come out a block less.
                "fraction": min(1.0, (blocks + 0.5) / sizes.capacity),
            }[unit]
        }
        if rng.random() < 0.25 and not preempting:
            body["allow_preemption"] = False
        yield max(sizes.base, blocks // sizes.chunk * sizes.chunk), body
