"""The demonstration's judgement and its server, without an engine."""

import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools import serve
from elastic_tools.demo import picture, server
from elastic_tools.demo.load import make_messages
from elastic_tools.demo.story import STORY, Resize
from elastic_tools.demo.verdict import LEAST_NOISE, MOST_NOISE, judge, measure_noise
from elastic_tools.demo.watch import Sample, tree_memory

MIB = 2**20
BLOCK = 1 * MIB


def resize(at: float, before: int, after: int, memory_change: int, status: int = 200) -> Resize:
    answer = {"outcome": "done", "from": before, "to": after, "reason": None}
    return Resize("a resize", at, at + 0.2, after, status, answer, 1000 * MIB, 1000 * MIB + memory_change)


def sample(at: float, memory: int) -> Sample:
    return Sample(at, memory, 100, 10, 1, 0, 0)


@pytest.mark.parametrize(
    ("change", "strays"),
    [(100 * MIB, False), (91 * MIB, False), (109 * MIB, False), (90 * MIB, True), (0, True), (-100 * MIB, True)],
)
def test_memory_has_to_follow_within_a_chunk_and_noise(change, strays):
    verdict = judge([resize(5, 100, 200, change)], [sample(1, 0), sample(2, 0)], BLOCK, chunk_blocks=1)
    assert verdict.allowed == BLOCK + LEAST_NOISE
    assert bool(verdict.strayed) is strays


def test_a_partial_resize_is_held_to_what_was_reached():
    partial = resize(5, 200, 150, -50 * MIB)
    partial.asked_blocks = 10
    verdict = judge([partial], [], BLOCK, chunk_blocks=1)
    assert (verdict.rows[0].asked, verdict.rows[0].done) == (-190 * MIB, -50 * MIB)
    assert not verdict.strayed


def test_an_answer_without_sizes_is_a_failure():
    failed = Resize("a resize", 1, 2, 10, 500, {"outcome": "failed", "reason": "why"}, 0, 0)
    verdict = judge([failed], [], BLOCK, chunk_blocks=1)
    assert verdict.failed_resizes == [failed]
    assert verdict.rows == []


def test_noise_leaves_out_what_resizes_did():
    samples = [sample(at / 4, 500 * MIB if at < 20 else 900 * MIB) for at in range(40)]
    assert measure_noise([resize(4.8, 1, 2, 0)], samples) == 0
    assert measure_noise([], samples) == 400 * MIB
    assert judge([], samples, BLOCK, 1).noise == MOST_NOISE


def test_the_same_seed_gives_the_same_question():
    assert make_messages(7) == make_messages(7)
    assert len({str(make_messages(seed)) for seed in range(200)}) == 200


def test_the_story_is_in_order():
    assert [act.at for act in STORY] == sorted(act.at for act in STORY)
    assert STORY[-1].clients == 0


def test_memory_counts_children():
    code = "import time; data = b'x' * (64 << 20); print('ready', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        assert tree_memory(process.pid) > 64 * MIB
    finally:
        server.end(process)


def test_a_server_that_cannot_start_is_reported_and_leaves_nothing(monkeypatch, tmp_path):
    command = [sys.executable, "-c", "print('this is why'); raise SystemExit(3)"]
    monkeypatch.setattr(server, "command_line", lambda port, options, model: serve.Plan(command))
    with pytest.raises(server.ServerError, match=r"status 3 at start:\nthis is why"):  # noqa: SIM117
        with server.running([], tmp_path / "server.log", lambda text: None):
            pytest.fail("it does not answer")


def test_a_server_that_ignores_sigterm_is_ended_with_its_children(monkeypatch):
    monkeypatch.setattr(server, "STOP_LIMIT", 1)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}]).pid; {stubborn}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    (child,) = server.psutil.Process(process.pid).children()
    monkeypatch.setattr(server, "CHILDREN_LIMIT", 1)
    server.end(process)
    child.wait(10)
    assert process.returncode == -9


def test_the_picture_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    samples = [Sample(at / 4, 1000 * MIB, 100, 10, 1, 2, at) for at in range(20)]
    picture.draw(samples, [resize(2, 100, 200, 0)], BLOCK, tmp_path / "a.png", "title", "memory")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
