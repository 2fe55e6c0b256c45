"""What ends a run from outside: Ctrl-C, a full disk, a reader that has gone. One sentence, and no traceback."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools.pins import ROOT
from elastic_tools.planner.__main__ import main
from elastic_tools.planner.parallel import spread

COMMAND = [sys.executable, "-m", "elastic_tools.planner"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}


def test_ctrl_c_in_a_sweep_ends_it_with_a_word(tmp_path):
    run = subprocess.Popen(
        [*COMMAND, "study", "--workers", "2", "--output", str(tmp_path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # else what a shell's background has
    )
    assert run.stderr is not None
    said = b""
    while not re.search(rb"[1-9]/24", said):  # the bar: a part is done, so every process has begun
        byte = run.stderr.read(1)
        assert byte, said
        said += byte
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to every process
    out, rest = run.communicate(timeout=60)
    assert run.returncode == 130
    assert out == b""
    assert b"Traceback" not in rest
    assert rest.endswith(b"plan: stopped.\n")
    assert not list(tmp_path.iterdir())


def handler(_: int) -> object:
    return signal.getsignal(signal.SIGINT)


def test_workers_leave_ctrl_c_to_the_one_that_waits_for_them():
    assert spread(handler, range(3), "test") == [signal.SIG_IGN] * 3


def test_more_workers_than_jobs_are_not_started():
    assert len(set(spread(process, range(2), "test", workers=10**6))) <= 2


def process(_: int) -> int:
    return os.getpid()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk(capsys):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*COMMAND, "models"], env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "plan: The answer cannot be written: No space left on device.\n"
    assert main(["estimate", "--model", "Llama-3.1-8B", "--concurrency", "1", "--csv", "/dev/full"]) == 2
    assert capsys.readouterr().err == ended.stderr


def test_a_reader_that_has_gone():
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([*COMMAND, "models"], env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")
