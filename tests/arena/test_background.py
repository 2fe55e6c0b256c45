"""The thread for work that nobody should wait for."""

import threading

import pytest
from vllm.v1.elastic_kv.background import Background

WAIT_S = 60.0


@pytest.fixture
def background():
    background = Background("test-background")
    yield background
    assert background.settle(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "test-background"]


def test_nothing_to_do_is_settled(background):
    assert not background.busy
    assert background.settle(0.0)


def test_jobs_are_done_in_order_by_one_thread(background):
    done = []
    for number in range(100):
        background.submit(lambda number=number: done.append((number, threading.current_thread())))
    assert background.settle(WAIT_S)
    assert [number for number, _ in done] == list(range(100))
    assert threading.current_thread() not in {thread for _, thread in done}
    assert not background.busy


def test_it_is_busy_while_a_job_runs_and_does_not_wait_for_ever(background):
    go_on, began = threading.Event(), threading.Event()
    background.submit(lambda: (began.set(), go_on.wait(WAIT_S)))
    background.submit(lambda: None)
    assert began.wait(WAIT_S)
    assert background.busy
    assert not background.settle(0.01)
    go_on.set()
    assert background.settle(WAIT_S)
    assert not background.busy


def test_a_job_that_fails_stops_nothing(background, caplog):
    done = []
    background.submit(lambda: 1 // 0)
    background.submit(lambda: done.append(1))
    assert background.settle(WAIT_S)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text


def test_a_job_can_submit_and_settle(background):
    """Garbage is collected on any thread, so closing an arena may be part of a job."""
    done = []

    def job() -> None:
        assert background.is_current
        background.submit(lambda: done.append("next"))
        assert background.settle(WAIT_S)
        done.append("settled")

    background.submit(job)
    assert background.settle(WAIT_S)
    assert done == ["next", "settled"]
    assert not background.is_current


def test_without_threads_the_job_is_done_at_once(background, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    done = []
    background.submit(lambda: done.append(1))
    assert done == [1]
    assert not background.busy


def test_it_does_not_keep_the_process_from_ending(python_without_vllm):
    result = python_without_vllm("""
import threading
from elastic_kv.background import Background
began = threading.Event()
Background("stays").submit(lambda: (began.set(), threading.Event().wait()))
assert began.wait(60)
print("end")
""")
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
