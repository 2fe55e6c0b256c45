"""What a storm has to have had. One that left something out proves nothing about it."""

from collections import Counter
from collections.abc import Sequence

from elastic_tools.storm.plan import KINDS, Kind, Settings
from elastic_tools.storm.resizes import Resize
from elastic_tools.storm.stream import Record


def wanted_kinds(settings: Settings) -> list[Kind]:
    """Kinds of requests that are sent."""
    return [kind for kind in KINDS if kind != "seeded" or settings.request_seeds]


def count_kinds(records: Sequence[Record]) -> Counter[Kind]:
    """How many requests of each kind were answered."""
    return Counter(record.ask.kind for record in records if record.outcome != "failed")


def count_effects(resizes: Sequence[Resize]) -> dict[str, int]:
    """Resizes that grew and shrank the cache, blocks moved, requests preempted."""
    return {
        "grown": sum(one.answer.get("to", 0) > one.answer.get("from", 0) for one in resizes),
        "shrunk": sum(one.answer.get("to", 0) < one.answer.get("from", 0) for one in resizes),
        "moved": sum(one.answer.get("moved", 0) for one in resizes),
        "preempted": sum(one.answer.get("preempted", 0) for one in resizes),
    }


def lacking(settings: Settings, records: Sequence[Record], resizes: Sequence[Resize]) -> list[str]:
    """What is missing so far, in words."""
    kinds, effects = count_kinds(records), count_effects(resizes)
    missing = [f"no {kind} request was answered" for kind in wanted_kinds(settings) if not kinds[kind]]
    demanded = {
        "grown": (True, "no resize grew the cache"),
        "shrunk": (True, "no resize shrank the cache"),
        "moved": (settings.must_move, "no block was moved"),
        "preempted": (settings.must_preempt, "no request was preempted"),
    }
    return missing + [why for name, (wanted, why) in demanded.items() if wanted and not effects[name]]
