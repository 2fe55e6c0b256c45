"""Cutting a run whose handles cannot be cut: by copying, with little memory, and without harm where there is none."""

import pytest
from support.cuda_stand_in import cuda_stand_in as device
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriverError

from .arenas import (
    CAPACITY,
    SEGMENTS,
    SETTLE_S,
    check,
    detach,
    fill,
    holds,
    holds_or_zero,
    make_arena,
    picture,
)
from .drivers import FaultyDriver

STAYING, LEAVING = [1, 4, 5], [0, 2, 3, 6, 7]
PAGE = 4096


def lay(arena) -> dict[str, object]:
    """All chunks in a run of chunks 0 to 5 and another one of 6 and 7. Returns the picture of it."""
    arena.detach(sorted(arena.attached))
    assert arena.settle(SETTLE_S)
    arena.attach(range(6))
    arena.attach([6, 7])
    for chunk in range(CAPACITY):
        fill(arena, chunk, chunk + 1)
    return picture(arena)


def unharmed(arena, before) -> bool:
    """Whether nothing has changed but what is in chunks that were to leave."""
    return (
        picture(arena) == before
        and all(holds(arena, chunk, chunk + 1) for chunk in STAYING)
        and all(holds_or_zero(arena, chunk, chunk + 1) for chunk in LEAVING)
    )


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("call", ["create", "map", "make_usable", "unmap", "synchronize", "release"])
def test_every_call_of_a_detach_fails_once(arena, call, aside):
    for number in range(1, 100):
        before = lay(arena)
        arena.driver.fail(call, number)
        calls = arena.driver.calls[call]
        try:
            detach(arena, LEAVING, aside)
        except PageDriverError:
            assert unharmed(arena, before), number
            arena.driver.mend()
        else:
            break
    assert arena.settle(SETTLE_S)
    # It ended because there were no more such calls, or because it is tried again.
    assert arena.driver.calls[call] - calls < number or call == "release"
    assert number > 1 or arena.driver.divisible or call == "release"
    arena.driver.mend()
    arena.attach([])  # gives back what could not be given back
    check(arena)
    assert arena.attached == set(STAYING)
    assert all(holds(arena, chunk, chunk + 1) for chunk in STAYING)


class Robbed(FaultyDriver):
    """From a certain call on, somebody else has all memory that there is, also what is given back later."""

    def __init__(self, inner, after: int) -> None:
        super().__init__(inner)
        self.left = after

    def _count(self, call, nbytes=0):
        super()._count(call, nbytes)
        self.left -= 1
        if call == "create" and self.left < 0:
            raise OutOfMemoryError("create", "taken by somebody else", nbytes, self.device)

    def available_bytes(self):
        return super().available_bytes() if self.left > 0 else 0


@pytest.mark.parametrize("aside", [False, True])
def test_the_device_is_full_from_any_call_on(driver, aside):
    """Either all goes, or nothing is changed. What went is held, so that it can come back."""
    robbed = Robbed(driver, 10**6)
    arena = make_arena(robbed)
    ended = set()
    for after in range(200):
        robbed.left = 10**6
        before = lay(arena)
        robbed.left = after
        try:
            if aside:
                arena.begin_detach(LEAVING)
                assert arena.settle(SETTLE_S)
                assert arena.ended()
                assert arena.attached == set(STAYING)
                arena.take_back(LEAVING)
            else:
                arena.detach(LEAVING)
                assert arena.attached == set(STAYING)
                ended.add("done")
                break
        except OutOfMemoryError:
            ended.add("refused")
        else:
            assert unharmed(arena, before)
            ended.add("done")
            break
        assert unharmed(arena, before), after
    assert ended == ({"done"} if driver.divisible else {"done", "refused"})
    arena.close()
    assert not robbed.live


def test_a_cut_that_stopped_half_way_goes_on(arena):
    """The handles that were cut stay so, whatever is asked for next."""
    lay(arena)
    if arena.driver.divisible:
        pytest.skip("such a cut does not stop")
    arena.driver.fail("create", number=6)  # in the second segment
    with pytest.raises(PageDriverError, match="create"):
        arena.detach([2])
    assert arena.num_handles == 2 * SEGMENTS + 2
    assert all(holds(arena, chunk, chunk + 1) for chunk in range(CAPACITY) if chunk != 2)
    arena.detach([1, 4])
    check(arena)
    assert all(holds(arena, chunk, chunk + 1) for chunk in (0, 3, 5, 6, 7))
    arena.detach([0, 2, 3])
    arena.attach([0, 1, 2, 3, 4])
    check(arena)
    assert holds(arena, 5, 6)


@pytest.mark.usefixtures("clean_device")
@pytest.mark.parametrize("missing", [0, PAGE])
def test_a_cut_takes_the_memory_of_one_handle(missing):
    """However many segments there are: a margin of that is enough."""
    segments, chunks = 8, 16
    arena = make_arena(device.StandInDriver(), [PAGE] * segments, 1, chunks)
    arena.attach(range(chunks))
    fill(arena, 0, 7)
    device.reset(nbytes=(segments * chunks + chunks) * PAGE - missing)
    if missing:
        with pytest.raises(OutOfMemoryError, match=f"{(chunks - 1) * PAGE} bytes are available"):
            arena.detach(range(1, chunks))
        assert len(arena.attached) == chunks
        assert arena.num_handles == segments
    else:
        arena.detach(range(1, chunks))
        assert arena.attached == {0}
    assert holds(arena, 0, 7)
    arena.close()


@pytest.mark.usefixtures("clean_device")
def test_the_calls_of_a_cut():
    """For each handle that is cut in two: two new ones, and the old one seen beside them for the copy."""
    arena = make_arena(device.StandInDriver(), [PAGE] * 4, 1, 17)
    arena.attach(range(16))
    device.reset()
    arena.detach(range(8, 16))
    assert arena.settle(SETTLE_S)
    counts = {name: device.calls(name) for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap")}
    assert counts == {"cuMemCreate": 8, "cuMemMap": 12, "cuMemSetAccess": 8, "cuMemUnmap": 12}
    assert device.calls("cuMemRelease") == 8
    arena.close()
