"""Joins one sandbox of the namespace backend to its egress proxy: what to order from sandboxd, and what to do with its answer.

The proxy is made late, when the sockets are there, and in the event loop that made the sandbox. Without rules a Door is
nothing: no route, no resolver, no task, no package needed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.records import Boundary
from etude.sandbox.egress.certificates import Authority
from etude.sandbox.egress.policy import AGENT, PROXY_PORT, NetworkPolicy
from etude.sandbox.egress.proxy import Egress, Resolve, resolve_on_host
from etude.sandbox.egress.record import NetworkLog

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
TRUST_VARIABLES = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE", "DENO_CERT",
)  # fmt: skip
"""Programs that bring their own list of authorities read one of these. No proxy variable is set: none is needed."""
COVERAGE = (
    "every name asked for, connection and request, and first packets to other ports by TCP and UDP; of what passes unread, where it went"
)
RESOLVER, STRAY_TCP, STRAY_UDP, PROXY, FIRST_PORT = range(5)
"""Order of the descriptors; see `redirect.ways_out`."""


class Door:
    """The network of one sandbox, as its host holds it."""

    def __init__(self, policy: NetworkPolicy, *, resolve: Resolve = resolve_on_host) -> None:
        self.policy, self._resolve = policy, resolve
        self._authority = Authority() if policy.inspects else None
        self._egress: Egress | None = None
        self.log = NetworkLog()

    def order(self) -> dict[str, Any]:
        """Fields of the order to start the sandbox."""
        if not self.policy:
            return {}
        return {
            "network": {
                "ports": list(self.policy.ports),
                "proxy": PROXY_PORT,
                "authority": self._authority.pem if self._authority is not None else "",
            },
            "environment": dict.fromkeys(TRUST_VARIABLES, BUNDLE),
            "keep": self._authority.kept if self._authority is not None else "",
        }

    def open(self, fds: Sequence[int], kept: str, log: Path, boundary: Boundary) -> Boundary:
        """Serve the sockets that came with the answer. `kept` differs from our own authority when the sandbox is older than this door."""
        if not self.policy or len(fds) < FIRST_PORT:
            for fd in fds:
                os.close(fd)
            return boundary
        if kept and self._authority is not None:
            self._authority = Authority(kept)
        self.log = NetworkLog(log)
        sockets = [socket.socket(fileno=fd) for fd in fds]
        self._egress = egress = Egress(self.policy, log=self.log, authority=self._authority, resolve=self._resolve)
        egress.answer_names(sockets[RESOLVER])
        egress.watch_strays(sockets[STRAY_TCP], "tcp")
        egress.watch_strays(sockets[STRAY_UDP], "udp")
        egress.serve(sockets[PROXY:FIRST_PORT], "proxy")
        egress.serve(sockets[FIRST_PORT:], "redirect")
        return boundary.replace(
            network=f"allow-list {self.policy.hash}",
            separates={**boundary.separates, "network": "network namespace in which every IPv4 address leads to the host's proxy"},
            evidence=(*boundary.evidence, "network log"),
            coverage={**boundary.coverage, "network log": COVERAGE},
        )

    @property
    def phase(self) -> str:
        return self._egress.phase if self._egress is not None else AGENT

    def set_phase(self, phase: str) -> None:
        """Go by the rules of another phase: build, agent or grade. Connections that are carried unread are ended."""
        if self._egress is not None:
            self._egress.set_phase(phase)

    async def close(self) -> None:
        if self._egress is not None:
            await self._egress.close()
            self._egress = None
