"""What this machine can enforce, found by doing it: `python -m etude.sandbox.probe [landlock]` prints one JSON object.

Each step of making a sandbox is tried in a process of its own; the first that fails is named with what to do about it.
A device node or a kernel option proves nothing; only the attempt does. Standard library only.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Whether the namespace backend works here."""

    works: bool
    failed_step: str = ""
    error: str = ""
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def explain(self, backend: str = "namespace") -> str:
        if self.works:
            return f"the {backend} backend works on this machine"
        return f"the {backend} backend does not work here: {self.failed_step}: {self.error}. {self.remedy}"


USERNS = (
    "Allow user namespaces: sysctl user.max_user_namespaces=15000; on Debian also kernel.unprivileged_userns_clone=1; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0. In a container, run it with --security-opt seccomp=unconfined"
)
REMEDIES = {
    "platform": "Namespaces are a Linux feature; elsewhere use a Linux machine or a Linux virtual machine",
    "user namespace": USERNS,
    "mount namespace": USERNS,
    "tmpfs": USERNS,
    "proc": "In a container, /proc must not be masked: run it with --security-opt systempaths=unconfined, or --privileged",
    "network namespace": "Allow network namespaces: sysctl user.max_net_namespaces=15000",
    "seccomp": "The kernel needs CONFIG_SECCOMP_FILTER",
    "landlock": "Landlock needs Linux 5.19 or newer with landlock in the lsm= boot option (CONFIG_SECURITY_LANDLOCK)",
}


def probe(timeout_s: float = 30.0) -> Probe:
    """Try everything a sandbox of the namespace backend needs, in a fresh process."""
    return _ask("namespace", timeout_s)


def probe_landlock(timeout_s: float = 30.0) -> Probe:
    """The same for the landlock backend."""
    return _ask("landlock", timeout_s)


def _ask(backend: str, timeout_s: float) -> Probe:
    if not sys.platform.startswith("linux"):
        return Probe(works=False, failed_step="platform", error=f"this is {platform.system()}", remedy=REMEDIES["platform"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "etude.sandbox.probe", backend], capture_output=True, timeout=timeout_s, env=environment
        )
        return Probe(**json.loads(done.stdout))
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return Probe(works=False, failed_step="probe", error=repr(error), remedy="Run python -m etude.sandbox.probe and look at its output")


def _steps() -> list[tuple[str, Callable[[], None]]]:
    from etude.sandbox import base, linux

    uid, gid = base.sandbox_owner()

    def give_up_root() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            linux.prctl(linux.PR_SET_DUMPABLE, 1)

    def user() -> None:
        give_up_root()
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID)
        linux.map_ids(0, uid, gid)

    def proc() -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                linux.mount("proc", "/tmp", "proc")
                code = 0
            except OSError as error:
                code = error.errno or 1
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise OSError(code, os.strerror(code))

    def seccomp() -> None:
        linux.drop_capabilities()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.install_filter()

    return [
        ("user namespace", user),
        ("mount namespace", lambda: linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)),
        ("tmpfs", lambda: linux.mount("probe", "/tmp", "tmpfs", 0, "size=1m")),
        ("proc", proc),
        ("network namespace", lambda: linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)),
        ("seccomp", seccomp),
    ]


def _landlock_steps(facts: dict[str, Any]) -> list[tuple[str, Callable[[], None]]]:
    """Confine this process as a sandbox would be, and see that it is."""
    from etude.sandbox import confined, linux

    folder = tempfile.mkdtemp(prefix="etude-probe-")
    outside = tempfile.mkdtemp(prefix="etude-probe-")
    parent = os.getpid()

    def confine() -> None:
        facts["abi"] = linux.landlock_abi()
        confined.confine([folder], confined.readable())
        with open(f"{folder}/inside", "w") as file:
            file.write("x")

    def refused(what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            return
        raise OSError(f"{what} is possible from inside")

    def files() -> None:
        refused("writing outside", lambda: os.mkdir(f"{outside}/planted"))
        refused("listing another folder", lambda: os.listdir(outside))

    def seccomp() -> None:
        refused("a socket", lambda: socket.socket(socket.AF_UNIX))
        if facts["abi"] >= 6:
            refused("a signal to the outside", lambda: os.kill(parent, 0))

    def in_child(*actions: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            read_end, write_end = os.pipe()
            if os.fork() == 0:
                try:
                    for action in actions:
                        action()
                except Exception as error:  # whatever the trial raises is the answer
                    os.write(write_end, str(error).encode())
                finally:
                    os._exit(0)
            os.close(write_end)
            os.wait()
            said = os.read(read_end, 4096).decode()
            os.close(read_end)
            if said:
                raise OSError(said)

        return run

    def clean() -> None:
        shutil.rmtree(folder)
        shutil.rmtree(outside)

    facts["abi"] = linux.landlock_abi()
    return [("landlock", in_child(confine, files)), ("seccomp", in_child(confine, seccomp)), ("clean-up", clean)]


def _namespace_facts() -> dict[str, Any]:
    from etude.sandbox import linux
    from etude.sandbox.cgroups import Cgroups

    groups = Cgroups(f"probe-{os.getpid()}")
    facts = {
        "kernel": os.uname().release,
        "machine": linux.MACHINE,
        "memory": groups.enforces("memory") or "polling",
        "pids": groups.enforces("pids") or "RLIMIT_NPROC",
        "filter": linux.filter_hash() or "none for this machine",
        "landlock_abi": linux.landlock_abi(),
    }
    groups.close()
    return facts


def main() -> None:
    from etude.sandbox import linux

    landlock = sys.argv[1:] == ["landlock"]
    facts: dict[str, Any] = {} if landlock else _namespace_facts()
    result: dict[str, Any] = {"works": True, "facts": facts}
    for name, step in _landlock_steps(facts) if landlock else _steps():
        try:
            step()
            if name == "tmpfs":
                os.mkdir("/tmp/trial")
                facts["workspace"] = "overlay" if linux.overlay_works("/tmp/trial") else "copied into memory (overlay needs Linux 6.6)"
        except OSError as error:
            result |= {"works": False, "failed_step": name, "error": str(error), "remedy": REMEDIES.get(name, "")}
            break
    print(json.dumps(result))


if __name__ == "__main__":
    main()
