"""What has to hold after a storm, and whether it does. Every check can fail, and says why it did."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_tools.storm.coverage import count_effects, count_kinds, lacking, wanted_kinds
from elastic_tools.storm.memory import ProcessMemory
from elastic_tools.storm.plan import Settings
from elastic_tools.storm.reference import References, difference
from elastic_tools.storm.run import Evidence
from elastic_tools.storm.stream import Record
from elastic_tools.storm.watch import idle_inconsistencies

MIB = 2**20
# The heaps of Python and of the allocator keep what they once needed, without a resize too. A storm of a minute
# attaches and detaches gigabytes: a leak of a few percent is more than this. The cache itself is held to the byte.
RSS_TOLERANCE = 256 * MIB
# The allocator may keep a few more than before.
MAPPINGS_TOLERANCE = 100
LEAST_RATE = 0.1  # of the resizes that the rate asks for, answered: below it, it was no storm. Slow machines answer few
MOST_SHOWN = 5  # failures of one kind


@dataclass(frozen=True)
class Check:
    """One thing that has to hold: what was found, and what is wrong; nothing wrong means that it holds."""

    found: str
    wrong: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.wrong


@dataclass(frozen=True)
class Verdict:
    """All checks. `memory_*` hold without a look at processes that are out of reach, and say so."""

    requests: Check
    greedy_tokens: Check
    coverage: Check
    accounts: Check
    resizes: Check
    state: Check
    health: Check
    memory_cache: Check
    memory_rss: Check
    memory_descriptors: Check
    memory_mappings: Check

    @property
    def holds(self) -> bool:
        return all(check.holds for check in vars(self).values())


def judge(seen: Evidence) -> Verdict:
    """Judges all that was seen."""
    return Verdict(
        requests=_requests(seen),
        greedy_tokens=_greedy(seen.references, seen.records),
        coverage=_coverage(seen),
        accounts=_accounts(seen),
        resizes=_resizes(seen),
        state=Check(f"{seen.polls} polls", _first(seen.faults) + ([] if seen.polls else ["it was never polled"])),
        health=Check(f"{seen.polls} polls", _first(seen.unhealthy)),
        memory_cache=_cache(seen),
        memory_rss=_rss(seen),
        memory_descriptors=_count(seen, "descriptors", 0),
        memory_mappings=_count(seen, "mappings", MAPPINGS_TOLERANCE),
    )


def _first(wrong: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(wrong) - MOST_SHOWN
    return [*wrong[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _requests(seen: Evidence) -> Check:
    outcomes = Counter(record.outcome for record in seen.records)
    wrong = _first([f"{one.ask.name}: {one.why}" for one in seen.records if one.outcome == "failed"])
    if seen.ended_early:
        wrong.append(f"the storm was broken off: {seen.ended_early}")
    return Check(", ".join(f"{outcomes[name]} {name}" for name in ("done", "aborted", "failed")), wrong)


def _greedy(references: References, records: Sequence[Record]) -> Check:
    compared = [one for one in records if one.ask.greedy and one.count]
    wrong = [text for one in compared if (text := difference(references, one))]
    tokens = sum(one.count for one in compared)
    found = _first(wrong)
    if not compared:
        found.append("no answer was compared")
    usable, unsteady = len(references.prompts), len(references.unsteady)
    if unsteady > (usable + unsteady) / 4:
        found.append(f"{unsteady} of {usable + unsteady} prompts have no steady answer at a fixed size")
    return Check(f"{len(compared)} answers and {tokens} tokens compared, {len(wrong)} differ", found)


def _coverage(seen: Evidence) -> Check:
    kinds = count_kinds(seen.records)
    requests = ", ".join(f"{kinds[kind]} {kind}" for kind in wanted_kinds(seen.settings))
    effects = ", ".join(f"{count} {name}" for name, count in count_effects(seen.resizes).items())
    return Check(f"{requests}; {effects}", lacking(seen.settings, seen.records, seen.resizes))


def _accounts(seen: Evidence) -> Check:
    wrong = []
    if seen.asked != len(seen.records):
        wrong.append(f"{seen.asked - len(seen.records)} requests did not end")
    if not seen.asked:
        wrong.append("no request was sent")
    if open_requests := seen.idle.get("open_requests", 0):
        wrong.append(f"the engine still has {open_requests} requests")
    return Check(f"{seen.asked} sent, {len(seen.records)} ended", wrong)


def _resizes(seen: Evidence) -> Check:
    wrong = _first([one.wrong for one in (*seen.resizes, *seen.settling) if one.wrong])
    # With no request running, there is nothing that a resize could wait for.
    wrong += [
        f"idle, and not done: {one.body}: {one.answer}"
        for one in seen.settling
        if not one.wrong and one.answer["outcome"] != "done" and one is not _first_after_storm(seen)
    ]
    if seen.resizes_asked != len(seen.resizes):
        wrong.append(f"{seen.resizes_asked - len(seen.resizes)} resizes were not answered")
    due = least_resizes(seen.settings)
    if len(seen.resizes) < due:
        wrong.append(f"only {len(seen.resizes)} resizes were answered; {due} are the least that is a storm")
    outcomes = Counter(one.answer.get("outcome", "unanswered") for one in seen.resizes)
    told = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    return Check(f"{told or 'none'}; {seen.resizes_left_out} turns left out", wrong)


def _first_after_storm(seen: Evidence) -> object:
    # Requests still run then: this one may be partial.
    return seen.settling[2] if len(seen.settling) > 2 else None


def least_resizes(settings: Settings) -> int:
    """Answers without which it was no storm."""
    return int(LEAST_RATE * settings.seconds / settings.resize_every_s)


def _cache(seen: Evidence) -> Check:
    wrong = [] if seen.ended_early else idle_inconsistencies(seen.idle)
    pairs = [(one, other) for one, other in _pairs(seen) if one.cache_bytes is not None]
    wrong += [
        f"process {one.pid}: {other.cache_bytes} bytes behind the cache, and {one.cache_bytes} before"
        for one, other in pairs
        if other.cache_bytes != one.cache_bytes
    ]
    if missing := _missing(seen):
        wrong.append(missing)
    told = ", ".join(f"{(other.cache_bytes or 0) / MIB:.1f} MiB" for _, other in pairs)
    return Check(told or "as the server reports it; its own processes are out of reach", wrong)


def _rss(seen: Evidence) -> Check:
    if not seen.before:
        return Check("out of reach")
    before, after = (sum(one.rss for one in snapshot) / MIB for snapshot in (seen.before, seen.after))
    change, allowed = after - before, RSS_TOLERANCE / MIB
    missing = _missing(seen)
    wrong = [missing] if missing else []
    if not missing and abs(change) > allowed:
        wrong.append(f"{change:+.1f} MiB, where {allowed:.0f} MiB are allowed")
    return Check(f"{before:.1f} MiB before, {after:.1f} MiB after", wrong)


def _count(seen: Evidence, what: str, allowed: int) -> Check:
    """Of the worker processes: others come and go with their connections."""
    pairs = [(getattr(one, what), getattr(other, what), one.pid) for one, other in _pairs(seen) if one.worker]
    wrong = [
        f"process {pid}: {after} {what}, and {before} before; {allowed} more are allowed"
        for before, after, pid in pairs
        if after - before > allowed
    ]
    if missing := _missing(seen):
        wrong.append(missing)
    elif seen.before and not pairs:
        wrong.append("no worker process was found")
    return Check(", ".join(f"{before} before, {after} after" for before, after, _ in pairs) or "out of reach", wrong)


def _pairs(seen: Evidence) -> list[tuple[ProcessMemory, ProcessMemory]]:
    """The same process before and after."""
    after = {one.pid: one for one in seen.after}
    return [(one, after[one.pid]) for one in seen.before if one.pid in after]


def _missing(seen: Evidence) -> str | None:
    if gone := {one.pid for one in seen.before} - {one.pid for one in seen.after}:
        return f"processes {sorted(gone)} were not there any more"
    return None
