"""The handler of SIGTERM after an engine has connected to Ray."""

import signal
import threading

import pytest
from vllm.v1.executor.ray_sigterm import keeps_sigterm


def engines(*_):
    """What an engine's process has before it connects."""


def rays(*_):
    """What `ray.init` puts there."""


@pytest.fixture(autouse=True)
def _restored():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@keeps_sigterm
def connect(fails=False):
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, rays)
    if fails:
        raise ConnectionError
    return "connected"


@pytest.mark.parametrize(("before", "after"), [(engines, engines), (signal.SIG_DFL, rays), (signal.SIG_IGN, rays)])
def test_a_handler_stays_and_a_default_does_not(before, after):
    signal.signal(signal.SIGTERM, before)
    assert connect() == "connected"
    assert signal.getsignal(signal.SIGTERM) is after


def test_it_stays_where_there_is_no_cluster():
    signal.signal(signal.SIGTERM, engines)
    with pytest.raises(ConnectionError):
        connect(fails=True)
    assert signal.getsignal(signal.SIGTERM) is engines


def test_another_thread_may_connect():
    signal.signal(signal.SIGTERM, engines)
    told = []
    thread = threading.Thread(target=lambda: told.append(connect()))
    thread.start()
    thread.join(60)
    assert told == ["connected"]
    assert signal.getsignal(signal.SIGTERM) is engines
