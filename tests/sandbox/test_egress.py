"""The way out of a sandbox: the proxy by itself, then the same policies from inside real sandboxes, against a real server with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import socket
import ssl
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.errors import UserError
from etude.sandbox.client import NamespaceHost
from etude.sandbox.egress import certificates
from etude.sandbox.egress.policy import Allow, NetworkPolicy
from etude.sandbox.egress.proxy import Egress
from etude.sandbox.egress.record import NetworkLog

pytest.importorskip("cryptography")


class Origin:
    """A server with TLS on this host's loopback, which writes down what reaches it. Only rules with at=... lead to it."""

    def __init__(self, folder: Path) -> None:
        authority = certificates.Authority()
        self.ca = str(folder / "origin-ca.pem")
        Path(self.ca).write_text(authority.pem)
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        origin = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                if "chunked" in self.headers.get("transfer-encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(int(self.headers.get("content-length", 0)))
                origin.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                status, headers, data = origin.pages.get(self.path, (200, {}, f"hello from {self.path}".encode()))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "x-no-length" not in headers:
                    self.send_header("content-length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
                self.close_connection = True

            do_GET = do_HEAD = do_POST = answer

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 256  # the default of 5 lets the kernel drop first packets, which come again after seconds

        self.plain = Server(("127.0.0.1", 0), Handler)
        self.tls = Server(("127.0.0.1", 0), Handler)
        self.tls.socket = authority.context("origin.test").wrap_socket(self.tls.socket, server_side=True)
        self.tls.handle_error = lambda *_: None  # type: ignore[method-assign]  # a greeting that is broken off is part of the tests
        self._threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in (self.plain, self.tls)]
        for thread in self._threads:
            thread.start()

    def rule(self, **changes: Any) -> Allow:
        return Allow(**{"host": "origin.test", "at": f"127.0.0.1:{self.tls.server_port}", "ca": self.ca, **changes})

    def plain_rule(self, **changes: Any) -> Allow:
        return Allow(**{"host": "plain.test", "ports": (80,), "at": f"127.0.0.1:{self.plain.server_port}", **changes})

    def close(self) -> None:
        for server, thread in zip((self.plain, self.tls), self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    server = Origin(tmp_path)
    yield server
    server.close()


# ---------------------------------------------------------------------------------------------------
# The proxy by itself, on a unix socket


class Client:
    """What a test says to a proxy on a unix socket, and hears."""

    def __init__(self, egress: Egress, path: str) -> None:
        self.egress, self.path = egress, path

    async def raw(self, data: bytes) -> bytes:
        """Everything the proxy answers until it closes."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
            answer = await reader.read()
        writer.close()
        return answer

    async def connect(self, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        return reader, writer, await reader.readuntil(b"\r\n\r\n")

    async def secure(self, target: str, name: str, data: bytes, *, trust: str = "") -> bytes:
        """CONNECT, TLS with `name`, `data`, and the answer."""
        reader, writer, said = await self.connect(target)
        assert b" 200 " in said, said
        context = ssl.create_default_context()
        context.load_verify_locations(cadata=trust or self.egress.authority_pem)
        await writer.start_tls(context, server_hostname=name)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.egress.log.lines


def converse(policy: NetworkPolicy, folder: Path, scene: Callable[[Client], Any], **options: Any) -> None:
    async def main() -> None:
        path = str(folder / "proxy")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(256)
        egress = Egress(policy, log=NetworkLog(folder / "log.jsonl"), **options)
        egress.serve([listener], "proxy")
        try:
            await asyncio.wait_for(scene(Client(egress, path)), 60)
        finally:
            await egress.close()
        assert [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] == egress.log.lines

    asyncio.run(main())


def get(path: str = "/", host: str = "origin.test", **headers: str) -> bytes:
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{fields}Connection: close\r\n\r\n".encode()


def test_a_request_under_tls_is_read_stripped_and_sent_on(origin, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ORIGIN_KEY", "from the host")
    policy = NetworkPolicy(allow=(origin.rule(inject={"X-Api-Key": "ORIGIN_KEY"}),))

    async def scene(client: Client) -> None:
        request = get("/a?b=c", authorization="Bearer s3cret", Cookie="s3cret", X_Api_Key="s3cret", My_Token="s3cret", X_Fine="kept")
        answer = await client.secure("origin.test:443", "origin.test", request)
        assert answer.endswith(b"hello from /a?b=c")
        assert client.lines[-1]["stripped"] == ["authorization", "cookie", "my-token", "x-api-key"]
        assert client.lines[-1]["path"] == "/a?b=c"

    converse(policy, tmp_path, scene)
    ((method, path, headers, _),) = origin.seen
    assert (method, path) == ("GET", "/a?b=c")
    assert headers["x-api-key"] == "from the host"
    assert headers["x-fine"] == "kept"
    assert "s3cret" not in str(headers)
    assert "s3cret" not in (tmp_path / "log.jsonl").read_text()
    assert "from the host" not in (tmp_path / "log.jsonl").read_text()


def test_what_is_injected_goes_out_under_tls_only_and_must_exist(origin, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    policy = NetworkPolicy(allow=(origin.rule(inject={"x": "NO_SUCH_KEY"}), origin.plain_rule(inject={"x": "HOME"})))

    async def scene(client: Client) -> None:
        assert b"502" in await client.secure("origin.test:443", "origin.test", get())
        assert b"under TLS only" in await client.raw(get("http://plain.test/", "plain.test"))

    converse(policy, tmp_path, scene)
    assert origin.seen == []


def test_denials_say_why(origin, tmp_path) -> None:
    policy = NetworkPolicy(allow=(origin.rule(paths=("/ok*",)), origin.plain_rule()), projects=("click",))

    async def scene(client: Client) -> None:
        for target in ("evil.test:443", "origin.test:22", "169.254.169.254:80", "127.0.0.1:22", "user@origin.test:443", "2130706433:443"):
            _, writer, said = await client.connect(target)
            assert b" 403 " in said, target
            writer.close()
        assert b" 400 " in await client.raw(b"CONNECT origin.test:443\r\n\r\n")
        assert b"mentions the project" in await client.secure("origin.test:443", "origin.test", get("/ok/click-8.1.tar.gz"))
        assert b"no path pattern" in await client.secure("origin.test:443", "origin.test", get("/other"))
        assert b"POST is not among" in await client.secure(
            "origin.test:443", "origin.test", b"POST /ok HTTP/1.1\r\nHost: origin.test\r\nContent-Length: 0\r\n\r\n"
        )
        assert b"Host 'evil.test'" in await client.secure("origin.test:443", "origin.test", get("/ok", "evil.test"))
        assert b"Host 'origin.test:444'" in await client.secure("origin.test:443", "origin.test", get("/ok", "origin.test:444"))
        assert b"is not a path" in await client.secure("origin.test:443", "origin.test", get("https://evil.test/ok"))
        assert b"a length and a transfer coding" in await client.secure(
            "origin.test:443", "origin.test", get("/ok", content_length="4", transfer_encoding="chunked")
        )
        assert b"2 headers 'host'" in await client.secure(
            "origin.test:443", "origin.test", get("/ok", host="origin.test\r\nHost: evil.test")
        )
        assert b"user part" in await client.raw(get("http://plain.test@evil.test/", "plain.test"))
        assert b"Host" in await client.raw(get("http://plain.test/", "evil.test"))
        assert b"takes http://" in await client.raw(get("ftp://plain.test/", "plain.test"))
        assert b"hello" in await client.raw(get("http://plain.test/x", "plain.test"))
        assert all(line["reason"] for line in client.lines if not line["allowed"])

    converse(policy, tmp_path, scene)
    assert [path for _, path, _, _ in origin.seen] == ["/x"]


def test_a_greeting_for_another_name_ends_the_connection(origin, tmp_path) -> None:
    async def scene(client: Client) -> None:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await client.secure("origin.test:443", "evil.test", get())
        assert "greeting for 'evil.test'" in client.lines[-1]["reason"]

    converse(NetworkPolicy(allow=(origin.rule(),)), tmp_path, scene)
    assert origin.seen == []


@pytest.mark.parametrize(
    ("addresses", "says"),
    [
        (["10.0.0.8"], "not a public address"),
        (["8.8.8.8", "127.0.0.1"], "not a public address"),
        (["::ffff:169.254.169.254"], "stands for 169.254.169.254"),
        (["168.63.129.16"], "metadata"),
        ([], "has no address"),
    ],
)
def test_a_name_that_leads_inward_is_not_followed(tmp_path, addresses, says) -> None:
    asked = []

    async def resolve(name: str) -> list[str]:
        asked.append(name)
        return addresses

    async def scene(client: Client) -> None:
        assert says.encode() in await client.raw(get("http://inward.test/", "inward.test"))

    converse(NetworkPolicy(allow=(Allow(host="*.test", ports=(80,)),)), tmp_path, scene, resolve=resolve)
    assert asked == ["inward.test"], "looked up once: the address that was judged is the one connected to"


def test_an_address_of_this_host_is_not_public_to_a_sandbox(tmp_path, origin) -> None:
    from etude.sandbox.egress import proxy

    assert proxy.is_own("127.0.0.1")
    assert not proxy.is_own("8.8.8.8")


def test_bodies_of_every_framing_pass_both_ways(origin, tmp_path) -> None:
    origin.pages["/endless"] = (200, {"x-no-length": "1"}, b"until the end" * 10_000)
    policy = NetworkPolicy(allow=(origin.rule(methods=("GET", "POST", "HEAD")),))
    big = os.urandom(300_000)

    async def scene(client: Client) -> None:
        def post(headers: bytes, body: bytes) -> bytes:
            return b"POST /p HTTP/1.1\r\nHost: origin.test\r\nConnection: close\r\n" + headers + b"\r\n\r\n" + body

        async def ask(data: bytes) -> bytes:
            return await client.secure("origin.test:443", "origin.test", data)

        assert b"hello" in await ask(post(b"Content-Length: %d" % len(big), big))
        chunked = b"%x;ext=1\r\n%b\r\n3\r\nabc\r\n0\r\nTrailer: x\r\n\r\n" % (len(big), big)
        assert b"hello" in await ask(post(b"Transfer-Encoding: chunked", chunked))
        assert (await ask(post(b"Expect: 100-continue\r\nContent-Length: 2", b"hi"))).startswith(
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200"
        )
        endless = await ask(get("/endless"))
        assert b"transfer-encoding: chunked" in endless
        assert endless.endswith(b"0\r\n\r\n")
        assert endless.count(b"until the end") >= 9_990
        old = await ask(b"GET /endless HTTP/1.0\r\nHost: origin.test\r\n\r\n")
        assert old.endswith(b"until the end" * 10_000)
        head = await ask(b"HEAD /x HTTP/1.1\r\nHost: origin.test\r\nConnection: close\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")
        two = await ask(b"GET /1 HTTP/1.1\r\nHost: origin.test\r\n\r\n" + get("/2"))
        assert two.endswith(b"hello from /2")
        assert b"hello from /1" in two

    converse(policy, tmp_path, scene)
    assert [body for method, _, _, body in origin.seen if method == "POST"] == [big, big + b"abc", b"hi"]


def test_a_server_without_the_right_certificate_is_not_spoken_to(origin, tmp_path) -> None:
    policy = NetworkPolicy(allow=(origin.rule(ca=""), origin.rule(host="other.test")))

    async def scene(client: Client) -> None:
        assert b"502" in await client.secure("origin.test:443", "origin.test", get())
        assert b"502" in await client.secure("other.test:443", "other.test", get(host="other.test"))

    converse(policy, tmp_path, scene)
    assert origin.seen == []


def test_passed_through_is_unread_and_ends_with_its_phase(origin, tmp_path) -> None:
    policy = NetworkPolicy(allow=(origin.rule(through="pass", phases=("agent",)),))

    async def scene(client: Client) -> None:
        trust = Path(origin.ca).read_text()
        answer = await client.secure("origin.test:443", "origin.test", get(authorization="mine"), trust=trust)
        assert b"hello" in answer
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await client.secure("origin.test:443", "evil.test", get(), trust=trust)
        reader, writer, said = await client.connect("origin.test:443")
        assert b" 200 " in said
        await asyncio.sleep(0.1)
        client.egress.set_phase("grade")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert b" 403 " in (await client.connect("origin.test:443"))[2]
        with pytest.raises(UserError, match="did you mean 'grade'"):
            client.egress.set_phase("grading")

    converse(policy, tmp_path, scene)
    assert origin.seen[0][2]["authorization"] == "mine"


def test_a_sandbox_has_so_many_bytes(origin, tmp_path) -> None:
    origin.pages["/big"] = (200, {}, b"x" * 200_000)

    async def scene(client: Client) -> None:
        answer = await client.raw(get("http://plain.test/big", "plain.test"))
        assert len(answer) < 110_000
        assert "used up" in client.lines[-1]["reason"]

    converse(NetworkPolicy(allow=(origin.plain_rule(),), max_bytes=100_000), tmp_path, scene)


def test_an_index_shows_and_gives_only_what_was_published_before(origin, tmp_path) -> None:
    files = [
        {"filename": f"six-{v}.tar.gz", "url": f"https://files.test/six-{v}.tar.gz", "hashes": {}, "upload-time": f"{year}-05-05T00:00:00Z"}
        for v, year in (("1.16", 2021), ("1.17", 2026))
    ]
    kind = "application/vnd.pypi.simple.v1+json"
    origin.pages["/simple/six/"] = (200, {"content-type": kind}, json.dumps({"name": "six", "files": files}).encode())
    origin.pages["/simple/Six/"] = (301, {"location": "/simple/six/"}, b"")
    policy = NetworkPolicy(
        allow=(origin.plain_rule(serves="index"), origin.plain_rule(host="files.test", serves="files")), before="2026-01-01"
    )

    async def scene(client: Client) -> None:
        async def ask(url: str) -> bytes:
            return await client.raw(get(url, url.split("/")[2]))

        assert b"no index page" in await ask("http://files.test/six-1.16.tar.gz")
        assert b"location: /simple/six/" in await ask("http://plain.test/simple/Six/")
        page = await ask("http://plain.test/simple/six/")
        assert b"six-1.16.tar.gz" in page
        assert b"six-1.17" not in page
        assert b"hello" in await ask("http://files.test/six-1.16.tar.gz")
        assert b"no index page" in await ask("http://files.test/six-1.17.tar.gz")
        assert b"pages of projects" in await ask("http://plain.test/pypi/six/json")

    converse(policy, tmp_path, scene)
    assert [path for _, path, _, _ in origin.seen] == ["/simple/Six/", "/simple/six/", "/six-1.16.tar.gz"]


def test_more_connections_than_allowed_wait(origin, tmp_path) -> None:
    async def scene(client: Client) -> None:
        answers = await asyncio.gather(*(client.raw(get(f"http://plain.test/{i}", "plain.test")) for i in range(100)))
        assert all(b"hello" in answer for answer in answers)

    converse(NetworkPolicy(allow=(origin.plain_rule(),)), tmp_path, scene)
    assert len(origin.seen) == 100


def test_without_the_package_a_rule_that_reads_says_how_to_go_on(tmp_path) -> None:
    import subprocess
    import sys

    program = """
        import asyncio, sys
        sys.modules["cryptography"] = None
        from etude.errors import MissingExtra
        from etude.sandbox.egress.door import Door
        from etude.sandbox.egress.policy import Allow, NetworkPolicy
        Door(NetworkPolicy())
        Door(NetworkPolicy(allow=(Allow(host="a.org", through="pass"),)))
        try:
            Door(NetworkPolicy.of(["a.org"]))
        except MissingExtra as error:
            print(error)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment, check=True)
    assert "pip install 'etude[egress]'" in done.stdout
    assert "through='pass'" in done.stdout


# ---------------------------------------------------------------------------------------------------
# From inside real sandboxes

FETCH = """
import sys, urllib.request
for url in sys.argv[1:]:
    request = urllib.request.Request(url, headers={"Authorization": "Bearer s3cret"})
    try:
        print(urllib.request.urlopen(request, timeout=20).read().decode())
    except OSError as error:
        print(type(error).__name__, error, getattr(error, "read", bytes)().decode())
"""
RAW = """
import socket, ssl
for target in [("origin.test", 443), ("198.18.0.1", 443)]:  # no proxy variable, no HTTP library, no resolver the second time
    plain = socket.create_connection(target, timeout=20)
    secure = ssl.create_default_context().wrap_socket(plain, server_hostname="origin.test")
    secure.sendall(b"GET /raw HTTP/1.1\\r\\nHost: origin.test\\r\\nConnection: close\\r\\n\\r\\n")
    answer = b""
    while piece := secure.recv(4096):
        answer += piece
    print(answer.decode().splitlines()[-1])
"""
PROBES = """
import errno, os, socket, sys
def attempt(what, action):
    try:
        print("REACHED", what, action())
    except OSError as error:
        print("refused", what, errno.errorcode.get(error.errno, error))
def tcp(host, port):
    with socket.create_connection((host, port), timeout=5) as sock:
        return sock.recv(100) or os.strerror(0)
for host, port in [("127.0.0.1", PORT), ("10.0.0.1", 443), ("169.254.169.254", 80), ("169.254.169.254", 443), ("1.1.1.1", 853),
                   ("::1", PORT), ("2606:4700::1111", 443), ("::ffff:169.254.169.254", 443), ("evil.test", 443)]:
    attempt(f"tcp {host} {port}", lambda: tcp(host, port))
def udp(host, port):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.settimeout(1); sock.connect((host, port)); sock.send(b"x" * 20)
    return sock.recv(100)
attempt("udp", lambda: udp("9.9.9.9", 123))
def abstract():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\\0etude-egress-NAME")
attempt("abstract socket", abstract)
attempt("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
attempt("packet socket", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("port of the proxy", lambda: socket.create_server(("127.0.0.1", 443)))
own = socket.create_server(("127.0.0.1", 0)); socket.create_connection(own.getsockname()).close(); print("own loopback works")
"""


def inside(on_namespace: Any, policy: Any, scene: Callable[[Any, Callable[..., Any]], Any]) -> Any:
    """Run `scene(sandbox, shell)` in a fresh sandbox with this network."""

    async def play(host: NamespaceHost) -> Any:
        files = {"fetch.py": FETCH.encode(), "raw.py": RAW.encode()}
        sandbox = await host.create(await host.add_image(files), network=policy)

        async def shell(command: str) -> str:
            result = await sandbox.exec(["sh", "-c", command], timeout_s=60)
            return result.output.decode()

        result = await scene(sandbox, shell)
        await sandbox.destroy()
        return result

    return on_namespace(play)


def test_programs_that_know_nothing_of_proxies_are_redirected_and_read(on_namespace, origin, monkeypatch) -> None:
    monkeypatch.setenv("ORIGIN_KEY", "from the host")
    policy = NetworkPolicy(allow=(origin.rule(inject={"x-key": "ORIGIN_KEY"}), origin.plain_rule()), projects=("click",))

    async def scene(sandbox: Any, shell: Any) -> None:
        assert "proxy" not in (await shell("env")).lower()
        said = await shell(
            "python fetch.py https://origin.test/tls http://plain.test/plain https://origin.test/simple/click/ https://evil.test/"
        )
        assert "hello from /tls" in said
        assert "hello from /plain" in said
        assert "mentions the project 'click'" in said
        assert "Name or service not known" in said
        assert (await shell("python raw.py")).split("\n")[:2] == ["hello from /raw"] * 2
        if shutil.which("curl"):
            assert "hello from /curl" in await shell("curl -sS https://origin.test/curl")
            assert "hello from /by-proxy" in await shell("curl -sS -x http://127.0.0.1:3128 https://origin.test/by-proxy")
        info = await sandbox.info()
        assert info.boundary.network == f"allow-list {policy.hash}"
        assert "network log" in info.boundary.evidence
        lines = sandbox.network.log.lines
        assert {"name", "connect", "request"} <= {line["kind"] for line in lines}
        assert any(line["kind"] == "name" and line["host"] == "evil.test" and not line["allowed"] for line in lines)

    inside(on_namespace, policy, scene)
    assert "s3cret" not in str(origin.seen)
    assert all(headers.get("x-key") == "from the host" for _, path, headers, _ in origin.seen if path != "/plain")


def test_what_no_rule_names_stays_out_of_reach_with_a_network_too(on_namespace, origin) -> None:
    name = f"{os.getpid()}"
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0etude-egress-{name}")
    abstract.listen(1)
    program = PROBES.replace("PORT", str(origin.plain.server_port)).replace("NAME", name)

    async def scene(sandbox: Any, shell: Any) -> None:
        await sandbox.write("probes.py", program.encode())
        said = await shell("python probes.py")
        assert "REACHED" not in said
        assert said.count("refused") == 14, said
        assert "own loopback works" in said
        strays = [(line["host"], line["port"], line["protocol"]) for line in sandbox.network.log.lines if line["kind"] == "stray"]
        assert ("169.254.169.254", 80, "tcp") in strays
        assert ("1.1.1.1", 853, "tcp") in strays
        assert ("9.9.9.9", 123, "udp") in strays
        denied = {line["host"] for line in sandbox.network.log.lines if line["kind"] == "connect" and not line["allowed"]}
        assert {"10.0.0.1", "169.254.169.254"} <= denied

    try:
        inside(on_namespace, NetworkPolicy(allow=(origin.rule(),)), scene)
    finally:
        abstract.close()
    assert origin.seen == []


def test_each_phase_has_its_own_network(on_namespace, origin) -> None:
    policy = NetworkPolicy(allow=(origin.rule(phases=("build",)), origin.plain_rule(phases=("agent",))))

    async def scene(sandbox: Any, shell: Any) -> None:
        reached = {}
        for phase in ("agent", "build", "grade"):
            if phase != "agent":
                sandbox.network.set_phase(phase)
            said = await shell("python fetch.py https://origin.test/a http://plain.test/b")
            reached[phase] = [word for word in ("/a", "/b") if f"hello from {word}" in said]
        assert reached == {"agent": ["/b"], "build": ["/a"], "grade": []}

    inside(on_namespace, policy, scene)


def test_sandboxes_trust_their_own_authority_only_and_forks_keep_the_network(on_namespace, origin) -> None:
    policy = NetworkPolicy(allow=(origin.rule(),))

    async def scene(host: NamespaceHost) -> None:
        image = await host.add_image({"fetch.py": FETCH.encode()})
        first, second = await host.create(image, network=policy), await host.create(image, network=policy)
        (child,) = await first.fork(1)
        without = await host.create(image)
        bundles = []
        for sandbox in (first, second, child):
            bundles.append((await sandbox.exec(["tail", "-n", "12", "/etc/ssl/certs/ca-certificates.crt"])).output)
            assert b"hello from /x" in (await sandbox.exec(["python", "fetch.py", "https://origin.test/x"])).output
            assert b"PRIVATE" not in (await sandbox.exec(["sh", "-c", "cat /etc/ssl/certs/* /proc/1/environ; env"])).output
            result = await sandbox.exec(["sh", "-c", "echo x > /etc/ssl/certs/ca-certificates.crt; echo x > /etc/nsswitch.conf"])
            assert result.output.count(b"Read-only") == 2
        assert len(set(bundles)) == 3
        said = (await without.exec(["python", "fetch.py", "https://origin.test/x", "https://198.18.0.1/"])).output
        assert b"hello" not in said
        assert (await without.info()).boundary.network == "none"
        for sandbox in (first, second, child, without):
            await sandbox.destroy()

    on_namespace(scene)


def test_an_adopted_sandbox_keeps_its_way_out(daemon, origin) -> None:
    policy = NetworkPolicy(allow=(origin.rule(),))

    async def main() -> None:
        first, second = NamespaceHost(daemon, own_daemon=False), NamespaceHost(daemon, own_daemon=False)
        image = await first.add_image({"fetch.py": FETCH.encode()})
        before = await first.create(image, network=policy, create_id="egress-adopted")
        (await first.link()).close()  # the first host is gone, without a word
        await before.network.close()
        after = await second.create(image, network=policy, create_id="egress-adopted")
        assert after.id == before.id
        assert b"hello from /again" in (await after.exec(["python", "fetch.py", "https://origin.test/again"])).output
        await after.destroy()
        await second.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
def test_the_same_as_an_ordinary_user(as_ordinary_user) -> None:
    """The route, the raw sockets and the ports below 1024 need no privilege outside of the sandbox's own namespace."""
    said = as_ordinary_user("tests/sandbox/test_egress.py", "-k", "redirected or out_of_reach or each_phase")
    if "skipped" in said:
        pytest.skip("that user cannot see the cryptography package")
    assert said.startswith("..."), said
