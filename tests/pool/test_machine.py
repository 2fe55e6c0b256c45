"""Random life of a pool and its arena: after every step the invariants hold."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .pools import (
    TOKENS,
    check,
    grow,
    make_arena,
    make_layout,
    make_pool,
    make_request,
    move,
    prompt,
    reads,
    shrink,
    write,
)


class Life(RuleBasedStateMachine):
    """Requests come, hit prefixes and go while the cache grows and shrinks."""

    @initialize(
        chunk_blocks=st.sampled_from([1, 2, 3]),
        base=st.integers(1, 2),
        start=st.integers(2, 5),
        events=st.booleans(),
    )
    def begin(self, chunk_blocks, base, start, events):
        self.layout = make_layout(chunk_blocks, base, start, capacity=9)
        self.pool = make_pool(self.layout, enable_kv_cache_events=events)
        self.arena = make_arena(self.layout)
        self.running = []  # (request's blocks, the byte that each was filled with)
        self.prefixes = {}  # seed -> number of blocks
        self.seed = 0
        self.resizes = 0

    def teardown(self):
        if hasattr(self, "arena"):
            self.arena.close()

    def _write(self, blocks):
        """What the model would do: give each block bytes of its own."""
        marks = [(self.seed * 7 + place) % 120 + 1 for place in range(len(blocks))]
        for block, mark in zip(blocks, marks, strict=True):
            write(self.arena, block.block_id, mark)
        return marks

    @rule(count=st.integers(1, 5), cached=st.booleans())
    def allocate(self, count, cached):
        if count > self.pool.get_num_free_blocks():
            return
        live = {block.block_id for blocks, _ in self.running for block in blocks}
        blocks = self.pool.get_new_blocks(count)
        ids = [block.block_id for block in blocks]
        assert len(set(ids)) == count
        assert not live & set(ids)
        assert all(block_id // self.layout.chunk_blocks in self.pool.resident_chunks for block_id in ids)
        self.seed += 1
        self.running.append((blocks, self._write(blocks)))
        if cached:
            request = make_request(f"request {self.seed}", prompt(self.seed, count))
            self.pool.cache_full_blocks(request, blocks, 0, count, TOKENS, 0)
            self.prefixes[self.seed] = (count, self.running[-1][1])

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def free(self, which):
        blocks, marks = self.running.pop(which % len(self.running))
        for block, mark in zip(blocks, marks, strict=True):
            assert reads(self.arena, block.block_id, mark)
        self.pool.free_blocks(reversed(blocks))

    @precondition(lambda self: self.prefixes)
    @rule(which=st.integers(0, 100))
    def touch(self, which):
        """A request hits a prefix, if it is still there; then its bytes are too."""
        seed = sorted(self.prefixes)[which % len(self.prefixes)]
        count, marks = self.prefixes[seed]
        hit = []
        for block_hash in make_request("again", prompt(seed, count)).block_hashes:
            found = self.pool.get_cached_block(block_hash, [0])
            if found is None:
                break
            hit += found
        if not hit:
            del self.prefixes[seed]
            return
        for block, mark in zip(hit, marks, strict=False):
            assert reads(self.arena, block.block_id, mark)
        self.pool.touch(hit)
        self.running.append((hit, marks[: len(hit)]))

    @rule(data=st.data())
    def grow(self, data):
        missing = self.pool.missing_chunks()
        if not missing:
            return
        chunks = data.draw(st.lists(st.sampled_from(missing), min_size=1, max_size=4, unique=True))
        before = self.pool.num_gpu_blocks
        grow(self.pool, self.arena, chunks)
        assert self.pool.num_gpu_blocks == before + len(chunks) * self.layout.chunk_blocks
        self.resizes += 1

    @rule(num_chunks=st.integers(0, 9))
    def shrink(self, num_chunks):
        live = {block.block_id for blocks, _ in self.running for block in blocks}
        before = self.pool.num_gpu_blocks
        plan = shrink(self.pool, self.arena, num_chunks)
        gone = {block for chunk in plan.chunks for block in self.pool._ids(chunk)}
        assert plan.moved == len(gone & live)
        assert len({block.block_id for blocks, _ in self.running for block in blocks}) == len(live)
        chunk, base = self.layout.chunk_blocks, self.layout.base_blocks
        assert self.pool.num_gpu_blocks == max(
            before - num_chunks * chunk, base, -(-(len(live) + 1) // chunk) * chunk
        ), "as far as asked, to the base, or to the live blocks"
        assert min(plan.chunks, default=99) >= self.layout.base_blocks // self.layout.chunk_blocks
        assert len(plan.chunks) + plan.missing == num_chunks
        assert self.pool.num_gpu_blocks == before - len(gone)
        self.resizes += 1

    @rule(num_chunks=st.integers(1, 9), steps=st.lists(st.sampled_from(["move", "free", "retire"]), max_size=6))
    def shrink_in_steps_and_give_up(self, num_chunks, steps):
        """Requests end meanwhile; then what is left is published again."""
        self.pool.withdraw(self.pool.plan_shrink(num_chunks).chunks)
        for step in steps:
            if step == "move":
                move(self.pool, self.arena, 1)
            elif step == "free" and self.running:
                self.free(which=0)
            elif step == "retire":
                empty = self.pool.emptied()
                self.arena.detach(empty)
                self.pool.retire(empty)
            check(self.pool, self.arena)
        self.pool.restore()
        self.resizes += 1

    @rule()
    def plan_changes_nothing(self):
        before = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        first = self.pool.plan_shrink(5)
        assert first == self.pool.plan_shrink(5)
        assert before == [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    @rule()
    def reset_prefix_cache(self):
        assert self.pool.reset_prefix_cache() == (not self.running)
        if not self.running:
            assert self.pool.counts().cached == 0

    @rule(data=st.data())
    def evict(self, data):
        ids = data.draw(st.sets(st.integers(1, len(self.pool.blocks) - 1), max_size=4))
        self.pool.evict_blocks(ids)

    @invariant()
    def holds(self):
        if hasattr(self, "arena"):
            check(self.pool, self.arena)
            live = {block.block_id for blocks, _ in self.running for block in blocks}
            assert self.pool.counts().used == len(live)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_200_random_resizes():
    """Without shrinking of examples in between: 200 resizes of one pool that is in use all the time."""
    import random

    choose = random.Random(20)
    life = Life()
    life.begin(chunk_blocks=2, base=1, start=3, events=True)
    while life.resizes < 200:
        step = choose.choice(["grow", "shrink", "allocate", "allocate", "free", "touch"])
        if step == "grow" and life.pool.missing_chunks():
            missing = life.pool.missing_chunks()
            grow(life.pool, life.arena, choose.sample(missing, choose.randint(1, len(missing))))
            life.resizes += 1
        elif step == "shrink":
            life.shrink(num_chunks=choose.randint(0, 9))
        elif step == "allocate":
            life.allocate(count=choose.randint(1, 5), cached=choose.random() < 0.5)
        elif step == "free" and life.running:
            life.free(which=choose.randrange(100))
        elif step == "touch" and life.prefixes:
            life.touch(which=choose.randrange(100))
        life.holds()
    life.teardown()
