"""`etude env serve` as a process: lost connections, kill -9, leases, owners, drain, and the commands. The whole behaviour suite runs
over it too (behaviour/, backend "remote")."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from etude.errors import SandboxError, UserError
from etude.protocols import Limits, SandboxHost
from etude.sandbox.client import NamespaceHost, connect_daemon
from etude.sandbox.egress.policy import Allow, NetworkPolicy
from etude.sandbox.open import open_host
from etude.sandbox.service.ledger import GRADE, ROLLOUT
from etude.sandbox.service.remote import RemoteHost
from etude.sandbox.service.wire import PolicyError

ROOT = Path(__file__).resolve().parents[2]
ONCE = ["sh", "-c", "echo ran >> log; sleep 1; cat log"]
"""A command that shows how often it was run."""


class Relay:
    """Stands between client and server, and can cut what passes."""

    def __init__(self, url: str) -> None:
        self._target = url.removeprefix("http://").rsplit(":", 1)
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallow = 0
        """Responses still to be lost on their way back."""
        self.lost = 0

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(self._target[0], int(self._target[1]))
        except ConnectionError:
            writer.transport.abort()
            return
        self._writers |= {writer, up_writer}

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, back: bool) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    if back and self.swallow:
                        self.swallow -= 1
                        self.lost += 1
                        break
                    target.write(data)
                    await target.drain()
            writer.transport.abort()
            up_writer.transport.abort()

        await asyncio.gather(pump(reader, up_writer, False), pump(up_reader, writer, True))
        self._writers -= {writer, up_writer}


def test_a_connection_lost_in_mid_exec_is_adopted_and_not_repeated(served, shop) -> None:
    async def main() -> None:
        async with Relay(served.url) as relay:
            host = RemoteHost(relay.url, served.token)
            sandbox = await host.create(await host.add_image(shop))
            running = asyncio.create_task(sandbox.exec(ONCE))
            for _ in range(3):
                await asyncio.sleep(0.2)
                relay.cut()
            result = await running
            assert (result.code, result.output) == (0, b"ran\n")
            await host.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_answer_that_was_lost_is_given_again(served, shop) -> None:
    async def main() -> None:
        async with Relay(served.url) as relay:
            host = RemoteHost(relay.url, served.token)
            image = await host.add_image(shop)
            relay.swallow = 1
            sandbox = await host.create(image)  # its first answer is lost: the create_id finds the environment that was made
            assert (await host.stats())["live"] == 1
            for i in range(1, 6):
                relay.swallow = 2
                result = await sandbox.exec(["sh", "-c", "echo x >> count; wc -l < count"])
                assert result.output.strip() == str(i).encode()
            assert relay.lost == 11
            await host.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_that_cannot_be_reached_is_an_error_of_the_machine(served) -> None:
    async def main() -> None:
        host = RemoteHost("http://127.0.0.1:9", served.token, patience_s=0.3)
        with pytest.raises(SandboxError, match="was lost during create"):
            await host.create("0" * 64)
        await host.close()
        host = RemoteHost(served.url, "not-the-token")
        with pytest.raises(UserError, match="does not know the token"):
            await host.stats()
        await host.close()

    asyncio.run(main())
    for url in ("127.0.0.1:7711", "ftp://x", "http://"):
        with pytest.raises(UserError, match="no address"):
            RemoteHost(url)


def test_a_cancelled_call_stops_what_it_started(served, shop) -> None:
    async def scene(host: RemoteHost) -> None:
        sandbox = await host.create(await host.add_image(shop))
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "echo $$ > pid; exec sleep 100"]))
        while await sandbox.stat("pid") is None:
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while (await sandbox.exec(["sh", "-c", "kill -0 $(cat pid)"])).code == 0:
            await asyncio.sleep(0.02)

    served.play(scene)


def test_forks_and_grades_are_leased_apart(served, shop) -> None:
    async def scene(host: RemoteHost) -> None:
        sandbox = await host.create(await host.add_image(shop))
        grader = RemoteHost(served.url, served.token)
        held = await grader.attach(sandbox.id, lease=GRADE, ttl_s=100)
        await sandbox.lease(ROLLOUT, 0.0)  # the rollout is over, and the grader goes on
        await asyncio.sleep(0.6)
        assert await held.read("README.md") == b"# shop\n"
        assert (await grader.envs())[0]["leases"] == ["grade"]
        await held.lease(GRADE, 0.0)
        while await grader.envs():
            await asyncio.sleep(0.02)
        with pytest.raises(SandboxError, match="it has no lease"):
            await held.read("README.md")
        await grader.close()

    served.play(scene)


def test_the_operators_rules_are_kept(served, shop) -> None:
    async def scene(host: RemoteHost) -> None:
        image = await host.add_image(shop)
        with pytest.raises(PolicyError, match="pids = 100000 is more than"):
            await host.create(image, limits=Limits(pids=100_000))
        with pytest.raises(PolicyError, match="gives no network"):
            await host.create(image, network=NetworkPolicy(allow=(Allow(host="a.org", through="pass"),)))
        with pytest.raises(PolicyError, match="never be admitted"):
            await host.create(image, limits=Limits(memory_bytes=64 * 2**30, disk_bytes=64 * 2**30))
        sandbox = await host.create(image)
        if "execs" in (await sandbox.info()).boundary.evidence:
            await sandbox.exec(["true", "seen"])
            assert ["true", "seen"] in [entry["argv"] for entry in await sandbox.execs()]
        with pytest.raises(UserError, match="no operation"):
            await sandbox._do("fly")
        with pytest.raises(UserError, match="right fields"):
            await host.ask("POST", "/v1/envs", {"image": 3}, what="nonsense")
        with pytest.raises(UserError, match=r"a body of 7 bytes"):
            await asyncio.wait_for(_raw(served, b"POST", b"/v1/envs", b"garbage"), 20)
        assert (await host.stats())["live"] == 1

    served.play(scene)


async def _raw(served: Any, method: bytes, path: bytes, body: bytes) -> None:
    from etude.sandbox.service.remote import Connections, _understood

    link = Connections(served.url, served.token)
    try:
        _understood(*await link.ask(method.decode(), path.decode(), body, 10.0), served.url)
    finally:
        link.close()


def test_hostile_bytes_do_not_harm_the_server(served) -> None:
    async def main() -> None:
        address, port = served.url.removeprefix("http://").rsplit(":", 1)
        for data in (
            b"\0" * 1000,
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
            b"POST /v1/envs HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            b"POST /v1/envs HTTP/1.1\r\nAuthorization: Bearer x\r\nContent-Length: 4\r\n\r\nabcd",
            b"GET /healthz HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(address, int(port))
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                writer.write_eof()
                answer = await reader.read()
                assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 401"), answer
            writer.close()
        reader, writer = await asyncio.open_connection(address, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"ok\n")
        writer.close()

    asyncio.run(asyncio.wait_for(main(), 60))


# ---------------------------------------------------------------------------------------------------
# Servers of their own


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Any:
    """What conftest.py of this folder offers beside fixtures."""
    return next(each for each in request.config.pluginmanager.get_plugins() if hasattr(each, "ServedElsewhere"))


@pytest.fixture
def serve(machine: Any, tmp_path: Path, shared: Any) -> Iterator[Any]:
    """serve(*options) starts a server on this test's root; the last one is ended and the account must balance."""
    if not machine.works:
        pytest.skip(machine.explain())
    servers = []

    def start(*options: str, **settings: Any) -> Any:
        servers.append(shared.ServedElsewhere(tmp_path / "root", *options, **settings))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end()
    deadline = time.monotonic() + 20
    while (left := shared.leftovers(tmp_path / "root")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_after_kill_9_leases_are_recovered_and_nothing_is_repeated(serve, shop) -> None:
    server = serve()

    async def main() -> None:
        nonlocal server
        async with Relay(server.url) as relay:
            host = RemoteHost(relay.url, server.token, patience_s=60.0)
            image = await host.add_image(shop)
            kept, forgotten = await host.create(image, create_id="kept"), await host.create(image, create_id="forgotten")
            await kept.write("mine.txt", b"before")
            running = asyncio.create_task(kept.exec(["sh", "-c", "echo ran >> log; sleep 30"]))
            while await kept.stat("log") is None:
                await asyncio.sleep(0.05)
            server.process.kill()
            server.process.wait()
            server.process.stdout.close()
            (server.root / "envs" / f"{forgotten.id}.json").unlink()  # as if it had been made and not written down
            server = await asyncio.to_thread(serve)
            assert server.said[1].strip() == "recovered 1, lost 0, orphans removed 1"
            relay._target = server.url.removeprefix("http://").rsplit(":", 1)
            with pytest.raises(SandboxError, match="it is not run again"):
                await running
            assert await kept.read("mine.txt") == b"before"
            assert await kept.read("log") == b"ran\n"
            assert (await kept.exec(["true"])).code == 0
            again = await host.create(image, create_id="kept")
            assert again.id == kept.id
            with pytest.raises(SandboxError, match="is gone"):
                await forgotten.read("README.md")
            assert (await host.stats())["live"] == 1
            await host.close()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert server.end() == 0


@pytest.mark.slow
def test_what_died_while_the_server_was_down_is_reported_as_lost(serve, shop) -> None:
    server = serve()

    async def make(host: RemoteHost) -> str:
        sandbox = await host.create(await host.add_image(shop), create_id="x")
        host.sandboxes.clear()
        return sandbox.id

    name = server.play(make)
    server.process.kill()
    server.process.wait()
    server.process.stdout.close()

    async def stop_sandboxd() -> None:
        host = NamespaceHost(connect_daemon(server.root), own_daemon=False)
        await (await host.link()).request("stop")
        await host.close()

    asyncio.run(stop_sandboxd())
    while (server.root / "socket").exists():
        time.sleep(0.05)
    server = serve()
    assert server.said[1].strip() == "recovered 0, lost 1, orphans removed 0"

    async def look(host: RemoteHost) -> None:
        with pytest.raises(SandboxError, match="lost while the server was down"):
            await host.visit(name).read("README.md")
        fresh = await host.create(await host.add_image(shop), create_id="x")
        assert fresh.id != name

    server.play(look)


@pytest.mark.slow
def test_a_drained_server_takes_nothing_new_and_waits_for_the_old(serve, shop) -> None:
    server = serve("--drain", "60")

    async def scene(host: RemoteHost) -> None:
        image = await host.add_image(shop)
        sandbox = await host.create(image)
        running = asyncio.create_task(sandbox.exec(ONCE))
        await asyncio.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        with pytest.raises(SandboxError, match="being drained"):
            await host.create(image)
        assert (await running).output == b"ran\n"
        assert server.process.poll() is None
        await sandbox.destroy()

    server.play(scene)
    assert server.process.wait(30) == 0
    server.process.stdout.close()


@pytest.mark.slow
def test_owners_do_not_see_each_other(serve, shop, tmp_path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann:ann-0123456789abcdef\nbob:bob-0123456789abcdef\n")
    tokens.chmod(0o600)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "tokens").write_text("unused:")
    server = serve("--tokens", str(tokens))

    async def main() -> None:
        ann, bob = RemoteHost(server.url, "ann-0123456789abcdef"), RemoteHost(server.url, "bob-0123456789abcdef")
        image = await ann.add_image(shop)
        hers, his = await ann.create(image, create_id="same"), await bob.create(image, create_id="same")
        assert hers.id != his.id
        assert [env["id"] for env in await bob.envs()] == [his.id]
        for attempt in (bob.visit(hers.id).read("README.md"), bob.attach(hers.id), bob.visit(hers.id).lease(ROLLOUT, 0.0)):
            with pytest.raises(SandboxError, match="unknown here"):
                await attempt
        await bob.visit(hers.id).destroy()
        assert await hers.read("README.md") == b"# shop\n"
        await ann.close()
        await bob.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
def test_a_server_ends_when_its_sandboxd_does(serve, shop) -> None:
    server = serve()

    async def scene(host: RemoteHost) -> None:
        sandbox = await host.create(await host.add_image(shop))
        direct = NamespaceHost(connect_daemon(server.root), own_daemon=False)
        await (await direct.link()).request("stop")
        await direct.close()
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])

    server.play(scene, patience_s=1.0)
    assert server.process.wait(60) == 1
    server.process.stdout.close()


def test_the_commands(serve, shop, monkeypatch, capfd) -> None:
    from etude.cli import main

    server = serve()
    monkeypatch.setenv("ETUDE_ENV_URL", server.url)
    monkeypatch.setenv("ETUDE_ENV_TOKEN", server.token)

    def said(*words: str, status: int = 0) -> str:
        assert main(["env", *words]) == status
        return capfd.readouterr().out

    def envs(*words: str) -> dict[str, Any]:
        data = json.loads(said(*words, "--json").splitlines()[-1])
        jsonschema.validate(data, json.loads((ROOT / "docs" / "schemas" / "envs.json").read_text()))
        return data

    async def make() -> str:
        host: SandboxHost = open_host("remote")
        assert isinstance(host, RemoteHost)
        sandbox = await host.create(await host.add_image(shop))
        await sandbox.write("more.txt", b"more")
        host.sandboxes.clear()
        await host.close()
        return sandbox.id

    name = asyncio.run(make())
    assert [env["id"] for env in envs("ls")["envs"]] == [name]
    assert name in said("ls")
    assert said("exec", name, "cat more.txt; exit 3", status=3) == "more"
    assert said("exec", name, "kill -9 $$", status=137) == ""
    children = envs("fork", name, "--count", "2")["changed"]
    assert len(children) == 2
    assert said("exec", children[0], "echo child > more.txt; cat README.md") == "# shop\n"
    assert said("exec", name, "cat more.txt") == "more"
    assert main(["env", "exec", "e0", "true"]) == 2
    assert main(["env", "rm", "e0"]) == 2
    assert main(["env", "fork", name, "--level", "L3"]) == 2
    assert envs("rm", name, *children) == {"changed": [name, *children], "envs": []}
    monkeypatch.delenv("ETUDE_ENV_URL")
    assert main(["env", "ls"]) == 2
    assert "which server" in capfd.readouterr().err


def test_tokens_do_not_cross_a_network_in_the_clear(tmp_path, capfd) -> None:
    from etude.cli import main

    assert main(["env", "serve", "--root", str(tmp_path / "r"), "--listen", "0.0.0.0:0"]) == 2
    assert "--tls-cert" in capfd.readouterr().err
    assert main(["env", "serve", "--root", str(tmp_path / "r"), "--listen", "7711"]) == 2


@pytest.mark.slow
def test_a_service_with_tls_and_a_network(serve, shop, tmp_path) -> None:
    pytest.importorskip("cryptography")
    program = """
        import sys
        from pathlib import Path
        from etude.sandbox.egress.certificates import Authority
        authority = Authority()
        authority.leaf_files("127.0.0.1", Path(sys.argv[1]))
    """
    import textwrap

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True, env=environment)
    server = serve("--tls-cert", str(tmp_path / "leaf.pem"), "--network", "--endpoint", "127.0.0.1:1")
    assert server.url.startswith("https://")
    policy = NetworkPolicy(allow=(Allow(host="nobody.test", ports=(80,), at="127.0.0.1:1"),))

    async def scene(host: RemoteHost) -> None:
        image = await host.add_image(shop)
        for rule, says in (
            (Allow(host="a.test", at="10.0.0.1"), "its own place"),
            (Allow(host="a.test", inject={"x": "HOME"}), "not among the secrets"),
        ):
            with pytest.raises(PolicyError, match=says):
                await host.create(image, network=NetworkPolicy(allow=(rule,)))
        sandbox = await host.create(image, network=policy)
        assert (await sandbox.info()).boundary.network == f"allow-list {policy.hash}"
        program = "import urllib.request as u\ntry: u.urlopen('http://nobody.test/')\nexcept OSError as e: print(e)"
        assert b"502" in (await sandbox.exec(["python", "-c", program])).output
        lines = await sandbox.network_log()
        assert any(line["kind"] == "request" and line["host"] == "nobody.test" for line in lines)
        await sandbox.set_phase("grade")
        assert (await sandbox.network_log(len(lines)))[-1]["phase"] == "grade"

    server.play(scene, ca=str(tmp_path / "ca.pem"))


needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="another network namespace needs root and `ip`")


@pytest.mark.slow
@needs_root
def test_a_cable_that_is_pulled_in_mid_exec_costs_nothing(serve, shop, shared) -> None:
    with shared.network_namespace() as (prefix, address, cable):
        server = serve("--insecure", address=f"{address}:0", prefix=prefix)

        async def scene(host: RemoteHost) -> None:
            sandbox = await host.create(await host.add_image(shop))
            running = asyncio.create_task(sandbox.exec(ONCE))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(cable, "down")
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cable, "up")
            assert (await running).output == b"ran\n"

        server.play(scene)
        assert server.end() == 0


@pytest.mark.slow
@needs_root
def test_the_behaviour_suite_passes_over_a_service_in_another_network_namespace(machine) -> None:
    if not machine.works:
        pytest.skip(machine.explain())
    environment = {**os.environ, "ETUDE_TEST_ELSEWHERE": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "pytest", "tests/sandbox/behaviour", "-k", "remote", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
