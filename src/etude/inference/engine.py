"""The native engine: requests in, tokens with their origin out.

One step is `schedule -> run -> sample -> collect` (see `NativeEngine.step`); one background task takes steps while there
is work and lets everybody else run between two of them. A weight swap, a cancellation and a new request happen between
steps, so a step never sees half of one.

Weights are swapped in flight (M8; PipelineRL, arXiv 2509.19128): requests in progress go on, and each later token
carries the new version. Their keys and values are kept (`cache_policy = "keep"`) or computed again ("recompute"); new
requests never use what an older version left in the cache.

Routes of a position are those in force when the first token after it was sampled; a later recomputation (preemption, swap)
does not change them. So a stream and `generate` report the same rows.

Who waits for whom:

    generate, score   wait for `client.done`          set by the step that ends the sequence, cancel, or a failure
    generate_stream   waits for `client.pieces`       fed by every step that samples for it
    _drive            waits for nobody; ends when there is no work, and the next request starts it again
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Many

import numpy as np
from torch import Tensor

import etude
from etude.errors import BusyError, EngineError, UserError
from etude.inference import naive
from etude.inference.blocks import BlockPool, root_key
from etude.inference.budget import make_budget
from etude.inference.config import EngineConfig
from etude.inference.request import check_ids, check_request, check_temperature
from etude.inference.runner import Runner, block_bytes
from etude.inference.scheduler import Scheduler
from etude.inference.sequence import Chunk, Sequence, State
from etude.inference.speculation import make_drafter
from etude.model.transformer import Decoder
from etude.protocols import GenerateRequest, Generation, Scored
from etude.records import Finish, Manifest, Sampling, Version

_LOG = logging.getLogger(__name__)
Apply = Callable[[dict[str, Tensor], Manifest, str], Version]
"""Changes the tensors of a state dict in place to what the manifest says, and returns the version. Stands in for `sync` in tests."""


class _Client:
    """Whoever waits for a sequence."""

    def __init__(self, *, streaming: bool = False) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces: asyncio.Queue[Generation | None] | None = asyncio.Queue() if streaming else None
        self.sent_tokens = 0
        self.sent_rows = 0


class NativeEngine:
    """Implements `protocols.Engine` on one model in this process."""

    build = f"native-{etude.__version__}"

    def __init__(self, model: Decoder, *, version: Version, config: EngineConfig = EngineConfig(), apply: Apply | None = None) -> None:
        self.config = config
        self._model = model.eval()
        self._version = version
        self._apply = apply
        if isinstance(model, Decoder):  # tests bring toys
            model.pack()
        parameter = next(model.parameters())
        self._window, self._vocab = model.config.max_positions, model.config.vocab_size
        self.budget = make_budget(
            config,
            block_bytes=block_bytes(model.config, config.block_size, parameter.dtype),
            window=self._window,
            device=parameter.device,
        )
        _LOG.info("%s", self.budget)
        self._capacity = self.budget.tokens
        self._runner = self._make_runner()
        self._pool = BlockPool(self.budget.num_blocks)
        self._drafter = make_drafter(config)
        self._scheduler = Scheduler(
            self._pool,
            root=root_key(version),
            block_size=config.block_size,
            token_budget=config.token_budget,
            max_running=config.max_running,
            ageing_steps=config.ageing_steps,
            prefix_cache=config.prefix_cache,
            before_release=self._save_routes,
            drafter=self._drafter,
            draft_rows=config.draft_rows,
        )
        self._active: dict[str, Sequence] = {}
        self._deadlines = 0
        self._names = itertools.count()
        self._driver: asyncio.Task[None] | None = None
        self._closed = False
        self._counts = dict.fromkeys(("requests", "sampled_tokens", "computed_tokens", "scored_tokens", "stale_tokens"), 0)
        self._counts |= dict.fromkeys(
            ("swaps", "healed", "failures", "cancelled", "expired", "refused", "drafted_tokens", "accepted_tokens"), 0
        )
        self._busy_s = self._pause_s = 0.0

    def _make_runner(self) -> Runner:
        try:
            return Runner(
                self._model,
                num_blocks=self.budget.num_blocks,
                block_size=self.config.block_size,
                max_running=self.config.max_running,
                max_blocks=-(-min(self._window, self._capacity) // self.config.block_size),
            )
        except (MemoryError, RuntimeError) as error:  # torch has no one type for "cannot allocate"
            raise EngineError(f"no memory for the engine's {self.budget}: {error}; lower engine.cache_bytes") from error

    # -- the step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Compute one token for everyone who is due, and a chunk of the prompts of those who are not."""
        now_s = time.monotonic()
        self._expire(now_s)
        chunks = self._scheduler.schedule(now_s)
        assert chunks or not self._scheduler.busy, "there is work and none of it was scheduled"
        tokens = self._runner.run(chunks) if chunks else ([], [], [])
        self._collect(chunks, tokens)
        self._busy_s += time.monotonic() - now_s

    def _expire(self, now_s: float) -> None:
        if not self._deadlines:
            return
        for seq in [s for s in self._active.values() if s.deadline_s <= now_s]:
            self._counts["expired"] += 1
            self._end(seq, Finish.DEADLINE)

    def _collect(self, chunks: list[Chunk], tokens: tuple[list[int], list[float], list[float]]) -> None:
        """Give every due sequence its tokens, and end those that are done."""
        due = zip(*tokens)
        counts = self._counts
        for seq, begin, end in chunks:
            seq.computed = end
            counts["computed_tokens"] += end - begin + len(seq.draft)
            if end < len(seq.ids):
                continue
            if seq.scoring:
                counts["scored_tokens"] += end
                self._end(seq, Finish.STOP)
                continue
            token, logprob, logprob_t1 = next(due)
            seq.note(token, logprob, logprob_t1, self._version)
            counts["sampled_tokens"] += 1
            counts["stale_tokens"] += not seq.pure
            if seq.draft:
                token = self._confirm(seq, token, [next(due) for _ in seq.draft])
            if token in seq.stop_ids:
                self._end(seq, Finish.STOP)
            elif len(seq.ids) >= seq.limit:
                self._end(seq, Finish.LENGTH)
            elif seq.client.pieces is not None:
                seq.client.pieces.put_nowait(self._piece(seq))

    def _confirm(self, seq: Sequence, token: int, sampled: list[tuple[int, float, float]]) -> int:
        """Take what was sampled behind each guess that came true. Returns the newest token."""
        accepted = 0
        for guess, (following, logprob, logprob_t1) in zip(seq.draft, sampled, strict=True):
            if token != guess or token in seq.stop_ids:
                break
            accepted += 1
            token = following
            seq.note(token, logprob, logprob_t1, self._version)
        seq.computed += accepted
        counts = self._counts
        counts["sampled_tokens"] += accepted
        counts["stale_tokens"] += accepted * (not seq.pure)
        counts["drafted_tokens"] += len(seq.draft)
        counts["accepted_tokens"] += accepted
        assert self._drafter is not None, "somebody guessed"
        self._drafter.learn(seq, len(seq.draft), accepted)
        seq.draft = []
        return token

    async def _drive(self) -> None:
        """Step while there is work. A step that fails fails the requests in it; the engine goes on with later ones."""
        try:
            while self._scheduler.busy:
                try:
                    self.step()
                except Exception as error:
                    self._counts["failures"] += 1
                    self._fail_all(f"an engine step failed: {type(error).__name__}: {error}", error)
                    self._runner.clear()
                await asyncio.sleep(0)
        finally:
            self._driver = None
            if self._scheduler.busy:
                self._fail_all("the engine's task was stopped", None)

    # -- requests ------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample until a stop id, the token limit, the window's end, the deadline, or `cancel`."""
        seq = self._enter(request, streaming=False)
        await self._wait(seq)
        return self._generation(seq)

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """The same in pieces as they are sampled. A piece has `finish` None, except the last; see `join`."""
        seq = self._enter(request, streaming=True)
        try:
            while (piece := await seq.client.pieces.get()) is not None:
                yield piece
                if piece.finish is not None:
                    return
            seq.client.done.result()  # raises what ended it
        finally:
            self._abandon(seq)

    async def score(self, ids: Many[int], *, temperature: float = 1.0) -> Scored:
        """Log-prob of each of the given ids after those before it, under one version."""
        self._check_open()
        check_temperature(temperature)
        known = check_ids(ids, vocab=self._vocab, window=self._window, capacity=self._capacity)
        seq = Sequence(
            id=f"score {next(self._names)}",
            ids=known,
            sampling=Sampling(temperature=temperature),
            limit=len(known),
            arrived_s=time.monotonic(),
            wants_routes=True,
            scoring=True,
        )
        self._submit(seq, _Client())
        await self._wait(seq)
        logprob_T = np.zeros(len(known), np.float32)
        logprob_T[1:] = seq.logprobs
        routes_TLK = self._routes(seq, 0, len(known)) if self._runner.has_routes else None
        return Scored(logprob_T=logprob_T, routes_TLK=routes_TLK, version=seq.versions[0])

    async def cancel(self, request_id: str) -> None:
        """End a request now; its caller gets what was sampled, with finish CANCELLED. Unknown or ended ids are fine."""
        if (seq := self._active.get(request_id)) is not None:
            self._counts["cancelled"] += 1
            self._end(seq, Finish.CANCELLED)

    async def load(self, manifest: Manifest, source: str) -> Version:
        """Swap weights between two steps. Weights that do not match their hashes, or that answer the manifest's canary
        prompt differently here, are refused: the error passes through, and the old version goes on serving."""
        self._check_open()
        begin_s = time.monotonic()
        version = self._receive(manifest, source)
        if isinstance(self._model, Decoder):
            self._model.weights_changed()
        if version.key != self._version.key:
            self._version = version
            self._scheduler.swap(root_key(version), recompute=self.config.cache_policy == "recompute")
        self._counts["swaps"] += 1
        self._pause_s += time.monotonic() - begin_s
        return version

    async def version(self) -> Version:
        return self._version

    async def stats(self) -> dict[str, float]:
        """Counters since the start, gauges of now, and the memory the engine was given."""
        scheduler, pool = self._scheduler, self._pool
        oldest_s = min((s.arrived_s for s in scheduler.waiting()), default=None)
        return {
            **{name: float(n) for name, n in self._counts.items()},
            "running": float(len(scheduler.running)),
            "waiting": float(scheduler.num_waiting),
            "steps": float(scheduler.steps),
            "preemptions": float(scheduler.preemptions),
            "tokens_per_s": self._counts["sampled_tokens"] / self._busy_s if self._busy_s else 0.0,
            "busy_s": self._busy_s,
            "pause_s": self._pause_s,
            "max_wait_s": scheduler.max_wait_s,
            "oldest_wait_s": time.monotonic() - oldest_s if oldest_s is not None else 0.0,
            "cache_hit_rate": scheduler.hit_tokens / scheduler.lookup_tokens if scheduler.lookup_tokens else 0.0,
            "cached_tokens": float(scheduler.hit_tokens),
            "acceptance": self._counts["accepted_tokens"] / max(self._counts["drafted_tokens"], 1),
            "evictions": float(pool.evictions),
            "blocks_total": float(pool.total),
            "blocks_used": float(pool.used),
            "blocks_idle": float(pool.idle),
            "block_bytes": float(self.budget.block_bytes),
            "cache_bytes": float(self.budget.cache_bytes),
            "cache_tokens": float(self._capacity),
            "free_bytes_at_start": float(self.budget.free_bytes),
            "window": float(self._window),
            "max_running": float(self.config.max_running),
            "cache_keeps_stale": float(self.config.cache_policy == "keep"),
        }

    async def close(self) -> None:
        """Stop stepping; whoever still waits gets an EngineError."""
        self._closed = True
        self._fail_all("the engine was closed", None)
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)

    # -- from request to sequence and back -----------------------------------------------------------

    def _enter(self, request: GenerateRequest, *, streaming: bool) -> Sequence:
        self._check_open()
        ids = check_request(request, vocab=self._vocab, window=self._window, capacity=self._capacity)
        if request.id in self._active:
            raise UserError(f"a request with id {request.id!r} is in progress; give every request its own id")
        now_s = time.monotonic()
        seq = Sequence(
            id=request.id,
            ids=ids,
            sampling=request.sampling,
            limit=min(len(ids) + request.sampling.max_tokens, self._window, self._capacity + 1),
            priority=request.priority,
            arrived_s=now_s,
            deadline_s=math.inf if request.deadline_s is None else now_s + request.deadline_s,
            wants_routes=request.routes,
        )
        self._submit(seq, _Client(streaming=streaming))
        self._counts["requests"] += 1
        return seq

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")

    def _submit(self, seq: Sequence, client: _Client) -> None:
        waiting, most = self._scheduler.num_waiting, self.config.max_waiting
        if most and waiting >= most:
            self._counts["refused"] += 1
            raise BusyError(f"{waiting} requests wait already, as many as engine.max_waiting allows; come back later, or raise it")
        seq.client = client
        self._active[seq.id] = seq
        self._deadlines += seq.deadline_s < math.inf
        self._scheduler.add(seq)
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _wait(self, seq: Sequence) -> None:
        try:
            await seq.client.done
        finally:
            self._abandon(seq)

    def _abandon(self, seq: Sequence) -> None:
        """The caller went away (its task was cancelled, it left the stream): stop working for it."""
        if seq.state is not State.ENDED:
            self._counts["cancelled"] += 1
            self._end(seq, Finish.CANCELLED)

    def _end(self, seq: Sequence, finish: Finish) -> None:
        seq.finish = finish
        if seq.scoring:
            seq.versions = [self._version]
        self._forget(seq)
        if not seq.client.done.done():
            seq.client.done.set_result(None)
        if seq.client.pieces is not None:
            seq.client.pieces.put_nowait(self._piece(seq))

    def _forget(self, seq: Sequence) -> None:
        self._scheduler.end(seq)
        del self._active[seq.id]
        self._deadlines -= seq.deadline_s < math.inf

    def _fail_all(self, why: str, cause: Exception | None) -> None:
        """Everybody in the engine gets an EngineError. What the cache holds is in doubt, so it is forgotten."""
        for seq in list(self._active.values()):
            seq.wants_routes = False  # nothing is read from a cache that may be broken
            self._forget(seq)
            client = seq.client
            if not client.done.done():
                error = EngineError(f"request {seq.id!r} was lost: {why}")
                error.__cause__ = cause
                client.done.set_exception(error)
                client.done.exception()  # a caller that left must not leave a warning behind
            if client.pieces is not None:
                client.pieces.put_nowait(None)
        self._pool.flush()

    def _receive(self, manifest: Manifest, source: str) -> Version:
        if self._apply is not None:
            return self._apply(self._model.state_dict(), manifest, source)
        from etude.sync.receive import Receiver  # a lower layer, needed only by engines that swap

        def canary(ids: Many[int]) -> Many[float]:
            """What the new weights say here; the manifest may leave out the first position, which has no log-prob."""
            logprob_T = naive.score(self._model, ids, manifest.version, block_size=self.config.block_size).logprob_T
            return logprob_T[len(ids) - len(manifest.canary_logprobs) :].tolist()

        receiver = Receiver(self._model.state_dict(), source, version=self._version, canary=canary)
        version = receiver.advance(manifest)
        self._counts["healed"] += len(receiver.healed)
        return version

    def _save_routes(self, seq: Sequence) -> None:
        """Called before a sequence gives its blocks back: keep the rows that are settled (see the module docstring)."""
        if self._runner.has_routes and seq.wants_routes and (seq.sampled or seq.finish is not None):
            seq.routes = self._routes(seq, 0, seq.computed)

    def _routes(self, seq: Sequence, begin: int, end: int) -> np.ndarray:
        """Rows of positions [begin, end): those saved at a preemption, those beside the cache, and absent ones."""
        saved = seq.routes[begin:end] if seq.routes is not None else self._runner.absent(0)
        middle = begin + len(saved)
        fresh_end = max(middle, min(end, seq.computed)) if seq.state is State.RUNNING else middle
        if fresh_end == middle == end:
            return saved
        return np.concatenate([saved, self._runner.routes(seq, middle, fresh_end), self._runner.absent(end - fresh_end)])

    def _piece(self, seq: Sequence) -> Generation:
        """What was sampled since the last piece. Rows of routes lag one position behind: the newest token is not fed yet."""
        client = seq.client
        begin, row = client.sent_tokens, client.sent_rows
        client.sent_tokens = seq.sampled
        client.sent_rows = len(seq.ids) if seq.finish is not None else len(seq.ids) - 1
        return self._generation(seq, begin, row, client.sent_rows)

    def _generation(self, seq: Sequence, begin: int = 0, row: int = 0, end_row: int | None = None) -> Generation:
        """Sampled tokens from `begin` on, and rows of routes from `row` to `end_row`."""
        wanted = self._runner.has_routes and seq.wants_routes
        return Generation(
            id=seq.id,
            ids=tuple(seq.ids[seq.prompt_len + begin :]),
            logprob_T=np.array(seq.logprobs[begin:], np.float32),
            logprob_t1_T=np.array(seq.logprobs_t1[begin:], np.float32),
            version_T=np.array(seq.token_versions[begin:], np.int16),
            kept_T=np.array(seq.kept[begin:], bool),
            versions=tuple(seq.versions),
            routes_PTLK=self._routes(seq, row, len(seq.ids) if end_row is None else end_row) if wanted else None,
            finish=seq.finish,
            cached_tokens=seq.cached,
            seconds=time.monotonic() - seq.arrived_s,
        )
