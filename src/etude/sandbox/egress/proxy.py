"""The host's end of a sandbox's network: takes its connections, judges them, carries out what is allowed, writes down all.

    egress = Egress(policy, log=NetworkLog(path), authority=Authority())
    egress.serve(listeners, "redirect")        # sockets made in the sandbox's network namespace
    egress.serve([unix_socket], "proxy")       # or an ordinary proxy: CONNECT, and plain HTTP by absolute address
    egress.answer_names(udp_socket)

    connection -> who is meant?  (made-up address, CONNECT target, or literal address)
               -> may_connect    -> first bytes: TLS, or not
               -> through="pass":    name in the TLS greeting must be the one meant; then bytes both ways, unread
               -> through="inspect": TLS ends here, under a certificate of the sandbox's own authority
                  -> each request: Host must be the name meant; may_request; headers stripped and injected; sent on

Invariants:
- Whom a connection reaches is decided by the name meant, never by an address from inside: the name is looked up here, all its
  addresses are judged, and the very address that was judged is connected to. A name that changes its
  address between two lookups gains nothing.
- SNI and Host that differ from the name meant are refused, so no request reaches a tenant that no rule names.
- A request goes upstream on a connection of its own: two requests share no state there.
- Everything from inside is bounded: connections, heads, names, log lines, bytes in all, time without a byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from etude.errors import UserError, nearest
from etude.sandbox import http1
from etude.sandbox.egress import names
from etude.sandbox.egress.certificates import Authority
from etude.sandbox.egress.index import JSON, PROJECT_PAGE, NotAnIndex, Shown
from etude.sandbox.egress.policy import (
    AGENT,
    FILES,
    INDEX,
    PASS,
    PHASES,
    Allow,
    NetworkPolicy,
    as_address,
    endpoint,
    forbidden_address,
    host_name,
    matches,
)
from etude.sandbox.egress.record import NetworkLog
from etude.sandbox.http1 import BadMessage, Head
from etude.sandbox.redirect import IP_PKTINFO

MAX_CONNECTIONS = 64
MAX_PAGE = 64 * 2**20
PACKETS, PAUSE_S = 100, 0.1
IDLE_S, GREETING_S, REACH_S = 120.0, 15.0, 20.0
Resolve = Callable[[str], Awaitable[Sequence[str]]]


class Denied(Exception):
    """The policy says no; the text says why."""


class Unreachable(Exception):
    """Allowed, but the server could not be reached or did not speak HTTP."""


async def resolve_on_host(name: str) -> list[str]:
    """All addresses of a name, as the host sees them."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def is_own(address: str) -> bool:
    """Whether an address belongs to this host: only then can a socket be bound to it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


class Egress:
    """One sandbox's way out. Belongs to the event loop it is made in."""

    def __init__(
        self, policy: NetworkPolicy, *, log: NetworkLog, authority: Authority | None = None, resolve: Resolve = resolve_on_host
    ) -> None:
        self.policy, self.log, self.phase = policy, log, AGENT
        self._authority = authority if authority is not None or not policy.inspects else Authority()
        self._resolve, self.names = resolve, names.Names()
        self._shown = Shown(policy.limit()) if policy.before else None
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unread: dict[asyncio.Task[Any], tuple[str, int]] = {}
        self._sockets: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()
        self.carried = 0
        """Bytes in both directions."""

    @property
    def authority_pem(self) -> str:
        return self._authority.pem if self._authority is not None else ""

    def set_phase(self, phase: str) -> None:
        """Judge by the rules of another phase from now on. Open connections are judged again at their next request; those that are
        carried unread end here unless the new phase allows them too."""
        if phase not in PHASES:
            raise UserError(f"unknown phase {phase!r}; {nearest(phase, PHASES)}")
        self.phase = phase
        self.log.write(phase, "phase", True)
        for task, (name, port) in self._unread.items():
            if not self.policy.may_connect(phase, name, port).allowed:
                task.cancel()

    # -- ways in

    def serve(self, listeners: Iterable[socket.socket], kind: str) -> None:
        """Accept on listening sockets until `close`. `kind` is "redirect" or "proxy"."""
        for listener in listeners:
            listener.setblocking(False)
            self._sockets.append(listener)
            self._start(self._accept(listener, kind))

    def answer_names(self, sock: socket.socket) -> None:
        self._read_packets(sock, self._asked)

    def watch_strays(self, sock: socket.socket, protocol: str) -> None:
        """A raw socket of the sandbox's namespace: first packets to ports that nothing listens on are written down."""
        self._read_packets(sock, lambda sock: self._strayed(sock, protocol))

    def _read_packets(self, sock: socket.socket, action: Callable[[socket.socket], None]) -> None:
        """Call `action` for each packet, PACKETS times in PAUSE_S at most: a flood from inside must not occupy this event loop."""
        sock.setblocking(False)
        self._sockets.append(sock)
        left = PACKETS

        def ready() -> None:
            nonlocal left
            action(sock)
            left -= 1
            if left == 0:
                self._loop.remove_reader(sock)
                self._loop.call_later(PAUSE_S, resume)

        def resume() -> None:
            nonlocal left
            left = PACKETS
            if sock.fileno() >= 0:
                self._loop.add_reader(sock, ready)

        self._loop.add_reader(sock, ready)

    async def close(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self.log.close()

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, kind: str) -> None:
        while True:
            await self._room.acquire()
            try:
                sock, _ = await self._loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those that wait are taken up when some were given back
                self._room.release()
                if listener.fileno() < 0:
                    return
                self.log.write(self.phase, "connect", False, reason=f"not accepted: {error}")
                await asyncio.sleep(0.2)
                continue
            sock.setblocking(False)
            self._start(self._hold(sock, kind))

    async def _hold(self, sock: socket.socket, kind: str) -> None:
        """One connection, from its acceptance to its end. Whatever goes wrong with it ends it and nothing else."""
        try:
            await (self._redirected(sock) if kind == "redirect" else self._proxied(sock))
        except (OSError, TimeoutError, BadMessage, Denied, Unreachable, asyncio.IncompleteReadError) as error:
            if isinstance(error, (BadMessage, Denied)):
                self.log.write(self.phase, "connect", False, reason=str(error))
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # refused, and not ended in peace
        finally:
            with contextlib.suppress(OSError):
                sock.close()
            self._room.release()

    def _asked(self, sock: socket.socket) -> None:
        """Answer one question to the resolver, from the address that it was sent to."""
        try:
            query, ancillary, _, peer = sock.recvmsg(4096, 256)
        except OSError:
            return
        response, name, kind = names.answer(query, self._address_of)
        if name:
            decision = self.policy.may_name(self.phase, host_name(name))
            self.log.write(self.phase, "name", decision.allowed, host=name, type=kind, reason=decision.reason)
        if response:
            asked_at = [data for level, what, data in ancillary if (level, what) == (socket.IPPROTO_IP, IP_PKTINFO)]
            control = [(socket.IPPROTO_IP, IP_PKTINFO, bytes(4) + data[8:12] + bytes(4)) for data in asked_at]
            with contextlib.suppress(OSError):
                sock.sendmsg([response], control, 0, peer)

    def _address_of(self, name: str) -> str:
        return self.names.address(name) if self.policy.may_name(self.phase, name).allowed else ""

    def _strayed(self, sock: socket.socket, protocol: str) -> None:
        try:
            packet = sock.recv(128)
        except OSError:
            return
        at = (packet[0] & 15) * 4 if packet else 0
        if len(packet) < at + 4:
            return
        port = int.from_bytes(packet[at + 2 : at + 4], "big")
        address = socket.inet_ntoa(packet[16:20])
        self.log.write(
            self.phase, "stray", False, host=self.names.name(address), port=port, protocol=protocol, reason="nothing listens there"
        )

    # -- who is meant

    async def _redirected(self, sock: socket.socket) -> None:
        address, port = sock.getsockname()[:2]
        await self._stream(sock, self.names.name(address), port)

    async def _proxied(self, sock: socket.socket) -> None:
        """A client that knows it talks to a proxy. The head of a CONNECT is taken off; of anything else it is the first request."""
        raw = await peek(sock, lambda data: b"\r\n\r\n" in data, http1.MAX_HEAD)
        if not raw:
            return
        if not raw.startswith(b"CONNECT "):
            await self._requests(sock, "", 0, tls=False)
            return
        size = raw.find(b"\r\n\r\n") + 4
        try:
            if size < 4:
                raise BadMessage("a CONNECT without an end")
            head = http1.parse_request(sock.recv(size))
            name, port = authority(head.target)
            self._may_connect(name, port)
        except (BadMessage, Denied) as error:
            if isinstance(error, BadMessage):
                self.log.write(self.phase, "connect", False, reason=str(error))
            status = (403, "Forbidden") if isinstance(error, Denied) else (400, "Bad Request")
            await self._loop.sock_sendall(sock, http1.response(*status, f"denied: {error}\n".encode(), connection="close"))
            await linger(sock)
            return
        await self._loop.sock_sendall(sock, b"HTTP/1.1 200 Connection established\r\n\r\n")
        await self._stream(sock, name, port, judged=True)

    def _may_connect(self, name: str, port: int) -> Allow:
        decision = self.policy.may_connect(self.phase, name, port)
        self.log.write(self.phase, "connect", decision.allowed, host=name, port=port, reason=decision.reason)
        if decision.rule is None:
            raise Denied(decision.reason)
        return decision.rule

    async def _stream(self, sock: socket.socket, name: str, port: int, *, judged: bool = False) -> None:
        """A connection of which is known who is meant."""
        if judged:
            rule = self.policy.may_connect(self.phase, name, port).rule
            if rule is None:
                raise Denied("the phase has changed")
        else:
            try:
                rule = self._may_connect(name, port)
            except Denied:
                await self._refuse(sock)
                return
        if rule.through == PASS:
            await self._pass(sock, rule, name, port)
            return
        hello = await peek(sock, greeted, 1 << 15)
        if not hello:
            return
        if hello[0] != 0x16:
            await self._requests(sock, name, port, tls=False)
            return
        self._same_name(hello, name)
        assert self._authority is not None
        await self._requests(sock, name, port, tls=True, context=self._authority.context(name))

    async def _refuse(self, sock: socket.socket) -> None:
        """A program that speaks plain HTTP is told why; every other one sees its connection reset."""
        with contextlib.suppress(TimeoutError, OSError):
            first = await peek(sock, lambda data: len(data) >= 4, 16, timeout_s=1.0)
            if first[:4] in (b"GET ", b"HEAD", b"POST", b"PUT "):
                text = f"denied: no network rule of phase {self.phase!r} allows this\n".encode()
                await self._loop.sock_sendall(sock, http1.response(403, "Forbidden", text, connection="close"))
                await linger(sock)
                return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _same_name(self, hello: bytes, name: str) -> None:
        asked = server_name(hello)
        if asked and host_name(asked) != name:
            raise Denied(f"a TLS greeting for {asked[:200]!r} on a connection to {name}")

    # -- unread

    async def _pass(self, sock: socket.socket, rule: Allow, name: str, port: int) -> None:
        addresses, to_port = await self._addresses(rule, name, port)
        upstream = await self._connect(addresses, to_port)
        task = asyncio.current_task()
        assert task is not None
        self._unread[task] = (name, port)
        try:
            down = self._loop.create_task(self._pump(upstream, sock))
            try:
                hello = await peek(sock, greeted, 1 << 15, timeout_s=IDLE_S)
                if hello[:1] == b"\x16":
                    self._same_name(hello, name)
                await self._pump(sock, upstream)
                await down
            finally:
                down.cancel()
                await asyncio.gather(down, return_exceptions=True)
        finally:
            del self._unread[task]
            upstream.close()

    async def _pump(self, source: socket.socket, target: socket.socket) -> None:
        while True:
            async with asyncio.timeout(IDLE_S):
                data = await self._loop.sock_recv(source, http1.PIECE)
                self._count(len(data))
                if not data:
                    break
                await self._loop.sock_sendall(target, data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _count(self, size: int) -> None:
        self.carried += size
        if self.carried > self.policy.max_bytes:
            raise Denied(f"this sandbox has used up its {self.policy.max_bytes} bytes of network")

    # -- where it is

    async def _addresses(self, rule: Allow, name: str, port: int) -> tuple[list[str], int]:
        """The addresses to try and the port, all judged."""
        if rule.at:
            address, to_port = endpoint(rule.at, port)
            return [address], to_port
        if as_address(name) is not None:
            addresses: Sequence[str] = [name]
        else:
            try:
                async with asyncio.timeout(REACH_S):
                    addresses = await self._resolve(name)
            except (OSError, TimeoutError) as error:
                raise Unreachable(f"{name} cannot be resolved: {error}") from None
        for address in addresses:
            why = forbidden_address(address) or (f"{address} belongs to this host" if is_own(address) else "")
            if why:
                raise Denied(f"{name} leads to a forbidden place: {why}")
        if not addresses:
            raise Unreachable(f"{name} has no address")
        return list(addresses[:4]), port

    async def _connect(self, addresses: Sequence[str], port: int) -> socket.socket:
        failure = ""
        for address in addresses:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                async with asyncio.timeout(REACH_S / len(addresses)):
                    await self._loop.sock_connect(sock, (address, port))
                return sock
            except (OSError, TimeoutError) as error:
                sock.close()
                failure = f"{address} port {port}: {error or 'no answer'}"
            except BaseException:
                sock.close()
                raise
        raise Unreachable(f"cannot reach {failure}")

    # -- requests

    async def _requests(self, sock: socket.socket, name: str, port: int, *, tls: bool, context: ssl.SSLContext | None = None) -> None:
        """Requests of one connection, one after the other. Without a `name` each says by itself whom it is for (a plain proxy)."""
        reader = asyncio.StreamReader(limit=http1.MAX_HEAD)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await self._loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=context, ssl_handshake_timeout=GREETING_S if context else None
            )
        except (ssl.SSLError, ConnectionError, TimeoutError) as error:
            self.log.write(
                self.phase, "connect", False, host=name, port=port, reason=f"no TLS: {error}; does the program trust the authority?"
            )
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            while await self._one_request(reader, writer, name, port, tls):
                pass
        except (BadMessage, Denied) as error:
            self.log.write(self.phase, "request", False, host=name, port=port, reason=str(error))
            with contextlib.suppress(ConnectionError, TimeoutError):
                writer.write(http1.response(400, "Bad Request", f"denied: {error}\n".encode(), connection="close"))
                await _drained(writer)
        finally:
            with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
                writer.close()
                async with asyncio.timeout(5.0):
                    await writer.wait_closed()
            transport.abort()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str, port: int, tls: bool) -> bool:
        """Judge and carry out one request. Returns whether the client may send another."""
        async with asyncio.timeout(IDLE_S):
            raw = await http1.read_head(reader)
        if not raw:
            return False
        self._count(len(raw))
        head = http1.parse_request(raw)
        began = time.monotonic()
        line: dict[str, Any] = {"host": name, "port": port, "method": head.method, "path": head.target, "tls": tls}
        try:
            head, name, port = self._meant(head, name, port, tls)
            line |= {"host": name, "port": port, "path": head.target}
            rule = self._may_request(head, name, port)
            again = await _Exchange(self, rule, head, name, port, tls, line).carry(reader, writer)
        except (Denied, Unreachable) as error:
            denied = isinstance(error, Denied)
            status = (403, "Forbidden") if denied else (502, "Bad Gateway")
            self.log.write(self.phase, "request", not denied, **line, status=status[0], reason=str(error))
            word = "denied" if denied else "failed"
            writer.write(http1.response(*status, f"{word}: {error}\n".encode(), connection="close"))
            await _drained(writer)
            return False
        self.log.write(self.phase, "request", True, **line, seconds=round(time.monotonic() - began, 4))
        return again

    def _meant(self, head: Head, name: str, port: int, tls: bool) -> tuple[Head, str, int]:
        """The request in origin form, and whom it is for. Host, target and connection must agree."""
        if not name:
            parts = urlsplit(head.target)
            if parts.scheme != "http":
                raise Denied(f"a proxy takes http://HOST/PATH, got {head.target[:80]!r}")
            name, port = authority(parts.netloc, 80)
            head = replace(head, target=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        elif not head.target.startswith("/"):
            raise Denied(f"the target {head.target[:80]!r} is not a path")
        given = head.one("host")
        host, host_port = authority(given, 443 if tls else 80) if given else ("", 0)
        redirected = ":" not in given and port not in (80, 443)  # a client that leaves out a port it was told
        if host != name or (host_port != port and not redirected):
            raise Denied(f"Host {given[:200]!r} on a connection to {name} port {port}")
        return head, name, port

    def _may_request(self, head: Head, name: str, port: int) -> Allow:
        decision = self.policy.may_request(self.phase, name, port, head.method, head.target)
        rule = decision.rule
        if rule is None:
            raise Denied(decision.reason)
        path = head.target.partition("?")[0]
        if self._shown is not None and rule.serves == FILES and not self._shown.has(name, path):
            raise Denied(f"no index page of this sandbox showed that file as published before {self.policy.before}")
        if self._shown is not None and rule.serves == INDEX and not PROJECT_PAGE.fullmatch(path):
            raise Denied(f"with a date limit, {name} gives pages of projects (/simple/NAME/) only")
        return rule

    def is_dated_page(self, rule: Allow) -> bool:
        return self._shown is not None and rule.serves == INDEX

    @property
    def shown(self) -> Shown:
        assert self._shown is not None
        return self._shown


class _Exchange:
    """One request that was allowed, and its response."""

    def __init__(self, egress: Egress, rule: Allow, head: Head, name: str, port: int, tls: bool, line: dict[str, Any]) -> None:
        self._egress, self._rule, self._head = egress, rule, head
        self._name, self._port, self._tls, self._line = name, port, tls, line
        self._sent = self._received = 0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        length = http1.body_length(self._head)
        outgoing = self._outgoing()
        if self._egress.is_dated_page(self._rule):
            outgoing = outgoing.without(("accept", "accept-encoding", "if-none-match", "if-modified-since")).plus(accept=JSON)
        up_reader, up_writer = await self._open()
        sending: asyncio.Task[None] | None = None
        try:
            up_writer.write(outgoing.encode())
            if self._head.one("expect").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            sending = asyncio.get_running_loop().create_task(self._send_body(reader, up_writer, length))
            answer = await self._answer(up_reader)
            if self._egress.is_dated_page(self._rule):
                again = await self._give_page(answer, up_reader, writer)
            else:
                again = await self._give(answer, up_reader, writer)
            return again and sending.done() and sending.exception() is None
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            up_writer.transport.abort()
            self._line |= {"sent": self._sent, "received": self._received}

    def _outgoing(self) -> Head:
        """The request as it leaves: connection headers and secrets of the sandbox off, secrets of the host on."""
        head, rule = self._head, self._rule
        listed = {word.strip().lower() for value in head.all("connection") for word in value.split(",")}
        head = head.without(http1.HOP_BY_HOP | listed | {"expect", "host"})
        patterns = [*rule.strip, *(name.lower() for name in rule.inject)]
        stripped = sorted({name for name, _ in head.headers if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)})
        self._line["stripped"] = stripped
        head = replace(head.without(stripped), headers=(("host", self._head.one("host")), *head.without(stripped).headers))
        if rule.inject and not self._tls:
            raise Denied(f"what is injected for {rule.host} goes out under TLS only")
        injected = []
        for header, variable in rule.inject.items():
            if variable not in os.environ:
                raise Unreachable(f"the environment variable {variable} with the {header} for {rule.host} is not set on the host")
            injected.append((header.lower(), os.environ[variable]))
        framing = (("transfer-encoding", "chunked"),) if self._head.all("transfer-encoding") else ()
        return replace(head, headers=(*head.headers, *injected, *framing, ("connection", "close")))

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        addresses, port = await self._egress._addresses(self._rule, self._name, self._port)
        sock = await self._egress._connect(addresses, port)
        context = None
        try:
            if self._tls:
                context = ssl.create_default_context(cafile=self._rule.ca or None)
                context.set_alpn_protocols(["http/1.1"])
            return await asyncio.open_connection(
                sock=sock, limit=http1.MAX_HEAD, ssl=context, server_hostname=self._name if self._tls else None
            )
        except (OSError, ssl.SSLError) as error:
            sock.close()
            raise Unreachable(f"no TLS with {self._name}: {error}") from None

    async def _send_body(self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter, length: int) -> None:
        async for piece in http1.pieces(reader, length):
            self._egress._count(len(piece))
            self._sent += len(piece)
            up_writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if length == http1.CHUNKED else piece)
            await _drained(up_writer)
        if length == http1.CHUNKED:
            up_writer.write(b"0\r\n\r\n")
        await _drained(up_writer)

    async def _answer(self, up_reader: asyncio.StreamReader) -> Head:
        """The head of the final response."""
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    raw = await http1.read_head(up_reader)
                if not raw:
                    raise Unreachable(f"{self._name} closed the connection without an answer")
                answer = http1.parse_response(raw)
                if answer.status == 101:
                    raise Unreachable(f"{self._name} changed to another protocol")
                if answer.status >= 200:
                    self._line["status"] = answer.status
                    return answer
        except (OSError, BadMessage, TimeoutError) as error:
            raise Unreachable(f"{self._name} gave no HTTP/1.1 answer: {error or 'in time'}") from None

    async def _give(self, answer: Head, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            length = http1.body_length(answer, answers=self._head.method)
        except BadMessage as error:
            raise Unreachable(f"{self._name} gave no HTTP/1.1 answer: {error}") from None
        chunked = length < 0 and self._head.version == "1.1"
        again = self._head.keeps_alive and (length >= 0 or chunked)
        out = answer.without(http1.HOP_BY_HOP)
        out = out.plus(transfer_encoding="chunked") if chunked else out
        writer.write((out if again else out.plus(connection="close")).encode())
        try:
            async for piece in _patient(http1.pieces(up_reader, length)):
                self._egress._count(len(piece))
                self._received += len(piece)
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                await _drained(writer)
        except (OSError, TimeoutError, BadMessage, Denied) as error:  # too late to say so: the client must see a body cut short
            self._line["reason"] = f"cut short: {error}"
            writer.transport.abort()
            return False
        if chunked:
            writer.write(b"0\r\n\r\n")
        await _drained(writer)
        return again

    async def _give_page(self, answer: Head, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """A page of an index without what is too new. Only its redirects are passed on as they are."""
        if answer.status != 200:
            kept = {"location": answer.one("location")} if answer.status in (301, 302, 303, 307, 308) else {}
            writer.write(http1.response(answer.status, answer.reason, b"", **kept))
            await _drained(writer)
            return True
        try:
            body = await http1.read_body(up_reader, http1.body_length(answer, answers=self._head.method), MAX_PAGE)
            self._egress._count(len(body))
            self._received += len(body)
            url = f"{'https' if self._tls else 'http'}://{self._head.one('host')}{self._head.target}"
            page, kind, dropped = self._egress.shown.page(body, url, self._head.one("accept"))
        except (BadMessage, NotAnIndex) as error:
            raise Unreachable(str(error)) from None
        self._line["left_out"] = dropped
        whole = http1.response(200, "OK", page, kind)
        writer.write(whole if self._head.method != "HEAD" else whole[: len(whole) - len(page)])
        await _drained(writer)
        return True


# ---------------------------------------------------------------------------------------------------
# First bytes


async def peek(sock: socket.socket, enough: Callable[[bytes], bool], most: int, *, timeout_s: float = GREETING_S) -> bytes:
    """What waits in a socket, left there, once it is enough. b"" at the end of the stream."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                data = sock.recv(most, socket.MSG_PEEK)
            except BlockingIOError:
                ready: asyncio.Future[None] = loop.create_future()
                loop.add_reader(sock, _set, ready)
                try:
                    await ready
                finally:
                    loop.remove_reader(sock)
                continue
            if not data or enough(data) or len(data) >= most:
                return data
            await asyncio.sleep(0.005)  # some is there, so the socket counts as readable


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def linger(sock: socket.socket) -> None:
    """Let the peer read what was said before the connection ends: bytes it still sends must not turn the end into a reset."""
    with contextlib.suppress(OSError, TimeoutError):
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(2.0):
            while await asyncio.get_running_loop().sock_recv(sock, 4096):
                pass


def greeted(data: bytes) -> bool:
    """Whether a TLS greeting is whole. Anything else needs one byte to be told from it."""
    return data[:1] != b"\x16" or (len(data) >= 5 and len(data) >= 5 + int.from_bytes(data[3:5], "big"))


def server_name(hello: bytes) -> str:
    """The name in a TLS greeting (RFC 6066); "" where it has none. Denied when it cannot be read."""
    try:
        body = hello[5 : 5 + int.from_bytes(hello[3:5], "big")]
        if body[0] != 1 or len(body) < 4 + int.from_bytes(body[1:4], "big"):
            raise Denied("a TLS greeting in pieces")
        at = 4 + 2 + 32
        at += 1 + body[at]
        at += 2 + int.from_bytes(body[at : at + 2], "big")
        at += 1 + body[at]
        end = at + 2 + int.from_bytes(body[at : at + 2], "big") if at + 2 <= len(body) else at
        at += 2
        while at + 4 <= end:
            kind, size = int.from_bytes(body[at : at + 2], "big"), int.from_bytes(body[at + 2 : at + 4], "big")
            if kind == 0:
                length = int.from_bytes(body[at + 7 : at + 9], "big")
                return body[at + 9 : at + 9 + length].decode("ascii")
            at += 4 + size
    except (IndexError, UnicodeDecodeError):
        raise Denied("a TLS greeting that cannot be read") from None
    return ""


def authority(text: str, default: int = 0) -> tuple[str, int]:
    """HOST[:PORT] as a name and a port. Denied for everything that could be read in two ways."""
    if "@" in text:
        raise Denied(f"a user part in {text[:80]!r}")
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(default)
    name = host_name(host)
    if not name or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise Denied(f"{text[:80]!r} names no host and port")
    return name, int(port)


async def _drained(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(IDLE_S):
        await writer.drain()


async def _patient(pieces: Any) -> Any:
    """Pieces of a body, each within the idle limit."""
    iterator = aiter(pieces)
    while True:
        try:
            async with asyncio.timeout(IDLE_S):
                piece = await anext(iterator)
        except StopAsyncIteration:
            return
        yield piece


__all__ = ["Denied", "Egress", "Unreachable", "authority", "matches", "peek", "resolve_on_host", "server_name"]
