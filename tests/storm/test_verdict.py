"""Every verdict of the storm can fail, and fails for its own reason alone."""

import asyncio
import json
import mmap
import re
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest
from elastic_tools.demo import server
from elastic_tools.storm import memory, report
from elastic_tools.storm.memory import ProcessMemory
from elastic_tools.storm.plan import LENGTHS, Settings, Sizes, make_prompts, requests_of, resizes
from elastic_tools.storm.reference import LEAST_MARGIN
from elastic_tools.storm.run import StormError, Target, storm
from elastic_tools.storm.verdict import MAPPINGS_TOLERANCE, RSS_TOLERANCE, judge

from . import fake
from .fake import FakeServer

MIB = 2**20
SETTINGS = Settings(seconds=2, clients=8, warm_up_s=0.2, resize_every_s=0.05)
IMPATIENT = replace(SETTINGS, patience_s=3)  # for a server that does not go on
SIZES = Sizes(base=4, start=40, most=101, capacity=200, chunk=2, block_bytes=10, block_tokens=32)


def blow(fault=None, settings=SETTINGS):
    """The evidence of a storm against a server with a fault."""

    async def run():
        async with FakeServer(fault).running() as url:
            return await storm(Target(url), settings)

    return asyncio.run(run())


def failed(seen):
    return {name for name, check in vars(judge(seen)).items() if not check.holds}


def said(seen, name):
    return "\n".join(getattr(judge(seen), name).wrong)


@pytest.fixture(scope="module")
def good():
    seen = blow()
    seen.before = seen.after = [
        ProcessMemory(1, "python", False, 700 * MIB, 40, 900, None),
        ProcessMemory(2, "VLLM::Worker", True, 1200 * MIB, 80, 2000, 48 * MIB),
    ]
    return seen


def test_a_good_server_passes(good):
    assert failed(good) == set()
    assert judge(good).holds


@pytest.mark.parametrize(
    ("fault", "checks", "why"),
    [
        ("a request is refused", {"requests"}, "HTTP 500: .*the engine is dead"),
        ("a token is missing", {"requests"}, "tokens came where"),
        ("the stream stops", {"requests"}, "no token for 3 s, after [24]"),
        ("the stream breaks off", {"requests"}, "the stream broke off"),
        ("the stream tells an error", {"requests"}, "the stream says .*the engine is dead"),
        ("a token differs", {"greedy_tokens"}, r"request \d+ \((greedy|aborted), .* token \d+ is \d+, not \d+"),
        ("another size than asked", {"resizes"}, "done, and not"),
        ("preempts where it may not", {"resizes"}, "preempted where that was forbidden"),
        ("a resize fails", {"resizes", "coverage"}, "a rank is gone"),
        ("a block is lost", {"state", "memory_cache"}, r"free \+ used \+ cached"),
        ("a rank has fewer bytes", {"memory_cache"}, "rank 0 does not hold"),
        ("a request stays in the engine", {"accounts"}, "still has 1 requests"),
        ("unhealthy", {"health"}, "/health answers 503"),
    ],
)
def test_each_fault_of_a_server_is_found(fault, checks, why, monkeypatch):
    monkeypatch.setattr("elastic_tools.storm.run.IDLE_LIMIT", 2.0)
    monkeypatch.setattr("elastic_tools.storm.run.MOST_TIMES", 1)
    seen = blow(fault, IMPATIENT if fault == "the stream stops" else SETTINGS)
    assert failed(seen) == checks
    assert re.search(why, "\n".join(said(seen, name) for name in checks), re.DOTALL)


def change(good, **worker):
    """The memory afterwards, with the worker changed."""
    return replace(good, after=[good.before[0], replace(good.before[1], **worker)])


@pytest.mark.parametrize(
    ("check", "within", "beyond"),
    [
        ("memory_cache", {}, {"cache_bytes": 48 * MIB + 4096}),
        ("memory_rss", {"rss": 1200 * MIB + RSS_TOLERANCE}, {"rss": 1201 * MIB + RSS_TOLERANCE}),
        ("memory_descriptors", {"descriptors": 80}, {"descriptors": 81}),
        ("memory_mappings", {"mappings": 2000 + MAPPINGS_TOLERANCE}, {"mappings": 2001 + MAPPINGS_TOLERANCE}),
    ],
)
def test_memory_that_does_not_come_back(good, check, within, beyond):
    assert failed(change(good, **within)) == set()
    assert failed(change(good, **beyond)) == {check}


def test_a_process_that_is_gone_is_no_memory_that_came_back(good):
    lost = replace(good, after=good.after[:1])
    assert failed(lost) == {"memory_cache", "memory_rss", "memory_descriptors", "memory_mappings"}


def test_requests_and_resizes_have_to_be_accounted_for(good):
    assert failed(replace(good, asked=good.asked + 1)) == {"accounts"}
    assert failed(replace(good, resizes_asked=good.resizes_asked + 1)) == {"resizes"}


def test_a_calm_is_no_storm(good):
    assert failed(replace(good, resizes=[], resizes_asked=0)) == {"resizes", "coverage"}
    assert failed(replace(good, polls=0)) == {"state"}
    greedy = [record for record in good.records if record.ask.greedy]
    assert failed(replace(good, records=greedy, asked=len(greedy))) == {"coverage"}


def test_moves_and_preemptions_can_be_demanded(good):
    for demand in ("must_move", "must_preempt"):
        assert failed(replace(good, settings=replace(SETTINGS, **{demand: True}))) == {"coverage"}


def test_a_storm_goes_on_until_it_had_what_is_demanded():
    short = replace(SETTINGS, seconds=0.5, must_preempt=True)
    seen = blow("preempts late", short)
    assert failed(seen) == set()
    assert len(seen.resizes) > fake.LATE - 2 > seen.settings.seconds / seen.settings.resize_every_s


def test_a_storm_does_not_go_on_for_ever(monkeypatch):
    monkeypatch.setattr("elastic_tools.storm.run.MOST_TIMES", 2)
    seen = blow(settings=replace(SETTINGS, must_preempt=True))
    assert 2 * SETTINGS.seconds <= seen.seconds
    assert failed(seen) == {"coverage"}


def test_where_requests_must_be_preempted_the_base_is_asked_for_again_and_again():
    wanted = list(islice(resizes(replace(SETTINGS, must_preempt=True), SIZES), 40))
    assert all(blocks == SIZES.base and "allow_preemption" not in body for blocks, body in wanted[3::4])


def test_a_resize_of_an_idle_server_has_to_be_done(good):
    last = good.settling[-1]
    partial = replace(last, answer=last.answer | {"outcome": "partial", "reason": "blocks in use"})
    assert failed(replace(good, settling=[*good.settling[:-1], partial])) == {"resizes"}


def test_a_server_that_dies_ends_the_storm(monkeypatch):
    monkeypatch.setattr("elastic_tools.storm.clients.MOST_FAILURES", 5)
    monkeypatch.setattr(fake, "EVERY", 1)
    seen = blow("a request is refused", replace(SETTINGS, seconds=60))
    assert seen.seconds < 30
    assert "broken off: 5 requests failed" in said(seen, "requests")


def test_a_server_that_is_gone_after_the_storm_is_a_failure():
    seen = blow("gone in the end")
    assert "gone after the storm" in said(seen, "requests")


def test_no_elastic_server_no_storm():
    with pytest.raises(StormError):
        asyncio.run(storm(Target("http://127.0.0.1:9"), SETTINGS))


def test_near_ties_are_not_compared(monkeypatch):
    class Tied(FakeServer):
        async def complete(self, request):
            reply = await super().complete(request)
            if not (await request.json()).get("stream"):
                answer = json.loads(reply.body)
                answer["choices"][0]["logprobs"]["top_logprobs"][6] = {"a": -0.7, "b": -0.7 - LEAST_MARGIN / 2}
                reply.body = json.dumps(answer).encode()
            return reply

    async def run():
        async with Tied().running() as url:
            return await storm(Target(url), SETTINGS)

    seen = asyncio.run(run())
    assert {prompt.tokens for prompt in seen.references.prompts} == {6}
    assert seen.references.shortened == len(seen.references.prompts)
    assert failed(seen) == set()


def test_everything_sent_follows_from_the_seed():
    prompts = make_prompts(3, 1024)
    assert prompts == make_prompts(3, 1024) != make_prompts(4, 1024)
    sent = list(islice(requests_of(5, SETTINGS, prompts, "storm"), 50))
    assert sent == list(islice(requests_of(5, SETTINGS, prompts, "storm"), 50))
    assert sent != list(islice(requests_of(6, SETTINGS, prompts, "storm"), 50))
    assert list(islice(resizes(SETTINGS, SIZES), 50)) == list(islice(resizes(SETTINGS, SIZES), 50))


def test_no_request_has_a_seed_where_none_is_wanted():
    settings = replace(SETTINGS, request_seeds=False)
    sent = list(islice(requests_of(0, settings, make_prompts(0, 1024), "storm"), 300))
    assert {ask.kind for ask in sent} == {"greedy", "sampled", "pair", "aborted"}
    assert all("seed" not in ask.body("m") for ask in sent)


def test_groups_share_a_prefix_and_singles_do_not():
    prompts = make_prompts(0, 1024)
    texts = {prompt.name: prompt.text for prompt in prompts}
    assert len(set(texts.values())) == len(prompts)
    prefix = texts["group 3.0"][:1000]
    assert sum(text.startswith(prefix) for text in texts.values()) == 4
    assert {prompt.tokens for prompt in prompts} <= set(LENGTHS)


def test_every_size_is_asked_for_in_every_unit_and_can_be_had():
    wanted = list(islice(resizes(SETTINGS, SIZES), 500))
    assert {next(iter(body)) for _, body in wanted} == {"blocks", "bytes", "tokens", "fraction"}
    assert {blocks for blocks, _ in wanted} == set(range(4, 101, 2))
    for blocks, body in wanted:
        asked = {
            "blocks": lambda value: value,
            "bytes": lambda value: value // 10,
            "tokens": lambda value: value // 32,
            "fraction": lambda value: int(value * 200),
        }[next(iter(body))](next(iter(body.values())))
        assert SIZES.base <= asked <= SIZES.capacity
        assert asked // 2 * 2 == blocks


def test_memory_is_read_from_the_system(tmp_path):
    code = (
        "import ctypes, mmap, time; held = mmap.mmap(-1, 64 << 20); held[: 32 << 20] = b'x' * (32 << 20);"
        "print(ctypes.addressof(ctypes.c_char.from_buffer(held)), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        address = int(process.stdout.readline())
        log = tmp_path / "log"
        log.write_text(
            f"(Worker pid={process.pid}) INFO reserved {64 << 20} bytes in 30 segments at {address:#x}, of\n"
        )
        (seen,) = memory.snapshot(process.pid, memory.cache_ranges(log))
        assert abs((seen.cache_bytes or 0) - (32 << 20)) <= mmap.PAGESIZE
        assert seen.rss > seen.cache_bytes
        assert seen.worker
        assert seen.descriptors >= 3
        assert seen.mappings > 10
    finally:
        server.end(process)


def test_the_report_says_everything(good, tmp_path, capsys):
    verdict = judge(change(good, descriptors=99))
    path = tmp_path / "deep" / "report.json"
    report.write(path, report.as_json(good, verdict, "a server", "a command"))
    written = json.loads(path.read_text())
    assert written["holds"] is False
    assert [name for name, check in written["checks"].items() if not check["holds"]] == ["memory_descriptors"]
    assert written["figures"]["gap_ms"]["count"] > 100
    report.show(good, verdict)
    assert "FAILED: memory descriptors: process 2: 99 descriptors, and 80 before" in capsys.readouterr().out
