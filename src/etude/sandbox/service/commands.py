"""`etude env serve | ls | exec | fork | rm`."""

from __future__ import annotations

import asyncio
import contextlib
import json as json_text
import os
import secrets
import select
import signal
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from etude.errors import InfraError, SandboxError, UserError
from etude.records import Level
from etude.sandbox.client import START_TIMEOUT_S, DaemonHandle, NamespaceHost, connect_daemon
from etude.sandbox.open import require_namespaces, runs
from etude.sandbox.service.admission import Capacity
from etude.sandbox.service.core import Rules, Service
from etude.sandbox.service.http import Server
from etude.sandbox.service.remote import RemoteHost

LINGER_S = 120.0
"""How long sandboxd waits for a server that was killed to come back."""
WATCH_S = 5.0
URL, TOKEN = "ETUDE_ENV_URL", "ETUDE_ENV_TOKEN"


def detached_daemon(root: Path) -> DaemonHandle:
    """The sandboxd of `root`, started where none runs. It outlives this process, and ends by itself when nobody comes back."""
    if runs(root):
        return connect_daemon(root)
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "etude.sandbox.daemon", "--root", str(root), "--linger", str(LINGER_S)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONDONTWRITEBYTECODE": "1"}
    with open(root / "daemon.log", "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
        )
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
        process.kill()
    line = process.stdout.readline()
    process.stdout.close()
    said = json_text.loads(line) if line else {"failed": f"it said nothing; see {root / 'daemon.log'}"}
    if "failed" in said:
        process.wait()
        raise SandboxError(f"sandboxd could not start: {said['failed']}; `etude doctor` says what this machine lacks")
    return connect_daemon(root)


def read_tokens(path: Path) -> dict[str, str]:
    """token -> owner, from lines "OWNER:TOKEN". A file that is missing is made, with one token, for its owner's eyes only."""
    if not path.exists():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(f"default:{secrets.token_urlsafe(24)}\n")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise UserError(f"{path} holds tokens and can be read by others; chmod 600 {path}")
    tokens = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        owner, colon, token = line.strip().partition(":")
        if not colon or not owner or len(token) < 16 or not token.isascii():
            raise UserError(f"{path} line {number}: write OWNER:TOKEN, a token of 16 characters or more")
        tokens[token] = owner
    if not tokens:
        raise UserError(f"{path} holds no token; write OWNER:TOKEN lines, or remove it and one is made")
    return tokens


def serve(
    *,
    root: Path,
    listen: str,
    tokens: Path | None,
    memory: float,
    network: bool,
    secret: Sequence[str],
    endpoint: Sequence[str],
    drain: float,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool,
) -> int:
    """Serve until SIGTERM (which drains first) or Ctrl-C."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise UserError(f"--listen {listen!r}: write ADDRESS:PORT")
    context = None
    if tls_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls_cert, tls_key)
    elif host not in ("127.0.0.1", "::1", "localhost") and not insecure:
        raise UserError(f"tokens would cross the network in the clear on {host}: give --tls-cert and --tls-key, or --insecure")
    require_namespaces()
    root = root.absolute()
    handle = detached_daemon(root)
    known = read_tokens(tokens or root / "tokens")
    rules = Rules(network=network, secrets=tuple(secret), endpoints=tuple(endpoint))
    capacity = Capacity(memory_bytes=int(memory * 2**30))
    where = (host, int(port), context)
    return asyncio.run(_serve(NamespaceHost(handle, owner="env serve", own_daemon=False), root, known, capacity, rules, where, drain))


async def _serve(
    host: NamespaceHost,
    root: Path,
    tokens: dict[str, str],
    capacity: Capacity,
    rules: Rules,
    where: tuple[str, int, ssl.SSLContext | None],
    drain_s: float,
) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    draining: list[float] = []

    def begin_drain(wait_s: float) -> None:
        draining.append(wait_s)
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, begin_drain, drain_s)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    service = Service(host, root, capacity=capacity, rules=rules)
    found = await service.start()
    server = Server(service, tokens, on_drain=begin_drain)
    address, port = await server.listen(*where)
    print(f"serving http{'s' if where[2] else ''}://{address}:{port}", flush=True)
    print(f"recovered {found['recovered']}, lost {found['lost']}, orphans removed {found['orphans']}", flush=True)
    watch = loop.create_task(_watch(host, stop))
    await stop.wait()
    status = 1 if watch.done() else 0
    watch.cancel()
    loop.remove_signal_handler(signal.SIGTERM)  # a second one ends this at once
    if draining:
        print(f"draining for at most {draining[-1]:g} s", flush=True)
        await service.drain(draining[-1])
    await service.close()
    await server.close()
    with contextlib.suppress(InfraError):
        await (await host.link()).request("stop")
    await host.close()
    return status


async def _watch(host: NamespaceHost, stop: asyncio.Event) -> None:
    """A server without its sandboxd can do nothing: end, so that whoever supervises it starts both again."""
    while True:
        await asyncio.sleep(WATCH_S)
        try:
            await host.stats()
        except InfraError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            stop.set()
            return


# ---------------------------------------------------------------------------------------------------
# Clients


def _with_host(server: str | None, scene: Callable[[RemoteHost], Coroutine[Any, Any, int]]) -> int:
    url = server or os.environ.get(URL, "")
    if not url:
        raise UserError(f"which server? Give --server http://127.0.0.1:7711 or set {URL} (and {TOKEN})")

    async def main() -> int:
        host = RemoteHost(url, patience_s=10.0)
        try:
            return await scene(host)
        finally:
            host.sandboxes.clear()  # forks live on
            await host.close()

    return asyncio.run(main())


def ls(*, server: str | None, json: bool) -> int:
    """Environments of this token's owner."""

    async def scene(host: RemoteHost) -> int:
        if json:
            return await _say(host, [])
        envs = await host.envs()
        print(f"{'id':<14} {'state':<9} {'leases':<14} {'running':>7}  image")
        for env in envs:
            print(f"{env['id']:<14} {env['state']:<9} {','.join(env['leases']):<14} {env['running']:>7}  {env['image'][:16]}")
        return 0

    return _with_host(server, scene)


def execute(*, server: str | None, env: str, command: str, timeout: float) -> int:
    """Run a shell command in an environment; its output and status become ours."""

    async def scene(host: RemoteHost) -> int:
        result = await (await _visited(host, env)).exec(["sh", "-c", command], timeout_s=timeout)
        sys.stdout.buffer.write(result.output)
        sys.stdout.flush()
        if result.limit or result.dropped_bytes:
            print(f"[limit: {result.limit or 'none'}; {result.dropped_bytes} bytes dropped]", file=sys.stderr)
        return result.code if result.code >= 0 else 128 - result.code

    return _with_host(server, scene)


def fork(*, server: str | None, env: str, count: int, level: str, ttl: float, json: bool) -> int:
    async def scene(host: RemoteHost) -> int:
        host.holder = ""  # nobody beats for them when this command has ended: they go by their time
        parent = await _visited(host, env, ttl)
        children = [child.id for child in await parent.fork(count, Level(level))]  # type: ignore[attr-defined]
        if json:
            return await _say(host, children)
        print("\n".join(children))
        return 0

    return _with_host(server, scene)


def rm(*, server: str | None, envs: Sequence[str], json: bool) -> int:
    async def scene(host: RemoteHost) -> int:
        there = {each["id"] for each in await host.envs()}
        missing = [name for name in envs if name not in there]
        if missing:
            raise UserError(f"no environment {missing[0]!r} on {host.url}; `etude env ls` lists them")
        for name in envs:
            await host.ask("DELETE", f"/v1/envs/{name}", what="destroy")
        if json:
            return await _say(host, list(envs))
        print(f"removed {len(envs)}")
        return 0

    return _with_host(server, scene)


async def _say(host: RemoteHost, changed: list[str]) -> int:
    print(json_text.dumps({"changed": changed, "envs": await host.envs()}))
    return 0


async def _visited(host: RemoteHost, name: str, ttl_s: float = 900.0) -> Any:
    """A handle on an environment without a lease of its own: whoever holds it goes on holding it."""
    if name not in {each["id"] for each in await host.envs()}:
        raise UserError(f"no environment {name!r} on {host.url}; `etude env ls` lists them")
    return host.visit(name, ttl_s)
