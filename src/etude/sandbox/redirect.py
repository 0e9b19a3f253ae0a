"""The inner side of a sandbox's network: a namespace in which every address leads to sockets that the host holds.

Runs in the fork that becomes a sandbox, before it gives up its capabilities; standard library and `linux` only. The order
of what `ways_out` returns is the protocol with `egress/door.py`: resolver, strays of TCP, strays of UDP, proxy, one
listener a port. The sockets belong to the namespace they were made in, wherever their descriptors go: the host accepts
connections there without entering it, and nothing inside keeps a hold on them.

Why a route and not a firewall rule: redirecting by netfilter needs modules that a machine may not have loaded and that a
user namespace cannot load. A local route for all of IPv4 is one netlink message, works on every kernel, and
getsockname of an accepted connection says where it was going. The price is one listener for each port a policy names;
connections to other ports are refused by the kernel, and seen by the raw sockets.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from typing import Any

from etude.sandbox import linux

CERTIFICATES, NAME_SERVICE = "/etc/ssl/certs", "/etc/nsswitch.conf"
IP_PKTINFO, SO_ATTACH_FILTER = 8, 26
_LD, _LD_BYTE_X, _LD_HALF_X, _LDX_HEADER, _SHIFT, _AND, _JEQ, _RET = 0x20, 0x50, 0x48, 0xB1, 0x74, 0x54, 0x15, 0x06


def ways_out(network: dict[str, Any]) -> list[socket.socket]:
    """Make every IPv4 address lead here, and open what the host will serve. Version 6 keeps only its loopback."""
    route_everything_here()
    ports = network["ports"]
    resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    resolver.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
    resolver.bind(("0.0.0.0", 53))
    strays = [_raw(socket.IPPROTO_TCP, _first_packets(ports)), _raw(socket.IPPROTO_UDP, _stray_datagrams())]
    return [resolver, *strays, _listener("127.0.0.1", network["proxy"]), *(_listener("0.0.0.0", port) for port in ports)]


def trust(authority: str) -> None:
    """Files of a sandbox with a network: the authority that signs what the host's proxy shows, and a resolver to ask (127.0.0.1)."""
    with open(f"{CERTIFICATES}/ca-certificates.crt", "rb") as file:
        known = file.read()
    linux.mount("trust", CERTIFICATES, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=4m,mode=755")
    sources = b"passwd: files\ngroup: files\nhosts: files dns\n"
    for name, text in (("ca-certificates.crt", known + b"\n" + authority.encode()), ("names", sources)):
        with open(f"{CERTIFICATES}/{name}", "wb") as file:
            file.write(text)
    linux.mount(f"{CERTIFICATES}/names", NAME_SERVICE, flags=linux.MS_BIND)
    os.unlink(f"{CERTIFICATES}/names")
    linux.seal(NAME_SERVICE)
    linux.seal(CERTIFICATES)


def route_everything_here() -> None:
    """`ip route add local 0.0.0.0/0 dev lo`, in one message."""
    rtm_newroute, request_ack_create_exclusive = 24, 0x1 | 0x4 | 0x400 | 0x200
    table_local, boot, scope_host, type_local, rta_oif = 255, 3, 254, 2, 4
    route = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, table_local, boot, scope_host, type_local, 0)
    device = struct.pack("=HHI", 8, rta_oif, socket.if_nametoindex("lo"))
    size = 16 + len(route) + len(device)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as sock:
        sock.send(struct.pack("=IHHII", size, rtm_newroute, request_ack_create_exclusive, 1, 0) + route + device)
        code = -struct.unpack_from("=i", sock.recv(4096), 16)[0]
    if code:
        raise OSError(code, f"route to everything: {os.strerror(code)}")


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    return listener


def _raw(protocol: int, program: bytes) -> socket.socket:
    """A socket that gets copies of the packets that a BPF program takes."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    body = ctypes.create_string_buffer(program, len(program))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(program) // 8, ctypes.addressof(body)))
    return sock


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("HBBI", code, jt, jf, k)


_DROP = _op(_RET, 0)
_OUTWARD = [_op(_LD, 16), _op(_SHIFT, 24), _op(_JEQ, 127, 0, 1), _DROP, _op(_LDX_HEADER, 0)]
"""Drops what is for 127.0.0.0/8 and leaves X at the transport header of the rest."""


def _first_packets(ports: list[int]) -> bytes:
    """The first packet of a TCP connection to a port that nothing listens on."""
    program = [*_OUTWARD, _op(_LD_BYTE_X, 13), _op(_AND, 0x12), _op(_JEQ, 0x02, 1, 0), _DROP, _op(_LD_HALF_X, 2)]
    for port in ports:
        program += [_op(_JEQ, port, 0, 1), _DROP]
    return b"".join([*program, _op(_RET, 128)])


def _stray_datagrams() -> bytes:
    """UDP packets that are neither questions to the resolver nor its answers."""
    program = [*_OUTWARD]
    for offset in (2, 0):
        program += [_op(_LD_HALF_X, offset), _op(_JEQ, 53, 0, 1), _DROP]
    return b"".join([*program, _op(_RET, 128)])
