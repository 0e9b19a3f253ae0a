"""The scheduler alone, against a model of what every cache slot holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from etude.inference.blocks import BlockPool, root_key
from etude.inference.scheduler import Scheduler
from etude.inference.sequence import Sequence, State
from etude.records import Sampling, Version

BLOCK = 4


def root(ordinal):
    return root_key(Version(lineage=0, ordinal=ordinal, hash=""))


def scheduler(num_blocks=17, token_budget=8, max_running=4, ageing_steps=8):
    pool = BlockPool(num_blocks)
    return Scheduler(pool, root=root(0), block_size=BLOCK, token_budget=token_budget, max_running=max_running, ageing_steps=ageing_steps)


def sequence(name, ids, more, *, priority=0, scoring=False):
    return Sequence(id=name, ids=list(ids), sampling=Sampling(), limit=len(ids) + more, priority=priority, scoring=scoring)


def advance(sched, chunks, token=lambda seq: (7 * len(seq.ids) + seq.ids[0]) % 5):
    """What the engine does after a step: note progress, append a token where one is due, end what is done."""
    ended = []
    for seq, _, end in chunks:
        seq.computed = end
        if end < len(seq.ids):
            continue
        if not seq.scoring:
            seq.ids.append(token(seq))
        if seq.scoring or len(seq.ids) >= seq.limit:
            sched.end(seq)
            ended.append(seq)
    return ended


def drain(sched, most=10_000):
    ended = []
    while sched.busy:
        chunks = sched.schedule()
        assert chunks, "work is left but nothing was scheduled"
        ended += advance(sched, chunks)
        assert sched.steps < most
    return ended


class Machine(RuleBasedStateMachine):
    """Random requests, steps, cancellations and swaps. `slots[slot]` is the context that was written there last."""

    def __init__(self):
        super().__init__()
        self.sched = scheduler()
        self.ordinal = 0
        self.slots: dict[int, tuple] = {}
        self.alive: list[Sequence] = []
        self.added = 0
        self.ended: list[str] = []

    @rule(
        word=st.integers(0, 2),
        length=st.integers(1, 30),
        more=st.integers(1, 20),
        priority=st.integers(0, 2),
        scoring=st.sampled_from([False, False, False, True]),
    )
    def add(self, word, length, more, priority, scoring):
        seq = sequence(f"{self.added}", [word] * length, 0 if scoring else more, priority=priority, scoring=scoring)
        self.added += 1
        self.alive.append(seq)
        self.sched.add(seq)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            if not self.sched.busy:
                return
            chunks = self.sched.schedule()
            self.look_at(chunks)
            self.gone(advance(self.sched, chunks))

    def look_at(self, chunks):
        assert chunks
        assert sum(end - begin for _, begin, end in chunks) <= 8
        assert len({seq.id for seq, _, _ in chunks}) == len(chunks) <= 4
        assert len({seq.row for seq, _, _ in chunks}) == len(chunks)
        written = {}
        for seq, begin, end in chunks:
            assert seq.state is State.RUNNING
            assert begin == seq.computed < end <= len(seq.ids)
            for p in range(begin, end):
                slot = seq.blocks[p // BLOCK] * BLOCK + p % BLOCK
                assert slot not in written, "two tokens of one step in one slot"
                written[slot] = (self.ordinal, tuple(seq.ids[: p + 1]))
        self.slots |= written
        for seq, _, end in chunks:
            for p in range(end):
                ordinal, context = self.slots[seq.blocks[p // BLOCK] * BLOCK + p % BLOCK]
                assert context == tuple(seq.ids[: p + 1]), "a sequence reads what another context wrote"
                assert ordinal == self.ordinal or not seq.pure, "a new request reads what an old version wrote"

    def gone(self, ended):
        for seq in ended:
            self.ended.append(seq.id)
            self.alive.remove(seq)

    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        if self.alive:
            seq = self.alive[which % len(self.alive)]
            self.sched.end(seq)
            self.gone([seq])

    @rule(recompute=st.booleans())
    def swap(self, recompute):
        self.ordinal += 1
        self.sched.swap(root(self.ordinal), recompute=recompute)

    @invariant()
    def nothing_lost_or_leaked(self):
        self.sched.pool.check()
        running, waiting = self.sched.running, list(self.sched.waiting())
        assert sorted(s.id for s in running + waiting) == sorted(s.id for s in self.alive)
        assert len(waiting) == self.sched.num_waiting
        assert [s.key for s in running] == sorted(s.key for s in running)
        refs = [0] * (self.sched.pool.total + 1)
        for seq in running:
            for block in seq.blocks:
                refs[block] += 1
        assert refs == self.sched.pool._refs
        assert all(not s.blocks and s.computed == 0 for s in waiting)

    def teardown(self):
        while self.sched.busy:
            chunks = self.sched.schedule()
            self.look_at(chunks)
            self.gone(advance(self.sched, chunks))
        assert sorted(self.ended, key=int) == [str(i) for i in range(self.added)], "a request was lost or ended twice"
        self.nothing_lost_or_leaked()
        assert self.sched.pool.used == 0
        assert sorted(self.sched._rows) == [0, 1, 2, 3]


Machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks():
    sched = scheduler()
    sched.add(sequence("decoding", [1, 2], 50))
    advance(sched, sched.schedule())
    sched.add(sequence("long", range(40), 1))
    sizes = []
    for _ in range(5):
        chunks = sched.schedule()
        assert [c.seq.id for c in chunks] == ["decoding", "long"]
        sizes.append(chunks[1].end - chunks[1].begin)
        advance(sched, chunks)
    assert sizes == [7] * 5  # the budget of 8, less the token of the one that decodes


def test_a_group_that_starts_together_computes_its_common_prompt_once():
    sched = scheduler(token_budget=64)
    for i in range(4):
        sched.add(sequence(str(i), range(17), 3))
    chunks = sched.schedule()
    assert [end - begin for _, begin, end in chunks] == [17, 1, 1, 1]
    assert len({seq.blocks[3] for seq, _, _ in chunks}) == 1
    assert len({seq.blocks[4] for seq, _, _ in chunks}) == 4
    drain(sched)


def test_preemption_takes_the_latest_request_and_lets_it_resume_from_the_prefix_cache():
    sched = scheduler(num_blocks=9, token_budget=64)
    first, last = sequence("first", [1] * 9, 16), sequence("last", [2] * 9, 16)
    sched.add(first)
    sched.add(last)
    seen = set()
    while sched.busy:
        chunks = sched.schedule()
        if last.state is State.WAITING:
            seen.add("waits")
        elif "waits" in seen and "resumed" not in seen and last.state is State.RUNNING:
            assert chunks[-1].begin > 0, "the whole prompt was computed again"
            seen.add("resumed")
        advance(sched, chunks)
    assert seen == {"waits", "resumed"}
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert sched.preemptions == 1


def test_first_come_first_served_within_a_priority():
    sched = scheduler(max_running=1)
    for i in range(6):
        sched.add(sequence(str(i), [i + 1], 2))
    assert [s.id for s in drain(sched)] == [str(i) for i in range(6)]


def test_a_better_priority_goes_first_and_takes_memory_from_a_worse_one():
    sched = scheduler(num_blocks=7, token_budget=64)
    batch = sequence("batch", [1] * 20, 4, priority=3)
    sched.add(batch)
    advance(sched, sched.schedule())
    sched.add(sequence("fast", [2] * 20, 4))
    advance(sched, sched.schedule())
    assert [s.id for s in sched.running] == ["fast"]
    assert batch.preemptions == 1
    assert [s.id for s in drain(sched)] == ["fast", "batch"]


def test_ageing_bounds_the_wait_of_a_worse_priority_under_a_stream_of_better_ones():
    sched = scheduler(max_running=1, ageing_steps=8)
    slow = sequence("slow", [3], 2, priority=2)
    sched.add(slow)
    ended = []
    for i in range(200):
        sched.add(sequence(f"fast {i}", [1], 2))
        ended += advance(sched, sched.schedule())
        if slow in ended:
            break
    # priority 2 at 8 steps each: everyone that arrived in the first 16 steps may pass, nobody later
    assert slow in ended
    assert sum(s.id.startswith("fast") for s in ended) <= 17


def test_nobody_overtakes_a_head_that_waits_for_memory():
    sched = scheduler(num_blocks=9, token_budget=64)
    sched.add(sequence("running", [1] * 12, 8))
    advance(sched, sched.schedule())
    sched.add(sequence("big", [2] * 30, 1))
    sched.add(sequence("small", [3], 1))
    order = [s.id for s in drain(sched)]
    assert order.index("big") < order.index("small") or order[0] == "running"
    assert order[:2] == ["running", "big"]


def test_an_old_version_is_never_found_again_even_after_coming_back():
    sched = scheduler(token_budget=64)
    sched.add(sequence("a", range(17), 1))
    drain(sched)
    for ordinal in (1, 0):
        sched.swap(root(ordinal), recompute=False)
        again = sequence("again", range(17), 1)
        sched.add(again)
        assert sched.schedule()[0].begin == 0
        sched.end(again)


def test_an_admission_leaves_the_running_ones_the_blocks_they_are_about_to_need():
    sched = scheduler(num_blocks=7, token_budget=64)
    sched.add(sequence("running", [1] * 8, 8))
    advance(sched, sched.schedule())
    sched.add(sequence("next", [2] * 12, 1))
    assert [s.id for s in drain(sched)] == ["running", "next"]
    assert sched.preemptions == 0
