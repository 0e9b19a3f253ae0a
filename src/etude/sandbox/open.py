"""One door to all backends: `open_host`. It never falls back to a weaker boundary than the one asked for."""

from __future__ import annotations

import os
from pathlib import Path

from etude.errors import UserError, nearest
from etude.protocols import SandboxHost

BACKENDS = ("auto", "namespace", "landlock", "plain", "remote")


def open_host(backend: str = "auto", root: Path | str | None = None, unsafe: bool = False) -> SandboxHost:
    """A host that makes sandboxes on this machine. Blocks for about a second; call it before torch is imported.

    "auto" is the namespace backend where it works, and an error that says what is missing where it does not. With a
    `root` where a sandboxd runs already, that one is used. "landlock" keeps from less (docs/sandboxes.md), and is taken
    only by name. "plain" protects nothing and needs unsafe=True as well. "remote" is the environment service at
    ETUDE_ENV_URL, with the token ETUDE_ENV_TOKEN.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown sandbox backend {backend!r}; {nearest(backend, BACKENDS)}")
    if backend == "plain":
        from etude.sandbox.plain import PlainHost

        return PlainHost(root=root, unsafe=unsafe)
    if backend == "remote":
        from etude.sandbox.service.remote import RemoteHost

        if not os.environ.get("ETUDE_ENV_URL"):
            raise UserError("the remote backend needs ETUDE_ENV_URL (and ETUDE_ENV_TOKEN); `etude env serve` prints both")
        return RemoteHost(os.environ["ETUDE_ENV_URL"])
    if backend == "landlock":
        from etude.sandbox.landlock import LandlockHost

        return LandlockHost(root=root)
    from etude.sandbox.client import NamespaceHost, connect_daemon, start_daemon

    require_namespaces()
    if root is not None and runs(Path(root)):
        return NamespaceHost(connect_daemon(root), own_daemon=False)
    return NamespaceHost(start_daemon(root))


def require_namespaces() -> None:
    """An error that says what is missing, where the namespace backend does not work."""
    from etude.sandbox.probe import probe

    found = probe()
    if not found.works:
        raise UserError(
            f"{found.explain()}. In a container that allows no user namespace, backend='landlock' may work, and keeps from less. "
            "To run without any boundary, for code that you trust, ask for it by name: "
            "backend='plain', unsafe=True (sandbox.backend = \"plain\" and sandbox.unsafe = true in a config)"
        )


def runs(root: Path) -> bool:
    """Whether a sandboxd holds the lock of `root`."""
    from etude.sandbox.daemon import lock

    if not (root / "socket").exists():
        return False
    held = lock(root)
    if held >= 0:
        os.close(held)
    return held < 0
