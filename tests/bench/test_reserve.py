"""The benchmark of the prefill reserve: what its tables say, of rounds that were made up."""

import json
import re

import pytest
from elastic_tools.bench.arms import BenchError
from elastic_tools.bench.reserve import report
from elastic_tools.bench.reserve.engine import prompt
from elastic_tools.bench.reserve.measure import (
    CRASHING,
    POLICIES,
    QUICK,
    WORKLOADS,
    Measured,
    Settings,
    answered,
    check_tokens,
)

ERROR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 201326592 bytes."
MACHINE = {
    "date": "2026-01-01 00:00 UTC",
    "command": "scripts/bench reserve",
    "commit": "0",
    "cpu": "a CPU",
    "cores": 2,
    "memory_gib": 8.0,
    "kernel": "Linux",
    "python": "3.11",
}


def one_round(ttft=1000.0, resident=100, resizes=()):
    reserve = {"reserve_bytes": 64 << 20, "borrowed_blocks": resident - 100}
    return {
        "ttft_ms": [[ttft], [ttft, 2 * ttft]],
        "busy_gaps_ms": [ttft, 5.0],
        "quiet_gaps_ms": [5.0] * 9,
        "decoding": {"blocks": {"resident": resident}, "block_size": 32, "reserve": reserve},
        "resizes": list(resizes),
        "output": [1, 2, 3],
    }


def resize(before, after, duration):
    times = {"duration_ms": duration, "pause_ms": duration / 2}
    return {"outcome": "done", "from": before, "to": after, "evicted": 7} | times


@pytest.fixture
def measured():
    lent = one_round(1010.0, 140, [resize(100, 140, 30.0), resize(140, 100, 8.0)])
    rounds = {policy: [one_round()] * 5 for policy in POLICIES} | {"reclaim": [lent] * 5}
    reserves = {512: {1: 40 << 20, 2: 30 << 20}, 6144: {1: 400 << 20, 2: 220 << 20}}
    return Measured({workload: dict(rounds) for workload in WORKLOADS}, {"error": ERROR}, reserves)


def rows_of(text):
    return {line.split(" | ")[0].strip("| "): line for line in narrow(text).splitlines() if line.startswith("|")}


def narrow(table):
    """A table without the spaces that make its columns even."""
    return re.sub(r" +", " ", table)


def test_the_cache_while_requests_decode(measured):
    rows = rows_of(report.capacity(measured.rounds["full"]))
    assert "| 140 | 4,480 | 40 | 64 MiB |" in rows["reclaim"]
    assert "| 100 | 3,200 | 0 |" in rows["static"]


def test_lending_and_taking_back(measured):
    lines = [line for line in narrow(report.resizes(measured)).splitlines() if line.startswith("| full | reclaim")]
    assert "| lent | 5 | 40 | 7 | 30.0 | 15.0 |" in lines[0]
    assert "| taken back | 5 | 40 | 7 | 8.0 | 4.0 |" in lines[1]


def test_first_tokens_against_static(measured):
    rows = rows_of(report.latencies(measured.rounds["empty"]))
    assert (
        "| 1,010 | 1.010 (1.010 to 1.010) | 1,515 (1,010 to 2,020) | 1.010 (1.010 to 1.010) | 2020 |" in rows["reclaim"]
    )
    assert "1.000 (1.000 to 1.000)" in rows["adaptive"]


@pytest.mark.parametrize(("slower", "verdict"), [(1.0, "not worse"), (0.5, "not worse"), (1.3, "worse by more than")])
def test_the_tail_of_adaptive_beside_the_better_of_the_others(measured, slower, verdict):
    rounds = measured.rounds["full"]
    rounds["static"] = [one_round(1700.0)] * 5
    rounds["adaptive"] = [one_round(1000.0 * slower)] * 5
    assert f"is {slower:.3f} times that of the better" in report.tail(rounds)
    assert f"({slower:.3f} to {slower:.3f}): {verdict}" in report.tail(rounds)


def test_one_round_has_no_noise_to_compare_with(measured):
    rounds = {policy: each[:1] for policy, each in measured.rounds["full"].items()}
    assert "worse by" not in report.tail(rounds)
    assert "more than one round" in report.tail(rounds)


def test_the_crash_is_told_and_so_is_its_absence(measured):
    assert ERROR in report.crash(measured)
    measured.crash = one_round()
    assert f"`{CRASHING}` lived" in report.crash(measured)


def test_measured_reserves_by_ranks(measured):
    rows = rows_of(report.by_ranks(measured))
    assert "| 40 | 30 (75%) |" in rows["512"]
    assert "| 400 | 220 (55%) |" in rows["6,144"]


def test_the_reserve_melts_under_tensor_parallelism():
    row = next(line for line in narrow(report.melting()).splitlines() if line.startswith("| Llama-3.1-8B | 32,768 |"))
    sizes = [float(cell) for cell in row.strip("| ").split(" | ")[2:]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def test_what_is_written(measured, tmp_path):
    page, numbers, picture = report.write(Settings(), MACHINE, measured, tmp_path)
    assert json.loads(numbers.read_text())["rounds"]["full"]["reclaim"][0]["ttft_ms"] == [[1010.0], [1010.0, 2020.0]]
    assert picture.stat().st_size > 1000
    parts = (
        "The cache with room",
        "The cache full of prefixes",
        "Lending and taking back",
        "Without taking back",
        "The reserve of one rank",
    )
    assert all(f"## {part}\n" in page.read_text() for part in parts)


def test_tokens_that_differ_are_no_result(measured):
    rounds = measured.rounds["full"]
    check_tokens(rounds)
    rounds["adaptive"] = [one_round() | {"output": [9]}] * 5
    with pytest.raises(BenchError, match="the tokens of adaptive differ from those of static"):
        check_tokens(rounds)
    with pytest.raises(BenchError, match="the engine with the policy static ended: no memory"):
        answered({"error": "no memory"}, "static")


@pytest.mark.parametrize("settings", [Settings(), QUICK])
def test_settings(settings):
    assert settings.elastic("reclaim")["policy"] == "reclaim"
    assert settings.elastic(CRASHING)["unsafe_always_lent"]
    assert len(prompt(1, 2, settings.most)["prompt_token_ids"]) == settings.most


def test_no_two_prompts_begin_alike():
    begins = [tuple(prompt(number, index, 32)["prompt_token_ids"][:2]) for number in range(40) for index in range(40)]
    assert len(set(begins)) == len(begins)
