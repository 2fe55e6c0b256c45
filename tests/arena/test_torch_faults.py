"""Zeroing and copying are torch's. Each of its calls fails in turn: nothing is lost, and no page goes too early."""

from contextlib import contextmanager

import pytest
import torch
from support.cuda_stand_in import cuda_stand_in as device
from vllm.v1.elastic_kv.cuda_driver import CudaPageDriver

from .arenas import SEGMENTS, fill, holds, holds_or_zero, make_arena
from .test_cuda_faults import outcome_of

pytestmark = pytest.mark.usefixtures("clean_device")


class Stream:
    """torch's, for the stand-in."""

    def __init__(self, where: str) -> None:
        self.where = where

    def synchronize(self) -> None:
        device.wait()


@contextmanager
def on_stream(stream: Stream):
    assert stream.where == "cuda:0"
    yield


class Driver(device.StandInDriver):
    """Zeroes on a stream, as on a GPU."""

    _zero = CudaPageDriver._zero


class Calls:
    """Counts calls of torch's, of which one fails. What is launched before runs until somebody waits for it."""

    def __init__(self) -> None:
        self.fails, self.number, self.made = "", 0, 0

    def patch(self, monkeypatch, owner, name: str, launches: bool = False) -> None:
        real = getattr(owner, name)

        def call(*arguments, **named):
            if name == self.fails:
                self.made += 1
                if self.made == self.number:
                    raise RuntimeError("made to fail")
            result = real(*arguments, **named)
            if launches:
                device.submit()
            return result

        monkeypatch.setattr(owner, name, call)

    @contextmanager
    def failing(self, name: str, number: int):
        self.fails, self.number, self.made = name, number, 0
        yield
        self.fails = ""


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    calls = Calls()
    calls.patch(monkeypatch, torch.cuda, "Stream")
    calls.patch(monkeypatch, torch.cuda, "stream")
    calls.patch(monkeypatch, Stream, "synchronize")
    calls.patch(monkeypatch, torch.utils.dlpack, "from_dlpack")
    calls.patch(monkeypatch, torch, "as_strided")
    calls.patch(monkeypatch, torch.Tensor, "zero_", launches=True)
    calls.patch(monkeypatch, torch.Tensor, "copy_", launches=True)
    return calls


@pytest.mark.parametrize(
    ("call", "at_least"),
    [
        ("stream", 1),
        ("synchronize", 1),
        ("from_dlpack", SEGMENTS),
        ("as_strided", SEGMENTS),
        ("zero_", SEGMENTS),
        ("copy_", 2),
    ],
)
def test_every_call_fails_once(calls, call, at_least):
    arena = make_arena(Driver())
    for number in range(1, 100):
        arena.attach(range(4))
        for chunk in range(4):
            fill(arena, chunk, chunk + 1)
        with calls.failing(call, number):
            error = outcome_of(lambda: (arena.attach([5, 6]), arena.detach([1, 6])))
        if error is None:
            assert arena.attached == {0, 2, 3, 5}
        else:
            assert (error.code, error.device) == ("RuntimeError", "cuda:0")
            assert arena.attached in ({0, 1, 2, 3}, {0, 1, 2, 3, 5, 6})
        assert all(holds(arena, chunk, chunk + 1) for chunk in (0, 2, 3))
        assert all(holds_or_zero(arena, chunk, chunk + 1) for chunk in {1, 5, 6} & arena.attached)
        assert arena.reported_bytes() == arena.resident_bytes
        arena.detach(sorted(arena.attached))
        if error is None:
            break
    assert number > at_least
    arena.close()


def test_the_stream_is_made_once(calls):
    """torch makes another one each time it is asked, until it has 32 of them."""
    arena = make_arena(Driver())
    with calls.failing("Stream", 1):
        error = outcome_of(lambda: arena.attach([0]))
    assert error is not None
    assert error.code == "RuntimeError"
    assert arena.attached == frozenset()
    arena.attach([0])
    with calls.failing("Stream", 1):
        arena.attach([1])
    assert arena.attached == {0, 1}
    arena.close()


def test_zeroing_waits_for_its_own_stream_alone(calls, monkeypatch):
    """The steps in flight are on others, and an attach would wait for them as well."""
    arena = make_arena(Driver())
    monkeypatch.setattr(arena.driver, "synchronize", lambda: pytest.fail("waited for everything"))
    before = device.calls("cuCtxSynchronize")
    arena.attach([0, 1])
    assert device.calls("cuCtxSynchronize") == before + 1  # the stream's
    monkeypatch.undo()
    arena.close()
