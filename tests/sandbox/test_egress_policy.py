"""Who may be reached: names, addresses, rules, denials. Everything here is pure."""

from __future__ import annotations

import json
import random
import struct

import pytest

from etude.errors import UserError
from etude.sandbox import http1
from etude.sandbox.egress.index import HTML, JSON, NotAnIndex, Shown
from etude.sandbox.egress.names import NO_SUCH_NAME, Names, answer
from etude.sandbox.egress.policy import Allow, NetworkPolicy, forbidden_address, host_name, matches, mentions
from etude.sandbox.egress.proxy import Denied, authority, server_name
from etude.sandbox.http1 import BadMessage


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("PyPI.org", "pypi.org"),
        ("pypi.org.", "pypi.org"),
        ("pypi.org..", ""),
        ("1.2.3.4", "1.2.3.4"),
        ("0x7f.1", ""),
        ("127.1", ""),
        ("2130706433", ""),
        ("0177.0.0.1", ""),
        ("1.2.3.4.", "1.2.3.4"),
        ("[2A04:4E42:0::223]", "2a04:4e42::223"),
        ("fe80::1%eth0", ""),
        ("a_b.example", "a_b.example"),
        ("exam ple.org", ""),
        ("pypi.org\0.evil.org", ""),
        ("user@pypi.org", ""),
        ("-a.org", ""),
        ("p\u0443pi.org", ""),
        ("a..b", ""),
        ("", ""),
        ("x" * 64 + ".org", ""),
    ],
)
def test_a_host_has_one_spelling_or_none(given, name) -> None:
    assert host_name(given) == name


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "168.63.129.16", "0.0.0.0",
        "255.255.255.255", "224.0.0.1", "198.18.0.1", "192.0.2.1", "::1", "::", "fe80::1", "fd00:ec2::254", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "not an address",
    ],
)  # fmt: skip
def test_addresses_that_lead_inward_are_forbidden(address) -> None:
    assert forbidden_address(address)


@pytest.mark.parametrize("address", ["151.101.0.223", "8.8.8.8", "2a04:4e42::223", "::ffff:8.8.8.8"])
def test_public_addresses_are_not(address) -> None:
    assert forbidden_address(address) == ""


def test_patterns_match_what_they_say() -> None:
    assert matches("*.pythonhosted.org", "files.pythonhosted.org")
    assert not matches("*.pythonhosted.org", "pythonhosted.org")
    assert not matches("*.pythonhosted.org", "evilpythonhosted.org")
    assert not matches("pypi.org", "x.pypi.org")
    assert matches("*", "any.example")
    assert not matches("*", "1.2.3.4"), "an address is allowed by itself alone"
    assert matches("1.2.3.4", "1.2.3.4")


def test_short_rules() -> None:
    policy = NetworkPolicy.of(["build=pypi.org", "agent,grade=*.example:8443", "example.org", "!evil.example"])
    assert policy.allow == (
        Allow(host="pypi.org", phases=("build",)),
        Allow(host="*.example", ports=(8443,), phases=("agent", "grade")),
        Allow(host="example.org"),
    )
    assert policy.deny == ("evil.example",)
    assert policy.ports == (443, 8443)
    assert NetworkPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    assert NetworkPolicy.of(policy) is policy
    assert not NetworkPolicy()
    assert policy.may_name("build", "pypi.org").allowed
    assert not policy.may_name("agent", "pypi.org").allowed
    assert policy.may_connect("agent", "a.example", 8443).allowed
    assert not policy.may_connect("agent", "a.example", 443).allowed
    assert not policy.may_name("agent", "evil.example").allowed


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NetworkPolicy.of(["https://pypi.org"]), "no host"),
        (lambda: NetworkPolicy.of("pypi.org"), "a list"),
        (lambda: NetworkPolicy.of(["biuld=pypi.org"]), "did you mean 'build'"),
        (lambda: NetworkPolicy.of(["pypi.org:70000"]), "no port"),
        (lambda: NetworkPolicy.of(["PyPI.org"]), "no host"),
        (lambda: NetworkPolicy.of(["a.org:3128"]), "finds its proxy"),
        (lambda: NetworkPolicy.of([f"a.org:{p}" for p in range(1, 18)]), "17 ports"),
        (lambda: NetworkPolicy(allow=(Allow(host="a.org", through="tunnel"),)), "way through"),
        (lambda: NetworkPolicy(allow=(Allow(host="a.org", through="pass", inject={"a": "B"}),)), "unread"),
        (lambda: NetworkPolicy(allow=(Allow(host="a.org", through="pass"),), projects=("click",)), "could not be seen"),
        (lambda: NetworkPolicy(allow=(Allow(host="a.org", through="pass"),), before="2026-01-01"), "could not be seen"),
        (lambda: NetworkPolicy(allow=(Allow(host="a.org", at="mirror.local"),)), "an address is needed"),
        (lambda: NetworkPolicy(before="yesterday"), "no date"),
        (lambda: NetworkPolicy(projects=("--",)), "no project name"),
        (lambda: NetworkPolicy(allow=(Allow(host="a.org", serves="pages"),)), "index, files"),
        (lambda: NetworkPolicy.from_json({"alow": []}), "not a network policy"),
    ],
)
def test_a_policy_that_means_nothing_is_refused(make, says) -> None:
    with pytest.raises(UserError, match=says):
        make()


def test_requests_are_judged_by_method_path_and_phase() -> None:
    policy = NetworkPolicy(
        allow=(
            Allow(host="pypi.org", paths=("/simple/*",)),
            Allow(host="git.example", methods=("GET", "POST"), phases=("build",)),
        ),
        deny=("pypi.org/simple/secret*",),
    )

    def why(name: str, method: str, target: str, phase: str = "agent") -> str:
        return policy.may_request(phase, name, 443, method, target).reason

    assert why("pypi.org", "GET", "/simple/six/") == ""
    assert "POST is not among" in why("pypi.org", "POST", "/simple/six/")
    assert "no path pattern" in why("pypi.org", "GET", "/legacy/")
    assert "denied by" in why("pypi.org", "GET", "/simple/secret-thing/")
    assert "denied by" in why("pypi.org", "GET", "/simple/%73ecret-thing/")
    for detour in (
        "//simple//secret-thing/",
        "/simple/./secret-thing/",
        "/simple\\secret-thing/",
        "/Simple/SECRET-thing/",
        "/simple/%2fsecret/",
    ):
        assert "denied by" in why("pypi.org", "GET", detour), detour
    assert "'..'" in why("pypi.org", "GET", "/simple/../legacy/")
    assert "'..'" in why("pypi.org", "GET", "/simple/..\\legacy/")
    assert "'..'" in why("pypi.org", "GET", "/simple/%2e%2e/legacy/")
    assert "'..'" in why("pypi.org", "GET", "/simple/%25252525252e/")
    assert "no rule of phase" in why("git.example", "POST", "/x")
    assert why("git.example", "POST", "/x", "build") == ""
    assert not policy.may_request("agent", "pypi.org", 8443, "GET", "/simple/six/").allowed


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("pypi.org", "/simple/click/"),
        ("pypi.org", "/simple/Click"),
        ("pypi.org", "/pypi/click/json"),
        ("pypi.org", "/pypi/click/8.1.7/json"),
        ("files.pythonhosted.org", "/packages/ab/cd/click-8.1.7-py3-none-any.whl"),
        ("files.pythonhosted.org", "/packages/ab/cd/click-8.1.7.tar.gz"),
        ("files.pythonhosted.org", "/packages/ab/cd/%63lick-8.1.7.tar.gz"),
        ("github.com", "/pallets/click"),
        ("github.com", "/somebody-else/click.git/info/refs?service=git-upload-pack"),
        ("github.com", "/pallets/click/archive/refs/heads/main.zip"),
        ("codeload.github.com", "/pallets/click/zip/main"),
        ("api.github.com", "/search/code?q=click"),
        ("api.github.com", "/search/code?q=def+echo+repo:pallets/click"),
        ("proxy.golang.example", "/%2563lick/"),
        ("click.palletsprojects.com", "/"),
        ("click.readthedocs.io", "/en/stable/"),
        ("pypi.org", "/simple/%ff%fe/"),
    ],
)
def test_a_project_is_recognised_wherever_it_is_mentioned(name, target) -> None:
    assert mentions("click", name, target)


@pytest.mark.parametrize("target", ["/simple/clickhouse/", "/simple/click-log/", "/simple/six/", "/packages/a/click_log-0.4.0.tar.gz", "/"])
def test_other_projects_are_not(target) -> None:
    assert not mentions("click", "pypi.org", target)


def query(name: str, kind: int = 1, group: int = 1) -> bytes:
    labels = b"".join(bytes([len(part)]) + part.encode("latin-1") for part in name.split("."))
    return struct.pack(">HHHHHH", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, group)


def test_the_resolver_tells_made_up_addresses_of_allowed_names() -> None:
    names = Names()

    def resolve(name: str) -> str:
        return names.address(name) if name == "pypi.org" else ""

    response, name, kind = answer(query("PyPI.org"), resolve)
    assert (name, kind, response[:2]) == ("PyPI.org", 1, struct.pack(">H", 77))
    assert response[-4:] == bytes([198, 18, 0, 1])
    assert names.name("198.18.0.1") == "pypi.org"
    assert names.name("198.18.0.2") == "198.18.0.2"
    assert names.address("pypi.org") == "198.18.0.1"
    empty, *_ = answer(query("pypi.org", kind=28), resolve)
    assert (empty[3] & 15, struct.unpack(">H", empty[6:8])[0]) == (0, 0), "no address of version 6, and no error"
    refused, *_ = answer(query("secret-data.evil.example", kind=16), resolve)
    assert refused[3] & 15 == NO_SUCH_NAME


@pytest.mark.parametrize(
    "packet",
    [b"", b"\0" * 11, query("pypi.org")[:-1], query("pypi.org")[:12] + b"\xc0\x0c\0\1\0\1", query("x" * 63)[:40], b"\xff" * 40],
)
def test_a_broken_question_gets_an_error_or_nothing(packet) -> None:
    def resolve(name: str) -> str:
        raise AssertionError(f"{name} was looked up")

    response, _, _ = answer(packet, resolve)
    assert response == b"" or response[3] & 15 != 0


@pytest.mark.parametrize("text", ["user@pypi.org:443", "pypi.org:", "pypi.org:x", "pypi.org:0", "pypi.org:99999", "", ":443", "a b:1"])
def test_an_authority_that_has_two_readings_is_denied(text) -> None:
    with pytest.raises(Denied):
        authority(text)


def test_an_authority_is_split() -> None:
    assert authority("PyPI.org.:443") == ("pypi.org", 443)
    assert authority("[2a04:4e42::223]:8443") == ("2a04:4e42::223", 8443)
    assert authority("pypi.org", 80) == ("pypi.org", 80)


def test_the_name_in_a_tls_greeting() -> None:
    import ssl

    def greeting(name: str | None) -> bytes:
        context = ssl.create_default_context()
        context.check_hostname = False
        out = ssl.MemoryBIO()
        with pytest.raises(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
        return out.read()

    assert server_name(greeting("files.pythonhosted.org")) == "files.pythonhosted.org"
    assert server_name(greeting(None)) == ""
    whole = greeting("pypi.org")
    for size in (6, 20, 60, len(whole) - 8):
        with pytest.raises(Denied):
            server_name(whole[:size])


def test_random_bytes_are_denied_and_break_nothing() -> None:
    dice = random.Random(7)
    for _ in range(2000):
        noise = dice.randbytes(dice.randrange(1, 90))
        hello = b"\x16\x03\x01" + len(noise).to_bytes(2, "big") + b"\x01\x00\x00" + bytes([max(0, len(noise) - 4)]) + noise[4:]
        for read in (server_name, lambda data: http1.parse_request(data + b"\r\n\r\n"), lambda data: answer(data, lambda name: "")):
            try:
                read(hello)
                read(noise)
            except (Denied, BadMessage):
                pass


def test_heads_are_read_strictly() -> None:
    head = http1.parse_request(b"GET /a?b HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nx-a: 2\r\n\r\n")
    assert (head.method, head.target, head.one("host"), head.all("x-a")) == ("GET", "/a?b", "x", ["1", "2"])
    with pytest.raises(BadMessage, match="2 headers"):
        head.one("x-a")
    for raw in (
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: 1\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: 1\nB: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: \0\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"\r\n\r\n",
    ):
        with pytest.raises(BadMessage):
            http1.parse_request(raw)
    for fields in (
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: 5\r\nContent-Length: 5",
        b"Content-Length: +5",
        b"Content-Length: 5, 5",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ):
        with pytest.raises(BadMessage):
            http1.body_length(http1.parse_request(b"POST / HTTP/1.1\r\n" + fields + b"\r\n\r\n"))
    answer = http1.parse_response(b"HTTP/1.1 200\r\nContent-Length: 3\r\n\r\n")
    assert http1.body_length(answer, answers="HEAD") == 0
    assert http1.body_length(answer, answers="GET") == 3


PAGE = {
    "meta": {"api-version": "1.1"},
    "name": "six",
    "versions": ["1.15", "1.16", "1.17"],
    "files": [
        {"filename": "six-1.15.tar.gz", "url": "/files/six-1.15.tar.gz", "hashes": {"sha256": "aa"}, "upload-time": "2020-05-21T15:07:54Z"},
        {
            "filename": "six-1.16-py2.py3-none-any.whl",
            "url": "https://files.example/six-1.16-py2.py3-none-any.whl",
            "hashes": {},
            "upload-time": "2025-12-31T23:59:59.9Z",
            "requires-python": ">=2.7",
        },
        {
            "filename": "six-1.17.tar.gz",
            "url": "https://files.example/six-1.17.tar.gz",
            "hashes": {},
            "upload-time": "2026-01-01T00:00:00Z",
        },
        {"filename": "six-1.14.tar.gz", "url": "https://files.example/six-1.14.tar.gz", "hashes": {}},
    ],
}


def test_an_index_page_shows_only_what_is_old_enough() -> None:
    shown = Shown(NetworkPolicy(before="2026-01-01").limit())
    url = "https://pypi.example/simple/six/"
    page, kind, dropped = shown.page(json.dumps(PAGE).encode(), url, JSON)
    assert (kind, dropped) == (JSON, 2)
    assert [f["filename"] for f in json.loads(page)["files"]] == ["six-1.15.tar.gz", "six-1.16-py2.py3-none-any.whl"]
    assert json.loads(page)["versions"] == ["1.15", "1.16"]
    assert shown.has("pypi.example", "/files/six-1.15.tar.gz")
    assert shown.has("files.example", "/six-1.16-py2.py3-none-any.whl.metadata")
    assert not shown.has("files.example", "/six-1.17.tar.gz")
    assert not shown.has("files.example", "/six-1.14.tar.gz"), "a file without a date is not known to be old"
    page, kind, _ = shown.page(json.dumps(PAGE).encode(), url, "text/html")
    assert kind == HTML
    assert b'href="https://pypi.example/files/six-1.15.tar.gz#sha256=aa"' in page
    assert b'data-requires-python="&gt;=2.7"' in page
    assert b"1.17" not in page
    for broken in (b"<html>", b"[]", b'{"files": 3}', b'{"files": [{"filename": "x", "url": "y", "upload-time": "soon"}]}'):
        with pytest.raises(NotAnIndex):
            shown.page(broken, url, JSON)
