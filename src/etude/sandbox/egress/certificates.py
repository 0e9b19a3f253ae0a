"""The authority that one sandbox trusts: made for it, kept in memory, gone with it.

A root that many sandboxes trusted would let whoever gets its key read the traffic of all; one per sandbox costs 0.1 ms.
The `cryptography` package was chosen over the `openssl` program: no key ever lies in a file of its own making, nothing is
started for a new name, and a certificate takes a fraction of a millisecond in place of a process start.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
import tempfile
from pathlib import Path
from typing import Any

from etude.errors import MissingExtra
from etude.sandbox.egress.policy import as_address

MAX_NAMES = 256
"""Certificates kept at a time; a wildcard rule can be asked for any number of names."""
LIFETIME = datetime.timedelta(days=7)
SLACK = datetime.timedelta(hours=1)
"""Clocks that are behind."""


def need_cryptography() -> Any:
    """The package, or an error that says how to get it or do without."""
    try:
        import cryptography.x509
    except ImportError:
        raise MissingExtra(
            "cryptography", "egress", "reading requests under TLS", "rules with through='pass' carry TLS unread and need nothing"
        ) from None
    return cryptography.x509


class Authority:
    """Issues certificates for names, as TLS contexts of a server."""

    def __init__(self, kept: str = "") -> None:
        """A new one, or with `kept` the one that it was of."""
        x509 = need_cryptography()
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self._x509, self._hash, self._serialization = x509, hashes.SHA256(), serialization
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: dict[str, ssl.SSLContext] = {}
        if kept:
            self._key: Any = serialization.load_pem_private_key(kept.encode(), None)
            self._certificate = x509.load_pem_x509_certificate(kept.encode())
            self._name = self._certificate.subject
            self.pem = self._pem(self._certificate).decode()
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = self._named("etude sandbox authority")
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
            key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        self._certificate = builder.sign(self._key, self._hash)
        self.pem = self._pem(self._certificate).decode()
        """What the sandbox is given to trust."""

    @property
    def kept(self) -> str:
        """Key and certificate, for whoever serves the sandbox after this process. Not for the sandbox."""
        return self._private(self._key).decode() + self.pem

    def _private(self, key: Any) -> bytes:
        s = self._serialization
        return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())

    def _named(self, text: str) -> Any:
        oid = self._x509.oid.NameOID.COMMON_NAME
        return self._x509.Name([self._x509.NameAttribute(oid, text[:64])])

    def _pem(self, certificate: Any) -> bytes:
        return certificate.public_bytes(self._serialization.Encoding.PEM)

    def _builder(self, subject: Any, public_key: Any) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        return (
            self._x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(self._x509.random_serial_number())
            .not_valid_before(now - SLACK)
            .not_valid_after(now + LIFETIME)
            .add_extension(self._x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(self._x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def context(self, name: str) -> ssl.SSLContext:
        """A server's TLS context for `name`. HTTP/1.1 is all it offers, so that every request can be read."""
        if name not in self._contexts:
            while len(self._contexts) >= MAX_NAMES:
                del self._contexts[next(iter(self._contexts))]
            self._contexts[name] = self._issue(name)
        return self._contexts[name]

    def leaf_files(self, name: str, folder: Path) -> None:
        """leaf.pem (key and certificate of `name`) and ca.pem in a folder, for a server of another kind."""
        (folder / "leaf.pem").write_bytes(self._leaf(name))
        (folder / "ca.pem").write_text(self.pem)

    def _leaf(self, name: str) -> bytes:
        x509, address = self._x509, as_address(name)
        alternative = x509.IPAddress(address) if address is not None else x509.DNSName(name)
        certificate = (
            self._builder(self._named(name), self._leaf_key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self._key, self._hash)
        )
        return self._private(self._leaf_key) + self._pem(certificate)

    def _issue(self, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with _unnamed_file(self._leaf(name)) as path:
            context.load_cert_chain(path)
        return context


@contextlib.contextmanager
def _unnamed_file(data: bytes) -> Any:
    """A path to bytes in memory: `load_cert_chain` takes nothing else."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(fd, data)
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.name
