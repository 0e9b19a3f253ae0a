"""Who may be reached, in which phase, on which port, with which request. Pure: nothing here opens a socket.

Invariants:
- What no rule allows is denied. A denial that is spelled out wins over every rule that allows.
- A name has one spelling (`host_name`): lower case, no dot at its end, no user part, no number in disguise.
- An address is judged by what it leads to (`forbidden_address`): IPv4 inside of IPv6 is unwrapped first; everything that
  is not a public address is refused, and so are the metadata services that have public ones.
- A denial that cannot be enforced is an error when the policy is made: a project's name cannot be seen in a stream that
  is passed through unread.
"""

from __future__ import annotations

import datetime
import fnmatch
import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import unquote

from etude.errors import UserError, nearest

PHASES = ("build", "agent", "grade")
AGENT = PHASES[1]
"""The phase a sandbox starts in: the one with the least to gain from a mistake."""
INSPECT, PASS = "inspect", "pass"
INDEX, FILES = "index", "files"
MAX_PORTS = 16
"""Each is a listening socket, and its descriptor travels in one message."""
PROXY_PORT = 3128
"""Where a sandbox with a network finds an ordinary proxy, for programs that want one."""
SENSITIVE = (
    "authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "*-api-key", "x-auth-*", "*-token", "*-secret",
    "x-amz-security-token", "x-csrf*",
)  # fmt: skip
"""Headers that never leave a sandbox unless a rule says so: a key that got inside must not get out by a request."""
METADATA = frozenset({"168.63.129.16"})
"""Metadata services at addresses that look public (Azure). Those of the others are link-local, shared or unique-local."""
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True, slots=True)
class Allow:
    """One door. `NetworkPolicy.of` reads the short form `[PHASE[,PHASE]=]HOST[:PORT]`."""

    host: str
    """A name, "*.name" for every name below it, "*" for all, or an address."""
    ports: tuple[int, ...] = (443,)
    phases: tuple[str, ...] = PHASES
    methods: tuple[str, ...] = ("GET", "HEAD")
    """Reading by default: a request with a body is a way out for what is inside."""
    paths: tuple[str, ...] = ("/*",)
    """Patterns of which one must match the path, decoded, without its query."""
    through: str = INSPECT
    """inspect: TLS ends here and requests are judged one by one. pass: bytes are carried unread, after a look at the name."""
    strip: tuple[str, ...] = SENSITIVE
    """Patterns of request headers that are dropped on the way out."""
    inject: Mapping[str, str] = field(default_factory=dict)
    """Header -> name of an environment variable of the host, whose value is set on the way out. The sandbox never has it."""
    at: str = ""
    """"ADDRESS[:PORT]" to connect to in place of what the name resolves to, such as a mirror. The only way to a private address."""
    ca: str = ""
    """PEM file of the authority that signed the server's certificate; the host's own list otherwise."""
    serves: str = ""
    """"index" for a package index, "files" for where its files lie; with `before` only dated files get through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Yes with the rule that says so, or no with the reason."""

    allowed: bool
    reason: str
    rule: Allow | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkPolicy:
    """All rules of one sandbox. Without a rule there is no network, not even a resolver."""

    allow: tuple[Allow, ...] = ()
    deny: tuple[str, ...] = ()
    """Host patterns, or "HOST/PATH" patterns. They win."""
    projects: tuple[str, ...] = ()
    """Names (forks and aliases too) that no request may mention in its host, path or query: they lead to the answer."""
    before: str = ""
    """ISO date. Indexes show, and file hosts give, only what was published before it."""
    max_bytes: int = 4 * 2**30
    """Both directions together."""

    def __post_init__(self) -> None:
        for rule in self.allow:
            _check_rule(rule)
        for pattern in self.deny:
            _check_pattern(pattern.partition("/")[0])
        if self.before:
            self.limit()
        for name in self.projects:
            if not _plain(name):
                raise UserError(f"{name!r} is no project name; letters and digits are needed to recognise it in a request")
        if len(self.ports) > MAX_PORTS:
            raise UserError(f"a policy of {len(self.ports)} ports; at most {MAX_PORTS} can be listened on")
        if PROXY_PORT in self.ports:
            raise UserError(f"port {PROXY_PORT} is where a sandbox finds its proxy; a rule cannot use it")
        unread = [rule.host for rule in self.allow if rule.through == PASS]
        if unread and (self.projects or self.before or any("/" in pattern for pattern in self.deny)):
            raise UserError(
                f"{unread[0]} is passed through unread, so a denied project, path or date could not be seen there; use through='inspect'"
            )

    @classmethod
    def of(cls, network: NetworkPolicy | Iterable[str]) -> NetworkPolicy:
        """A policy as it is, or from short rules: "pypi.org", "build=*.pythonhosted.org:443", "!github.com" (denied)."""
        if isinstance(network, NetworkPolicy):
            return network
        if isinstance(network, str):
            raise UserError(f"a network is a list of rules, not the text {network!r}")
        texts = list(network)
        return cls(
            allow=tuple(_rule(text) for text in texts if not text.startswith("!")), deny=tuple(t[1:] for t in texts if t[0:1] == "!")
        )

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(sorted({port for rule in self.allow for port in rule.ports}))

    @property
    def inspects(self) -> bool:
        return any(rule.through == INSPECT for rule in self.allow)

    @property
    def hash(self) -> str:
        """Names the policy in a boundary record."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:12]

    def __bool__(self) -> bool:
        return bool(self.allow)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NetworkPolicy:
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "allow"}
        rules: list[dict[str, Any]] = [
            {key: tuple(v) if isinstance(v, list) else v for key, v in rule.items()} for rule in data.get("allow", [])
        ]
        try:
            return cls(allow=tuple(Allow(**rule) for rule in rules), **fields)
        except TypeError as error:
            raise UserError(f"not a network policy: {error}") from None

    def limit(self) -> datetime.datetime:
        """`before` as a point in time."""
        try:
            moment = datetime.datetime.fromisoformat(self.before.replace("Z", "+00:00"))
        except ValueError:
            raise UserError(f"{self.before!r} is no date; write it as 2026-01-31") from None
        return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)

    def may_name(self, phase: str, name: str) -> Decision:
        """Whether a name may be asked for at all: some rule of this phase is about it."""
        denied = self._denied(name, "")
        if denied:
            return Decision(allowed=False, reason=denied)
        for rule in self.allow:
            if phase in rule.phases and matches(rule.host, name):
                return Decision(allowed=True, reason="", rule=rule)
        return Decision(allowed=False, reason=self._no_rule(phase, name))

    def may_connect(self, phase: str, name: str, port: int) -> Decision:
        """Whether a connection may be taken. What it says is judged after that."""
        first = self.may_name(phase, name)
        if not first.allowed:
            return first
        for rule in self.allow:
            if phase in rule.phases and matches(rule.host, name) and port in rule.ports:
                return Decision(allowed=True, reason="", rule=rule)
        return Decision(allowed=False, reason=f"no rule of phase {phase!r} allows port {port} of {name}")

    def may_request(self, phase: str, name: str, port: int, method: str, target: str) -> Decision:
        """Whether one request may go out. The most telling reason is given when no rule takes it."""
        reason = self._denied(name, target)
        if reason:
            return Decision(allowed=False, reason=reason)
        path = plain_path(target)
        if path is None or "/../" in f"{path}/":
            return Decision(allowed=False, reason="a path with '..' or a broken escape has no one meaning")
        why = self._no_rule(phase, name)
        for rule in self.allow:
            if phase not in rule.phases or not matches(rule.host, name) or port not in rule.ports or rule.through == PASS:
                continue
            if method not in rule.methods:
                why = f"{method} is not among {', '.join(rule.methods)} for {rule.host}"
            elif not any(fnmatch.fnmatchcase(path, pattern) for pattern in rule.paths):
                why = f"no path pattern of {rule.host} matches"
            else:
                return Decision(allowed=True, reason="", rule=rule)
        return Decision(allowed=False, reason=why)

    def _no_rule(self, phase: str, name: str) -> str:
        return f"no rule of phase {phase!r} allows {name}"

    def _denied(self, name: str, target: str) -> str:
        path = (plain_path(target) or "/").lower()
        for pattern in self.deny:
            host, slash, rest = pattern.partition("/")
            if matches(host, name) and (not slash or (target and fnmatch.fnmatchcase(path, f"/{rest.lower()}"))):
                return f"denied by {pattern!r}"
        for project in self.projects:
            if mentions(project, name, target):
                return f"it mentions the project {project!r}"
        return ""


Network = NetworkPolicy | Sequence[str]
"""What a caller may give as the network of a sandbox."""


def _check_rule(rule: Allow) -> None:
    _check_pattern(rule.host)
    for given, known, what in ((rule.phases, PHASES, "phase"), ((rule.through,), (INSPECT, PASS), "way through")):
        for word in given:
            if word not in known:
                raise UserError(f"unknown {what} {word!r} in the rule for {rule.host}; {nearest(word, known)}")
    if rule.serves not in ("", INDEX, FILES):
        raise UserError(f"the rule for {rule.host} serves {rule.serves!r}; known: index, files")
    for port in rule.ports:
        if not 0 < port < 65536:
            raise UserError(f"{port} is no port (rule for {rule.host})")
    if rule.through == PASS and rule.inject:
        raise UserError(f"nothing can be injected for {rule.host}: it is passed through unread")
    if rule.at:
        endpoint(rule.at, 0)


def _check_pattern(pattern: str) -> None:
    if pattern == "*":
        return
    bare = pattern.removeprefix("*.")
    if host_name(bare) != bare:
        raise UserError(f"{pattern!r} is no host; write a name such as pypi.org or *.pythonhosted.org, or an address")


def _rule(text: str) -> Allow:
    phases, equals, rest = text.rpartition("=")
    host, colon, port = rest.rpartition(":") if re.search(r":[0-9]+$", rest) else (rest, "", "")
    return Allow(
        host=host,
        phases=tuple(phases.split(",")) if equals else PHASES,
        ports=(int(port),) if colon else (443,),
    )


def endpoint(text: str, port: int) -> tuple[str, int]:
    """ "ADDRESS[:PORT]" as a pair."""
    host, colon, own = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    try:
        return str(ipaddress.ip_address(host)), int(own) if colon else port
    except ValueError:
        raise UserError(f"at={text!r}: an address is needed, with a port or without: 10.0.0.7:8443") from None


def host_name(text: str) -> str:
    """The one spelling of a host, or "" for what is none.

    A name of which the last part is a number would be an address to some readers and a name to others (0x7f.1,
    2130706433, 127.1), so only the dotted quad that everybody reads alike is taken.
    """
    text = text.lower()
    text = text[:-1] if text.endswith(".") else text
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    if ":" in text:
        try:
            return ipaddress.IPv6Address(text).compressed if "%" not in text else ""
        except ValueError:
            return ""
    labels = text.split(".")
    if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return ""
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            return ""
    return text


def as_address(name: str) -> Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def matches(pattern: str, name: str) -> bool:
    """ "*.x" matches what lies below x and not x itself; an address is matched by itself alone, not by "*"."""
    if pattern == name:
        return True
    if as_address(name) is not None:
        return False
    return pattern == "*" or (pattern.startswith("*.") and name.endswith(pattern[1:]) and name != pattern[2:])


def decoded(path: str) -> str | None:
    """A path with its escapes undone until nothing changes; None where that never ends or is no text."""
    for _ in range(4):
        try:
            plain = unquote(path, errors="strict")
        except UnicodeDecodeError:
            return None
        if plain == path:
            return path
        path = plain
    return None


def plain_path(target: str) -> str | None:
    """The path of a request as its reader may see it: escapes undone, backslashes and runs of slashes read as one slash, a single dot
    as nothing."""
    path = decoded(target.partition("?")[0])
    if path is None:
        return None
    path = re.sub(r"[/\\]+", "/", path)
    while "/./" in path:
        path = path.replace("/./", "/")
    return path


def _plain(text: str) -> str:
    """A project's name as indexes compare it (PEP 503), without separators at its ends."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def mentions(project: str, name: str, target: str) -> bool:
    """Whether a request is about a project: a part of host, path or query is its name, alone or followed by a version or an ending.

    `click` is mentioned by /simple/click/, /packages/ab/click-8.1.tar.gz, /pallets/click.git and ?q=click, and not by
    /simple/click-log/ or /simple/clickhouse/.
    """
    wanted = _plain(project)
    text = decoded(target)
    if text is None:
        return True
    ending = r"(-(v?[0-9][a-z0-9-]*|git|zip|tar(-[a-z0-9]+)?|tgz|whl|json|rss|xml|html?|main|master|dev|io|readthedocs.*))?"
    pattern = re.compile(re.escape(wanted) + ending)
    parts = [*re.split(r"[/?&=+:@#;,\s]+", text), *name.split(".")]
    return any(pattern.fullmatch(_plain(part)) for part in parts if part)


def forbidden_address(text: str) -> str:
    """Why an address may not be connected to; "" when it may."""
    address = as_address(text)
    if address is None:
        return f"{text!r} is no address"
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in ipaddress.IPv6Network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            why = forbidden_address(str(inner))
            return f"{address} stands for {inner}: {why}" if why else ""
    if str(address) in METADATA:
        return f"{address} is a metadata service"
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_link_local:
        return f"{address} is not a public address"
    return ""
