import pytest

from .arenas import make_arena
from .drivers import CONTRACT, FaultyDriver


@pytest.fixture(params=sorted(CONTRACT))
def driver(request):
    """Every page driver in turn."""
    return CONTRACT[request.param]()


@pytest.fixture
def faulty(driver):
    """Every page driver in turn, with calls that can be made to fail."""
    return FaultyDriver(driver)


@pytest.fixture
def arena(faulty):
    """A small arena. It leaves nothing behind."""
    arena = make_arena(faulty)
    yield arena
    faulty.mend()
    arena.close()
    assert not faulty.live
    assert not arena.busy
