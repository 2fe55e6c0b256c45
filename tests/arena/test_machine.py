"""Random life of an arena, against a model that is a few sets."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.v1.elastic_kv.page_driver import PageDriverError

from .arenas import CAPACITY, SETTLE_S, check, detach, fill, holds, holds_or_zero, make_arena, picture
from .drivers import AT_HAND, CONTRACT, FaultyDriver

CHUNKS = st.lists(st.integers(0, CAPACITY - 1), unique=True, max_size=CAPACITY)


class Life(RuleBasedStateMachine):
    """Chunks are prepared, attached, written and detached, and calls fail."""

    @initialize(driver=st.sampled_from(AT_HAND))
    def begin(self, driver):
        self.driver = FaultyDriver(CONTRACT[driver]())
        self.arena = make_arena(self.driver)
        self.marks: dict[int, int] = {}  # attached chunk -> the byte that fills it
        self.prepared: set[int] = set()
        self.turn = 0
        self.begun = False  # a detach, of which nobody has waited for the end

    def teardown(self):
        if hasattr(self, "arena"):
            self.driver.mend()
            self.arena.close()
            assert not self.driver.live
            assert not self.arena.busy

    @rule(chunks=CHUNKS)
    def prepare(self, chunks):
        chunks = [chunk for chunk in chunks if chunk not in self.marks]
        self.arena.prepare(chunks)
        self.prepared |= set(chunks)

    @rule()
    def discard(self):
        self.arena.discard_prepared()
        self.prepared = set()

    @rule(chunks=CHUNKS)
    def attach(self, chunks):
        chunks = [chunk for chunk in chunks if chunk not in self.marks]
        self.arena.attach(chunks)
        self._attached(chunks)

    @rule(chunks=CHUNKS)
    def detach(self, chunks):
        chunks = [chunk for chunk in chunks if chunk in self.marks]
        self.arena.detach(chunks)
        for chunk in chunks:
            del self.marks[chunk]

    @rule(chunks=CHUNKS)
    def begin_detach(self, chunks):
        """The next step comes meanwhile, whatever it is. Nobody asks how it went but what has to wait by itself."""
        chunks = [chunk for chunk in chunks if chunk in self.marks]
        self.arena.begin_detach(chunks)
        self.begun = True
        for chunk in chunks:
            del self.marks[chunk]

    @rule(chunks=CHUNKS)
    def begin_attach(self, chunks):
        chunks = [chunk for chunk in chunks if chunk not in self.marks]
        self.arena.begin_attach(chunks)
        assert self.arena.attached == {*self.marks, *chunks}
        assert self.arena.ended()
        self._attached(chunks)

    @rule(chunks=CHUNKS)
    def detach_and_take_back(self, chunks):
        """As where another rank has failed: it takes no memory."""
        chunks = [chunk for chunk in chunks if chunk in self.marks]
        self.arena.begin_detach(chunks)
        assert self.arena.attached == set(self.marks) - set(chunks)
        self.driver.fail("create", always=True)
        self.arena.take_back(chunks)
        self.driver.mend()
        for chunk in chunks:
            assert holds_or_zero(self.arena, chunk, self.marks[chunk])
            fill(self.arena, chunk, self.marks[chunk])

    @rule()
    def let_go(self):
        self.arena.let_go()

    @rule(chunks=CHUNKS, call=st.sampled_from(["map", "create"]), number=st.integers(1, 12))
    def attach_that_may_fail(self, chunks, call, number):
        chunks = [chunk for chunk in chunks if chunk not in self.marks]
        assert self.arena.settle(SETTLE_S)
        self.driver.fail(call, number)
        try:
            self.arena.attach(chunks)
        except PageDriverError:
            self._drop_parts()
        else:
            self._attached(chunks)
        self.driver.mend()

    @rule(
        chunks=CHUNKS,
        call=st.sampled_from(["unmap", "create", "map", "make_usable", "synchronize"]),
        number=st.integers(1, 12),
        aside=st.booleans(),
    )
    def detach_that_may_fail(self, chunks, call, number, aside):
        chunks = [chunk for chunk in chunks if chunk in self.marks]
        assert self.arena.settle(SETTLE_S)
        self.driver.fail(call, number)
        try:
            detach(self.arena, chunks, aside)
        except PageDriverError:
            # Nobody needs what is in chunks that were to leave. Where a cut was through, they read as zero.
            for chunk in chunks:
                assert holds_or_zero(self.arena, chunk, self.marks[chunk])
                fill(self.arena, chunk, self.marks[chunk])
        else:
            for chunk in chunks:
                del self.marks[chunk]
        self.driver.mend()

    @rule(number=st.integers(1, 6), chunks=CHUNKS)
    def release_that_fails(self, number, chunks):
        """It is made good by the next call."""
        chunks = [chunk for chunk in chunks if chunk in self.marks]
        self.driver.fail("release", number)
        self.arena.detach(chunks)
        for chunk in chunks:
            del self.marks[chunk]
        assert self.arena.settle(SETTLE_S)
        self.driver.mend()
        self.arena.attach([])

    @rule(number=st.integers(1, 6), chunks=CHUNKS)
    def prepare_that_fails(self, number, chunks):
        chunks = [chunk for chunk in chunks if chunk not in self.marks]
        before = self.prepared | set(chunks)
        self.driver.fail("create", number)
        self.arena.prepare(chunks)
        assert self.arena.settle(SETTLE_S)
        self.driver.mend()
        self.arena.prepare([])  # forgets what could not be made
        self.prepared = set(self.arena._stock.prepared)
        assert self.prepared <= before

    @rule()
    def wait(self):
        """Otherwise the background may be at work while the next step comes."""
        self.arena.let_go()
        check(self.arena, prepared=len(self.prepared))
        assert picture(self.arena)["unknown handles"] == 0

    @invariant()
    def the_same_as_the_model(self):
        if not hasattr(self, "arena"):
            return
        # What stays can be used while others go. To look at the rest would be to wait for that.
        assert all(holds(self.arena, chunk, mark) for chunk, mark in self.marks.items())
        if self.begun:
            self.begun = False
            return
        assert self.arena.attached == set(self.marks)
        assert self.arena.reported_bytes() == self.arena.resident_bytes == len(self.marks) * self.arena.chunk_bytes

    def _attached(self, chunks):
        self.prepared -= set(chunks)
        self._drop_parts()
        self._write(chunks)

    def _drop_parts(self):
        """Of runs that cannot be cut, what was prepared beside `chunks` is prepared no more."""
        if not self.driver.divisible:
            prepared = set(self.arena._stock.prepared)
            assert prepared <= self.prepared
            self.prepared = prepared

    def _write(self, chunks):
        for chunk in chunks:
            assert holds(self.arena, chunk, 0)
            self.turn += 1
            self.marks[chunk] = self.turn % 127 + 1
            fill(self.arena, chunk, self.marks[chunk])


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
