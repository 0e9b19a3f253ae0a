"""Which tokens the next step computes. Touches sequences and blocks, never tensors.

One step computes at most `token_budget` tokens: one for every sequence that decodes, the rest for prompts, which are
split into chunks when they do not fit (chunked prefill, so a long prompt never stalls the others). Where a drafter guesses, what
is left of a smaller budget (`draft_rows`) goes to guesses behind those that decode.

Order. A request gets the key (priority * ageing_steps + steps taken at its arrival, arrival number) and is served in
order of keys, for good. So it is first come first served within a priority, and a request of priority p overtakes
nobody of priority 0 that arrived more than p * ageing_steps steps earlier: nobody waits for ever.

Memory. When a sequence needs a block and there is none, the running sequence with the largest key gives all its
blocks back and waits again (preemption; it is recomputed, mostly from the prefix cache). A waiting head that does not
fit waits, nobody passes it; it takes memory only from running sequences of worse priority and larger key.
The sequence with the smallest key is therefore never preempted, so it ends; by induction all end. This needs that any
one request fits the cache alone, which the engine checks at the door.

A block is registered in the prefix cache when the step that fills it is scheduled, not when it has run: all keys and
values of a step are written before they are read, layer by layer, so a group of rollouts that starts together computes
its common prompt once. In return a step that fails must flush the cache (Engine does).
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Iterator

from etude.inference.blocks import BlockPool, extend_keys
from etude.inference.sequence import Chunk, Sequence, State
from etude.inference.speculation import Drafter


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key


class Scheduler:
    """Waiting and running sequences, and the blocks they hold."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        root: bytes,
        block_size: int,
        token_budget: int,
        max_running: int,
        ageing_steps: int,
        prefix_cache: bool = True,
        before_release: Callable[[Sequence], None] = lambda seq: None,
        drafter: Drafter | None = None,
        draft_rows: int = 0,
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        """In order of keys."""
        self.steps = 0
        self.preemptions = 0
        self.lookup_tokens = 0
        self.hit_tokens = 0
        self.num_waiting = 0
        self.max_wait_s = 0.0
        """Longest time a request stood in the queue before its first step."""
        self._root = root
        self._block_size = block_size
        self._token_budget = token_budget
        self._max_running = max_running
        self._ageing_steps = ageing_steps
        self._prefix_cache = prefix_cache
        self._before_release = before_release
        self._drafter, self._draft_rows = drafter, draft_rows
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._rows = list(range(max_running - 1, -1, -1))
        self._arrivals = itertools.count()

    @property
    def busy(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        seq.key = (seq.priority * self._ageing_steps + self.steps, next(self._arrivals))
        self._enqueue(seq)

    def waiting(self) -> Iterator[Sequence]:
        """Waiting sequences, in no particular order."""
        return (seq for _, seq in self._waiting if seq.state is State.WAITING)

    def schedule(self, now_s: float = 0.0) -> list[Chunk]:
        """The next step's work: the running sequences in order of keys, then those it admits. Empty only when idle."""
        self._make_room_for_head()
        chunks: list[Chunk] = []
        block = self._block_size
        num_decodes = sum(len(seq.ids) - seq.computed == 1 for seq in self.running)
        budget = self._token_budget - num_decodes
        guesses = min(self._draft_rows - num_decodes, budget) if self._drafter is not None else 0
        for seq in list(self.running):
            if seq.state is not State.RUNNING:
                continue  # preempted by one before it
            begin = seq.computed
            left = len(seq.ids) - begin
            size = 1 if left == 1 else min(left, budget)
            end = begin + size
            if size != 1 or end % block in (0, 1) or self._drafter is not None:  # a single token inside a block needs nothing
                if size == 0 or not self._make_room(seq, end):
                    continue
                self._grow(seq, end)
            if left > 1:
                budget -= size
            elif guesses > 0 and not seq.scoring:
                self._guess(seq, min(guesses, budget))
                guesses -= len(seq.draft)
                budget -= len(seq.draft)
            chunks.append(Chunk(seq, begin, end))
        while budget > 0 and (new := self._admit(now_s)) is not None:
            end = min(len(new.ids), new.computed + budget)
            self._grow(new, end)
            budget -= end - new.computed
            chunks.append(Chunk(new, new.computed, end))
        self.steps += 1
        return chunks

    def _guess(self, seq: Sequence, most: int) -> None:
        """Have tokens proposed behind a sequence that decodes, as far as free blocks reach: a guess takes memory from nobody."""
        assert self._drafter is not None, "the caller has looked"
        room = (len(seq.blocks) + self.pool.available) * self._block_size - len(seq.ids)
        seq.draft = self._drafter.propose(seq, min(most, seq.limit - len(seq.ids) - 1, room))
        for _ in range(self._blocks_for(len(seq.ids) + len(seq.draft)) - len(seq.blocks)):
            seq.blocks.append(self.pool.allocate())

    def end(self, seq: Sequence) -> None:
        """Take a sequence out for good, whatever its state."""
        if seq.state is State.RUNNING:
            self._leave(seq)
        elif seq.state is State.WAITING:
            self.num_waiting -= 1  # its heap entry is skipped when it comes up
        seq.state = State.ENDED

    def swap(self, root: bytes, *, recompute: bool) -> None:
        """The weights changed. Old entries are never found again; running sequences keep their keys and values, or start over."""
        self._root = root
        self.pool.flush()
        for seq in self.waiting():
            seq.keys = []
        for seq in list(self.running):
            seq.keys = []
            if recompute or seq.scoring:
                self._preempt(seq)
            else:
                seq.pure = False

    def _make_room_for_head(self) -> None:
        """Preempt running sequences of worse priority while the head of the queue does not fit."""
        while (head := self._head()) is not None and self.running:
            worst = self.running[-1]
            if worst.priority <= head.priority or worst.key < head.key or self._fits(head):
                return
            self._preempt(worst)
            self.preemptions += 1

    def _head(self) -> Sequence | None:
        while self._waiting:
            seq = self._waiting[0][1]
            if seq.state is State.WAITING:
                return seq
            heapq.heappop(self._waiting)
        return None

    def _fits(self, head: Sequence) -> bool:
        """Room for all known tokens of the head, beside what the running sequences are about to need."""
        if not self._rows:
            return False
        hits = self._match(head)
        need = self._blocks_for(len(head.ids)) - len(hits) + self.pool.idle_among(hits)
        owed = sum(max(self._blocks_for(len(seq.ids)) - len(seq.blocks), 0) + 1 for seq in self.running)
        return need + owed <= self.pool.available

    def _admit(self, now_s: float) -> Sequence | None:
        """Move the head of the queue to the running ones, with the blocks of its cached prefix."""
        head = self._head()
        if head is None or not self._fits(head):
            return None
        heapq.heappop(self._waiting)
        self.num_waiting -= 1
        hits = self._match(head)
        self.pool.share(hits)
        head.blocks = hits
        head.computed = len(hits) * self._block_size
        head.registered = len(hits)
        head.filled = 0
        head.pure = True
        head.row = self._rows.pop()
        head.state = State.RUNNING
        if head.preemptions == 0:
            self._note_first_admission(head, now_s)
        insort(self.running, head, key=_key)
        return head

    def _note_first_admission(self, seq: Sequence, now_s: float) -> None:
        self.max_wait_s = max(self.max_wait_s, now_s - seq.arrived_s)
        if not seq.scoring:
            seq.cached = seq.computed
            self.lookup_tokens += seq.prompt_len
            self.hit_tokens += seq.computed

    def _match(self, seq: Sequence) -> list[int]:
        """Cached blocks a sequence can start from. The last known token is always computed: its logits are needed.

        A scoring sequence needs the logits of every position, so it starts from nothing.
        """
        if not self._prefix_cache or seq.scoring:
            return []
        count = (len(seq.ids) - 1) // self._block_size
        extend_keys(seq.keys, self._root, seq.ids, self._block_size, count)
        return self.pool.match(seq.keys[:count])

    def _make_room(self, seq: Sequence, end: int) -> bool:
        """See that blocks for positions below `end` can be had. False when `seq` itself had to give way.

        Victims come from the back of the running list, behind `seq`: none of them has a chunk in this step yet.
        """
        while self._blocks_for(end) - len(seq.blocks) > self.pool.available:
            victim = self.running[-1]
            self._preempt(victim)
            self.preemptions += 1
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence, end: int) -> None:
        """Take the blocks for positions below `end`, and register those that this step fills."""
        for _ in range(self._blocks_for(end) - len(seq.blocks)):
            seq.blocks.append(self.pool.allocate())
        full = end // self._block_size
        if full > seq.registered and seq.pure and self._prefix_cache:
            extend_keys(seq.keys, self._root, seq.ids, self._block_size, full)
            for i in range(seq.registered, full):
                self.pool.register(seq.blocks[i], seq.keys[i])
            seq.registered = full

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.preemptions += 1
        seq.computed = 0
        seq.registered = 0
        if seq.scoring:
            seq.logprobs = []
        self._enqueue(seq)

    def _leave(self, seq: Sequence) -> None:
        self._before_release(seq)
        self.running.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.draft = []
        self._rows.append(seq.row)
        seq.row = -1

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = State.WAITING
        heapq.heappush(self._waiting, (seq.key, seq))
        self.num_waiting += 1

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_size)
