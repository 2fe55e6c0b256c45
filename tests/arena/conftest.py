import gc

import pytest
from support.cuda_stand_in import cuda_stand_in as device

from .arenas import make_arena
from .drivers import CONTRACT, FaultyDriver, needs_stand_in


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.gpu] * (name == "cuda")) for name in sorted(CONTRACT)])
def driver(request):
    """Every page driver in turn."""
    return CONTRACT[request.param]()


@pytest.fixture(scope="module")
def small_collections():
    """Collections of garbage look at what the file's own tests made, and are quick: a test makes many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def clean_device(small_collections):
    """A device of the stand-in's that has nothing before the test and has to have nothing after it."""
    needs_stand_in()
    gc.collect()
    device.reset()
    device.forget()
    yield
    gc.collect()
    assert device.left() == (0, 0, 0, 0)


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
