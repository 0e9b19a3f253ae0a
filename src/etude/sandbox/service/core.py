"""What an environment service does, apart from HTTP: environments, operations, leases, recovery, drain.

Invariants:
- An environment is created once for an owner's create_id, whoever asks again and however often. The work goes on when the
  connection that asked for it is lost.
- An operation runs once for its number. Asking again with the same number waits for the same run or gets the
  result that it had. When the server was restarted in between, nobody knows what the run did: that is an `infra` error, never a
  second run.
- An environment lives while one of its leases does (ledger.py), and at most BACKEND_TTL_S longer than this process.
- What is written down exists or is being made; what exists and is not written down is removed at the next start.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import InfraError, SandboxError, UserError
from etude.protocols import Limits, Sandbox, SandboxHost, Session
from etude.records import Level
from etude.sandbox.egress.policy import NetworkPolicy
from etude.sandbox.service import wire
from etude.sandbox.service.admission import Admission, Capacity
from etude.sandbox.service.ledger import ROLLOUT, Entry, Ledger
from etude.sandbox.service.metrics import Metrics
from etude.sandbox.service.wire import PolicyError

PREFIX = "env-"
"""Of the create_ids that this service gives to its backend."""
BACKEND_TTL_S, RENEW_S = 120.0, 30.0
"""How long a sandbox outlives a server that does not renew it, and how often it is renewed."""
SWEEP_S = 0.25
KEPT_RESULTS = 256
KEPT_FATES = 4096
BY_AGENT = frozenset({"exec", "read", "write", "list", "stat", "apply_changes", "apply_patch", "open_session", "session_run", "call"})
"""Operations in which an OSError is the workspace's answer."""


class NoSuchEnvironment(SandboxError):
    """Gone, or never there, or somebody else's."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the operator allows."""

    most: Limits = Limits(wall_s=86_400, memory_bytes=64 * 2**30, pids=4096, disk_bytes=64 * 2**30, output_bytes=2**30, cpu_s=86_400)
    """Upper bounds of what a sandbox may ask for."""
    ttl_s: float = 86_400.0
    network: bool = False
    """Whether sandboxes may have a network at all."""
    secrets: tuple[str, ...] = ()
    """Environment variables of this server that policies may inject. Any other would hand its value to whom the caller names."""
    endpoints: tuple[str, ...] = ()
    """Addresses that rules may name with `at`: they reach into the server's own network."""


@dataclass(eq=False, kw_only=True)
class Env:
    entry: Entry
    need_bytes: int
    sandbox: Sandbox | None = None
    why: str = ""
    """Why it ended; empty while it lives."""
    made: asyncio.Task[None] | None = None
    ops: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    """Runs by number, kept until the caller says that it has seen the result."""
    forgotten: set[str] = field(default_factory=set)
    """Numbers whose results were dropped unseen, because there were too many."""
    sessions: dict[str, Session] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)


class Service:
    """Belongs to one event loop. `host` is the backend that really makes sandboxes."""

    def __init__(self, host: SandboxHost, root: Path, *, capacity: Capacity = Capacity(), rules: Rules = Rules()) -> None:
        self._host, self.rules = host, rules
        self.admission, self.metrics = Admission(capacity), Metrics()
        self._ledger = Ledger(root / "envs")
        self.epoch = secrets.token_hex(8)
        """Names this run of the server."""
        self._envs: dict[str, Env] = {}
        self._by_create_id: dict[tuple[str, str], Env] = {}
        self._fates: dict[str, str] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.draining = False

    # -- life of the service

    async def start(self) -> dict[str, int]:
        """Recover what an earlier run left, then keep order. Returns counts of what was found."""
        found = await self._recover()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return found

    async def _recover(self) -> dict[str, int]:
        entries, broken = self._ledger.read()
        for name in broken:
            self._ledger.remove(name)
        list_boxes = getattr(self._host, "boxes", None)
        boxes: dict[str, str] = {box["create_id"]: box["id"] for box in await list_boxes()} if list_boxes is not None else {}
        found = {"recovered": 0, "lost": 0, "orphans": 0}
        for entry in entries:
            if boxes.pop(PREFIX + entry.id, None) is None or entry.why_over(time.monotonic()):
                found["lost"] += 1
                self._forget(entry.id, "it was lost while the server was down")
                continue
            env = self._register(entry)
            try:
                async with self.admission.start(env.need_bytes, 60.0):
                    await self._make(env)
                found["recovered"] += 1
            except (InfraError, UserError, OSError) as error:
                found["lost"] += 1
                self._drop(env, f"it could not be taken up again: {error}")
        for create_id, name in boxes.items():
            if create_id.startswith(PREFIX):
                found["orphans"] += 1
                await self._host.remove(name)  # type: ignore[attr-defined]  # a host that lists boxes removes them too
        for what, amount in found.items():
            self.metrics.count("recovery", f"outcome={what}", amount)
        return found

    async def drain(self, wait_s: float) -> None:
        """Take nothing new, give those that live time to end, then end them."""
        self.draining = True
        until = time.monotonic() + wait_s
        while self._envs and time.monotonic() < until:
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End every environment."""
        self.draining = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.gather(*(self._end(env, "the server was stopped") for env in list(self._envs.values())), return_exceptions=True)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _sweep(self) -> None:
        """End environments whose leases are over; keep the others alive in the backend."""
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for env in list(self._envs.values()):
                if env.sandbox is not None and not env.why and (why := env.entry.why_over(now)):
                    self.metrics.count("expired")
                    self._spawn(self._end(env, why))
            if now - renewed >= RENEW_S:
                renewed = now
                for env in list(self._envs.values()):
                    renew = getattr(env.sandbox, "renew", None)
                    if renew is not None and not env.why:
                        self._spawn(self._renew(env, renew))

    async def _renew(self, env: Env, renew: Callable[[float], Awaitable[None]]) -> None:
        try:
            await renew(BACKEND_TTL_S)
        except InfraError as error:
            await self._end(env, f"its sandbox died: {error}")

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- environments

    async def add_image(self, files: Mapping[str, bytes]) -> str:
        return await self._host.add_image(files)

    async def create(self, owner: str, request: Mapping[str, Any]) -> Env:
        """The environment of this create_id, made now or before."""
        create_id = str(request.get("create_id", ""))
        env = self._by_create_id.get((owner, create_id)) if create_id else None
        if env is not None and not env.why:
            if env.entry.image != request["image"]:
                raise UserError(f"create_id {create_id!r} is in use for image {env.entry.image[:12]}, not {str(request['image'])[:12]}")
            self.metrics.count("adopted")
            env.entry.take(ROLLOUT, str(request.get("holder", "")), float(request["ttl_s"]))
        else:
            env = self._new(owner, create_id, request)
        if env.made is not None:  # it is not where it was recovered
            await asyncio.shield(env.made)
        return env

    def _new(self, owner: str, create_id: str, request: Mapping[str, Any]) -> Env:
        if self.draining:
            raise SandboxError("the server is being drained; it takes no new environments")
        limits = wire.limits(request["limits"])
        self._check_limits(limits)
        policy = NetworkPolicy.from_json(request.get("network") or {})
        self._check_network(policy)
        entry = Entry(
            id="e" + secrets.token_hex(6),
            owner=owner,
            create_id=create_id,
            image=str(request["image"]),
            limits=dict(request["limits"]),
            network=policy.to_json() if policy else {},
        )
        entry.take(ROLLOUT, str(request.get("holder", "")), min(float(request["ttl_s"]), self.rules.ttl_s))
        env = self._register(entry)
        env.made = self._spawn(self._admit(env, float(request.get("wait_s", 30.0))))
        env.made.add_done_callback(_seen)
        return env

    def _register(self, entry: Entry) -> Env:
        limits = wire.limits(entry.limits)
        env = Env(entry=entry, need_bytes=limits.memory_bytes + limits.disk_bytes)
        self._envs[entry.id] = env
        if entry.create_id:
            self._by_create_id[entry.owner, entry.create_id] = env
        return env

    async def _admit(self, env: Env, wait_s: float) -> None:
        began = time.monotonic()
        try:
            async with self.admission.start(env.need_bytes, wait_s):
                self._ledger.write(env.entry)
                await self._make(env)
        except BaseException as error:
            self._drop(env, f"it could not be made: {error}")
            raise
        self.metrics.count("created")
        self.metrics.observe("create", time.monotonic() - began)

    async def _make(self, env: Env) -> None:
        entry = env.entry
        network: Any = NetworkPolicy.from_json(entry.network) if entry.network else ()
        env.sandbox = await self._host.create(
            entry.image, limits=wire.limits(entry.limits), network=network, ttl_s=BACKEND_TTL_S, create_id=PREFIX + entry.id
        )

    def _check_limits(self, limits: Limits) -> None:
        for name in Limits.__slots__:
            wanted, most = getattr(limits, name), getattr(self.rules.most, name)
            if wanted > most:
                raise PolicyError(f"{name} = {wanted:g} is more than the {most:g} this service allows")

    def _check_network(self, policy: NetworkPolicy) -> None:
        if policy and not self.rules.network:
            raise PolicyError("this service gives no network to sandboxes; its operator can allow it with --network")
        for rule in policy.allow:
            for variable in rule.inject.values():
                if variable not in self.rules.secrets:
                    raise PolicyError(f"the rule for {rule.host} injects {variable}, which is not among the secrets of this service")
            if (rule.at and rule.at not in self.rules.endpoints) or rule.ca:
                raise PolicyError(f"the rule for {rule.host} names its own place or authority, which this service does not allow")

    def get(self, owner: str, name: str) -> Env:
        env = self._envs.get(name)
        if env is None or env.entry.owner != owner:
            raise NoSuchEnvironment(f"environment {name} is gone: {self._fates.get(name, 'unknown here')}")
        return env

    def owned(self, owner: str) -> list[Env]:
        return [env for env in self._envs.values() if env.entry.owner == owner]

    def lease(self, env: Env, kind: str, holder: str, ttl_s: float) -> None:
        """Take or extend a lease; a time of 0 gives it back."""
        if ttl_s > 0:
            env.entry.take(kind, holder, min(ttl_s, self.rules.ttl_s))
        else:
            env.entry.leases.pop(kind, None)
        self._ledger.write(env.entry)

    def beat(self, owner: str, holder: str, names: list[str]) -> dict[str, str]:
        """Hear of a holder. Returns which of the named environments are gone, and why."""
        gone = {}
        for name in names:
            try:
                self.get(owner, name).entry.beat(holder)
            except NoSuchEnvironment:
                gone[name] = self._fates.get(name, "unknown here")
        return gone

    async def destroy(self, env: Env) -> None:
        await self._end(env, "it was destroyed")

    async def _end(self, env: Env, why: str) -> None:
        if env.why:
            return
        env.why = why
        sandbox = env.sandbox
        if sandbox is None and env.made is not None:
            env.made.cancel()
            await asyncio.wait({env.made})
            sandbox = env.sandbox
        try:
            if sandbox is not None:
                await sandbox.destroy()
        except InfraError as error:
            self.metrics.count("errors", "class=infra")
            why = f"{why}; and {error}"
        if sandbox is not None:
            self.admission.leave(env.need_bytes)
        self._drop(env, why)
        self.metrics.count("destroyed")

    def _drop(self, env: Env, why: str) -> None:
        env.why = env.why or why
        self._envs.pop(env.entry.id, None)
        if self._by_create_id.get((env.entry.owner, env.entry.create_id)) is env:
            del self._by_create_id[env.entry.owner, env.entry.create_id]
        self._forget(env.entry.id, why)

    def _forget(self, name: str, why: str) -> None:
        self._ledger.remove(name)
        self._fates[name] = why
        while len(self._fates) > KEPT_FATES:
            del self._fates[next(iter(self._fates))]

    # -- operations

    def operation(self, env: Env, number: str, request: Mapping[str, Any], epoch: str) -> asyncio.Task[Any]:
        """The run of this number. `epoch` is given by a caller who asks again and does not know whether it was heard before: the run of
        the server that it spoke to then. An unknown number of this very run was never heard, so it may start now."""
        known = env.ops.get(number)
        if known is not None:
            return known
        if (epoch and epoch != self.epoch) or number in env.forgotten:
            raise SandboxError(
                f"the server no longer knows what operation {request.get('op')!r} of {env.entry.id} did, which it may have run before a "
                "restart; it is not run again"
            )
        if env.why or env.sandbox is None:
            raise SandboxError(f"environment {env.entry.id} is gone: {env.why or 'it is still being made'}")
        task = env.ops[number] = self._spawn(self._run(env, str(request["op"]), request.get("args") or {}))
        task.add_done_callback(_seen)
        done = [each for each, other in env.ops.items() if other.done()]
        for each in done[: max(0, len(done) - KEPT_RESULTS)]:
            del env.ops[each]
            env.forgotten.add(each)
        return task

    async def _run(self, env: Env, op: str, args: Mapping[str, Any]) -> Any:
        action = getattr(self, f"_op_{op}", None)
        if action is None:
            raise UserError(f"no operation {op!r}")
        try:
            inspect.signature(action).bind(env, env.sandbox, **args)
        except TypeError as error:
            raise UserError(f"operation {op!r}: {error}") from None
        began = time.monotonic()
        try:
            return await action(env, env.sandbox, **args)
        except InfraError as error:
            self.metrics.count("errors", "class=infra")
            if env.why:
                raise SandboxError(f"environment {env.entry.id} ended during {op}: {env.why}") from error
            raise
        except (OSError, ValueError) as error:
            self.metrics.count("errors", f"class={wire.classify(error, by_agent=op in BY_AGENT).value}")
            raise
        finally:
            self.metrics.observe("op", time.monotonic() - began, f"op={op}")

    async def _op_info(self, box: Env, sandbox: Sandbox, /) -> Any:
        return {**wire.plain(await sandbox.info()), "id": box.entry.id}

    async def _op_exec(self, box: Env, sandbox: Sandbox, /, argv: list[str], **options: Any) -> Any:
        return wire.plain(await sandbox.exec(argv, **options))

    async def _op_call(self, box: Env, sandbox: Sandbox, /, op: str, arguments: dict[str, Any], timeout_s: float) -> Any:
        return await sandbox.call(op, arguments, timeout_s=timeout_s)

    async def _op_read(self, box: Env, sandbox: Sandbox, /, path: str) -> Any:
        return await sandbox.read(path)

    async def _op_write(self, box: Env, sandbox: Sandbox, /, path: str, data: bytes, mode: int) -> None:
        await sandbox.write(path, data, mode=mode)

    async def _op_list(self, box: Env, sandbox: Sandbox, /, path: str) -> Any:
        return wire.plain(await sandbox.list(path))

    async def _op_stat(self, box: Env, sandbox: Sandbox, /, path: str) -> Any:
        return wire.plain(await sandbox.stat(path))

    async def _op_apply_changes(self, box: Env, sandbox: Sandbox, /, changes: list[dict[str, Any]]) -> None:
        await sandbox.apply_changes(wire.changes(changes))

    async def _op_apply_patch(self, box: Env, sandbox: Sandbox, /, patch: str) -> Any:
        return list(await sandbox.apply_patch(patch))

    async def _op_diff(self, box: Env, sandbox: Sandbox, /) -> Any:
        report = getattr(sandbox, "diff_report", None)
        if report is None:
            return {"changes": wire.plain(await sandbox.diff()), "refused": []}
        return wire.plain(await report())

    async def _op_snapshot(self, box: Env, sandbox: Sandbox, /, level: str, require: bool) -> Any:
        return await sandbox.snapshot(Level(level), require=require)

    async def _op_fork(self, box: Env, sandbox: Sandbox, /, n: int, level: str, require: bool, holder: str, ttl_s: float) -> Any:
        """The snapshot is taken once; the children are admitted like any other environment."""
        if not 0 < n <= 1024:
            raise UserError(f"{n} forks")
        image = await sandbox.snapshot(Level(level), require=require)
        request = {"image": image, "limits": box.entry.limits, "network": box.entry.network, "ttl_s": ttl_s, "holder": holder}
        made = await asyncio.gather(*(self.create(box.entry.owner, request) for _ in range(n)), return_exceptions=True)
        failures = [result for result in made if isinstance(result, BaseException)]
        children = [result for result in made if isinstance(result, Env)]
        if failures:
            await asyncio.gather(*(self._end(child, "a sister could not be made") for child in children))
            raise failures[0]
        return [{"id": child.entry.id, "image": image} for child in children]

    async def _op_pause(self, box: Env, sandbox: Sandbox, /) -> None:
        await sandbox.pause()

    async def _op_resume(self, box: Env, sandbox: Sandbox, /) -> None:
        await sandbox.resume()

    async def _op_open_session(self, box: Env, sandbox: Sandbox, /, name: str, cwd: str, env: dict[str, str]) -> Any:
        session = await sandbox.open_session(name, cwd=cwd, env=env)
        box.sessions[session.name] = session
        return session.name

    async def _op_session_run(self, box: Env, sandbox: Sandbox, /, name: str, command: str, timeout_s: float) -> Any:
        return wire.plain(await (await self._session(box, sandbox, name)).run(command, timeout_s=timeout_s))

    async def _op_session_close(self, box: Env, sandbox: Sandbox, /, name: str) -> None:
        await (await self._session(box, sandbox, name)).close()

    async def _session(self, box: Env, sandbox: Sandbox, name: str) -> Session:
        """The session of that name; after a restart the sandbox has it and this process does not."""
        if name not in box.sessions:
            box.sessions[name] = await sandbox.open_session(name)
        return box.sessions[name]

    async def _op_grade(self, box: Env, sandbox: Sandbox, /, bundle: dict[str, Any]) -> Any:
        return wire.plain(await sandbox.grade(wire.bundle(bundle)))

    async def _op_execs(self, box: Env, sandbox: Sandbox, /) -> Any:
        execs = getattr(sandbox, "execs", None)
        return await execs() if execs is not None else []

    async def _op_network_log(self, box: Env, sandbox: Sandbox, /, after: int) -> Any:
        door = getattr(sandbox, "network", None)
        return door.log.lines[after:] if door is not None else []

    async def _op_set_phase(self, box: Env, sandbox: Sandbox, /, phase: str) -> None:
        door = getattr(sandbox, "network", None)
        if door is not None:
            door.set_phase(phase)

    # -- what is known

    def gauges(self) -> dict[str, float]:
        return {
            "live": sum(env.sandbox is not None for env in self._envs.values()),
            "starting": self.admission.starting,
            "queued": self.admission.queued,
            "memory_promised_bytes": self.admission.promised,
            "memory_bytes": self.admission.memory_bytes,
            "operations": sum(not task.done() for env in self._envs.values() for task in env.ops.values()),
            "draining": float(self.draining),
        }

    async def stats(self, owner: str) -> dict[str, float]:
        """Counts in the sense of `SandboxHost.stats`; those that live are the owner's, the others the service's."""
        backend = await self._host.stats()
        return {
            "live": len(self.owned(owner)),
            "orphans": backend.get("orphans", 0),
            "queued": self.admission.queued,
            **{name: self.metrics.total(name) for name in ("created", "destroyed", "expired", "adopted")},
            "infra_errors": self.metrics.total("errors", "class=infra"),
        }


def _seen(task: asyncio.Task[Any]) -> None:
    """An error that nobody comes back for is not one of this process."""
    if not task.cancelled():
        task.exception()
