"""`etude doctor`: what this machine can do, found by doing it, and how to enable the rest.

Every line is a probe that tries the thing: a user namespace is made, an overlay is mounted in it, a seccomp filter is
installed and hit, a Docker socket is asked. A device node or an installed file alone proves nothing (a /dev/kvm under
PVM answers, and still no stock kernel boots on it).

Invariants: standard library only; this process never imports torch and never forks itself. What must happen in a
child runs as a fresh interpreter over this same file (`python -I -S doctor.py userns`), so that a probe cannot leave
its marks here. All slow probes run side by side, each with a deadline; an answer that did not come is said so, and
never taken for a yes.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.metadata
import importlib.util
import json as jsonlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 1.7
"""The whole of `etude doctor` should answer within two seconds; probes still silent then are reported as silent."""
GIB = 2**30


WHOLE_IMPORT_S = 20.0
"""Patience for `import torch` where the quick look at its library failed."""
Answer = tuple[int | None, str, str]
"""(exit status, stdout, stderr) of a child; the status is None when it did not start or did not answer in time."""


class Status(enum.StrEnum):
    OK = "ok"
    PARTIAL = "partial"
    NO = "no"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One line of the report."""

    name: str
    status: Status
    found: str
    """What was seen."""
    enables: str
    """What works when the status is ok."""
    how: str = ""
    """How to get it; empty when there is nothing to do."""
    required: bool = False
    """Nothing works without it: `etude doctor` exits 1."""


def main(*, json: bool = False) -> int:
    """Probe everything and print the report. Exit status 1 when something required is missing."""
    probes = probe_all()
    if json:
        print(jsonlib.dumps(report(probes), sort_keys=True))
    else:
        print(text(probes))
    return 1 if any(p.required and p.status is Status.NO for p in probes) else 0


def report(probes: list[Probe]) -> dict[str, Any]:
    """The object of `--json`; docs/schemas/doctor.json describes it."""
    counts = {status.value: sum(p.status is status for p in probes) for status in Status}
    machine = {"system": platform.system(), "release": platform.release(), "machine": platform.machine(), "cores": os.cpu_count() or 1}
    return {"probes": [asdict(p) for p in probes], "counts": counts, "machine": machine}


def text(probes: list[Probe]) -> str:
    width = max(len(p.name) for p in probes)
    lines = []
    for p in probes:
        lines.append(f"{p.status.value:<7}  {p.name:<{width}}  {p.found}")
        if p.status is not Status.OK:
            lines.append(f"{'':<7}  {'':<{width}}    would give: {p.enables}")
            if p.how:
                lines.append(f"{'':<7}  {'':<{width}}    to enable:  {p.how}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------
# Running probes side by side


class Child:
    """A command started now and read later, so that slow probes overlap."""

    def __init__(self, argv: list[str]) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.start = time.monotonic()
        try:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except OSError as error:
            self.error = str(error)

    def result(self, patience_s: float = DEADLINE_S) -> Answer:
        """What it answered within `patience_s` of its start."""
        if self.process is None:
            return None, "", self.error
        try:
            out, err = self.process.communicate(timeout=max(0.05, self.start + patience_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return None, "", "no answer in time"
        return self.process.returncode, out.strip(), err.strip()


def probe_all() -> list[Probe]:
    """Every probe, in the order of the report."""
    torch_child = Child([sys.executable, "-P", "-c", TORCH_LIBRARY])
    gpu_child = Child(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    kernel = {name: Child([sys.executable, "-I", "-S", __file__, name]) for name in CHILD_PROBES}
    sandboxes = {backend: Child([sys.executable, "-I", "-S", "-c", SANDBOX, backend]) for backend in ("namespace", "landlock")}
    bwrap_child = Child(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"])
    tools = {name: Child([name, "--version"]) for name in ("rg", "git")}
    userns, overlay = kernel["userns"].result(), kernel["overlay"].result()
    return [
        probe_python(),
        probe_torch(torch_child.result()),
        probe_memory(),
        probe_disk(Path.cwd()),
        probe_sandbox("namespace", sandboxes["namespace"].result()),
        probe_sandbox("landlock", sandboxes["landlock"].result()),
        probe_userns(userns),
        probe_overlay(overlay),
        probe_seccomp(kernel["seccomp"].result()),
        probe_landlock(kernel["landlock"].result()),
        probe_cgroups(),
        probe_bwrap(bwrap_child.result()),
        probe_tool(
            "ripgrep",
            tools["rg"].result(),
            "a quick search for commands the agent runs (its `grep` tool needs none)",
            "apt install ripgrep",
        ),
        probe_tool("git", tools["git"].result(), "tasks made from repositories", "apt install git"),
        probe_docker(docker_sockets()),
        probe_kvm(),
        probe_gpu(gpu_child.result()),
        probe_vllm(),
    ]


# ---------------------------------------------------------------------------------------------------
# Python, torch and accelerators

TORCH_LIBRARY = """
import importlib.machinery, sys, types
spec = importlib.machinery.PathFinder.find_spec("torch")
package = types.ModuleType("torch")
package.__path__ = spec.submodule_search_locations
sys.modules["torch"] = package
import torch._C as C
print(C.get_num_threads(), getattr(C, "_cuda_getDeviceCount", int)())
"""
"""Loads torch's compiled library without its Python layer: 0.4 s where `import torch` takes 1.8 s (measured), and a
library that is missing, cut short or built for another Python fails in both."""
TORCH_WHOLE = "import torch; print(torch.get_num_threads(), torch.cuda.device_count())"


def probe_python() -> Probe:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Probe(
        name="python",
        status=Status.OK if fits else Status.NO,
        found=f"{version} ({sys.executable})",
        enables="everything",
        how="" if fits else "install Python 3.11 to 3.13 and name it with ETUDE_PYTHON=/path/to/python",
        required=True,
    )


def cpu_flags() -> set[str]:
    """Feature flags of the first CPU, as the kernel lists them (x86 `flags`, ARM `Features`)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def probe_torch(result: Answer) -> Probe:
    """torch as a fresh process loads it. Where its library does not load by itself, a whole import decides."""
    name, enables = "torch", "training, the native engine"
    how = "pip install 'torch>=2.11,<2.14' (./etude does it)"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Probe(name=name, status=Status.NO, found="not installed", enables=enables, how=how, required=True)
    if result[0] != 0:
        result = Child([sys.executable, "-P", "-c", TORCH_WHOLE]).result(WHOLE_IMPORT_S)
    if result[0] != 0:
        found = f"{version} is installed and does not load: {_why(result)}"
        return Probe(name=name, status=Status.NO, found=found, enables=enables, how=how, required=True)
    threads, devices = result[1].split()
    units = sorted({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"} & cpu_flags())
    bf16 = f"bf16 in hardware ({', '.join(units)})" if units else "bf16 emulated in float32"
    found = f"{version}, {threads} CPU threads, {bf16}" + (f", {devices} CUDA devices" if devices != "0" else "")
    fits = (2, 11) <= tuple(int(part) for part in version.split(".")[:2]) < (2, 14)
    status = Status.OK if fits else Status.PARTIAL
    return Probe(name=name, status=status, found=found, enables=enables, how="" if fits else how, required=True)


def probe_gpu(result: Answer) -> Probe:
    code, out, err = result
    enables = "recipes/smol and larger, CUDA kernels"
    if code != 0 or not out:
        seen = "no NVIDIA GPU" if code is None else f"nvidia-smi failed: {(err or out).splitlines()[-1] if err or out else code}"
        return Probe(name="gpu", status=Status.NO, found=seen, enables=enables, how="a machine with an NVIDIA GPU and its driver")
    found = "; ".join(out.splitlines())
    try:
        build = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        build = ""
    if build.endswith("+cpu"):
        how = "pip install --force-reinstall 'torch>=2.11,<2.14' from an index with CUDA builds (PyPI has them)"
        return Probe(name="gpu", status=Status.PARTIAL, found=f"{found}; but torch {build} is a CPU build", enables=enables, how=how)
    return Probe(name="gpu", status=Status.OK, found=found, enables=enables)


def probe_vllm() -> Probe:
    enables = "vLLM as inference backend for large models"
    if importlib.util.find_spec("vllm") is None:
        return Probe(name="vllm", status=Status.NO, found="not installed", enables=enables, how="pip install vllm (needs a GPU)")
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return Probe(name="vllm", status=Status.OK, found=f"{version} installed", enables=enables)


# ---------------------------------------------------------------------------------------------------
# Space


def memory_bytes() -> tuple[int, int, str]:
    """(available, total, what limits it): the machine's memory, or the cgroup's limit where that is less."""
    fields: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            fields[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total, "machine"
    total, available = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):
            continue
        if limit < total:
            return min(available, limit), limit, "cgroup"
    return available, total, "machine"


def probe_memory() -> Probe:
    available, total, limiter = memory_bytes()
    status = Status.OK if available >= 3 * GIB else Status.PARTIAL if available >= GIB else Status.NO
    return Probe(
        name="memory",
        status=status,
        found=f"{available / GIB:.1f} GiB free of {total / GIB:.1f} GiB ({limiter})",
        enables="`etude demo` with sandboxes side by side (3 GiB)",
        how="" if status is Status.OK else "close other programs, or lower the number of sandboxes in the config",
        required=True,
    )


def probe_disk(folder: Path) -> Probe:
    free = shutil.disk_usage(folder).free
    status = Status.OK if free >= 2 * GIB else Status.PARTIAL if free >= GIB // 2 else Status.NO
    return Probe(
        name="disk",
        status=status,
        found=f"{free / GIB:.1f} GiB free in {folder}",
        enables="run folders with checkpoints and trajectories (2 GiB)",
        how="" if status is Status.OK else "free some space, or work in a folder on a larger disk",
        required=True,
    )


# ---------------------------------------------------------------------------------------------------
# Sandboxes


SANDBOX = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r}); from etude.sandbox.probe import main; main()"
"""Shuts every door that a sandbox of the backend shuts, and looks that they are shut."""


def probe_sandbox(backend: str, result: Answer) -> Probe:
    enables = {
        "namespace": "sandboxes with their own file system, processes and no network, without root",
        "landlock": "sandboxes where no user namespace can be made, as in hardened containers (they keep from less: docs/sandboxes.md)",
    }[backend]
    name = "sandbox" if backend == "namespace" else f"sandbox-{backend}"
    said: dict[str, Any]
    try:
        said = jsonlib.loads(result[1]) if result[0] == 0 else {"works": False, "failed_step": "probe", "error": _why(result), "remedy": ""}
    except ValueError:
        said = {"works": False, "failed_step": "probe", "error": f"it said {result[1][:200]!r}", "remedy": ""}
    if said["works"]:
        return Probe(name=name, status=Status.OK, found=f"backend `{backend}` works here", enables=enables)
    found = f"backend `{backend}` cannot run: {said['failed_step']}: {said['error']}"
    return Probe(name=name, status=Status.NO, found=found, enables=enables, how=said["remedy"] or "see the lines below")


def userns_advice() -> str:
    """Which switch of this kernel forbids user namespaces."""
    switches = (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
    )
    for path, bad, advice in switches:
        try:
            if Path(path).read_text().strip() == bad:
                return advice
        except OSError:
            continue
    if sys.platform != "linux":
        return "needs Linux (a Linux virtual machine, or WSL)"
    return "in a container: docker run --security-opt seccomp=unconfined (or --privileged); else a kernel with CONFIG_USER_NS"


def _why(result: Answer) -> str:
    code, out, err = result
    lines = (err or out).splitlines()
    return lines[-1] if lines else f"exit status {code}"


def probe_userns(result: Answer) -> Probe:
    enables = "namespaces of a sandbox: user, mount, pid, ipc, net"
    if result[0] == 0:
        return Probe(name="userns", status=Status.OK, found=f"created: {result[1]}", enables=enables)
    return Probe(name="userns", status=Status.NO, found=_why(result), enables=enables, how=userns_advice())


def probe_overlay(result: Answer) -> Probe:
    enables = "copy-on-write workspaces: a fork of a file tree in under a millisecond"
    if result[0] == 0:
        return Probe(name="overlayfs", status=Status.OK, found=result[1], enables=enables)
    how = "user namespaces (above) and Linux 5.11 or newer, with the overlay module loaded (modprobe overlay)"
    return Probe(name="overlayfs", status=Status.NO, found=_why(result), enables=enables, how=how)


def probe_seccomp(result: Answer) -> Probe:
    enables = "system-call filters in sandboxes"
    if result[0] == 0:
        return Probe(name="seccomp", status=Status.OK, found=result[1], enables=enables)
    return Probe(name="seccomp", status=Status.NO, found=_why(result), enables=enables, how="a kernel with CONFIG_SECCOMP_FILTER")


def probe_landlock(result: Answer) -> Probe:
    enables = "path and TCP rules in sandboxes (TCP from ABI 4)"
    how = "Linux 5.13 or newer with landlock in the lsm= boot option; ABI 4 came with Linux 6.7"
    if result[0] != 0:
        return Probe(name="landlock", status=Status.NO, found=_why(result), enables=enables, how=how)
    abi = int(result[1])
    status = Status.OK if abi >= 4 else Status.PARTIAL
    return Probe(name="landlock", status=status, found=f"ABI {abi}", enables=enables, how="" if status is Status.OK else how)


def own_cgroup(controller: str) -> str:
    """This process's path in the v1 hierarchy of a controller, or in the v2 one for ""; "/" when it is not told."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path
    except (OSError, ValueError):
        pass
    return "/"


def try_cgroup(root: Path, own: str, files: tuple[str, ...]) -> tuple[bool, bool]:
    """(a child group can be made under our own or the root one, it has the limit files wanted)."""
    for parent in dict.fromkeys((root / own.lstrip("/"), root)):
        child = parent / f"etude-doctor-{os.getpid()}"
        try:
            child.mkdir()
        except OSError:
            continue
        try:
            if all((child / name).exists() for name in files):
                return True, True
            made = True
        finally:
            child.rmdir()
        if made and parent == root:
            return True, False
    return False, False


def probe_cgroups() -> Probe:
    enables = "memory and process limits for a whole sandbox (without: per-process limits)"
    how = "run as root, or under `systemd-run --user --scope -p Delegate=yes`; in a container, mount /sys/fs/cgroup writable"
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        made, limits = try_cgroup(root, own_cgroup(""), ("memory.max", "pids.max"))
        status = Status.OK if limits else Status.PARTIAL if made else Status.NO
        found = "v2, " + ("delegated: memory and pids" if limits else "writable but without memory and pids" if made else "not writable")
        return Probe(name="cgroups", status=status, found=found, enables=enables, how="" if limits else how)
    if (root / "memory").is_dir():
        memory = try_cgroup(root / "memory", own_cgroup("memory"), ("memory.limit_in_bytes",))[1]
        pids = try_cgroup(root / "pids", own_cgroup("pids"), ("pids.max",))[1]
        status = Status.OK if memory and pids else Status.PARTIAL if memory or pids else Status.NO
        kinds = ", ".join(n for n, has in (("memory", memory), ("pids", pids)) if has) or "nothing"
        hybrid = " (hybrid with v2)" if (root / "unified").is_dir() else ""
        return Probe(
            name="cgroups", status=status, found=f"v1{hybrid}, writable: {kinds}", enables=enables, how="" if memory and pids else how
        )
    return Probe(name="cgroups", status=Status.NO, found="none mounted at /sys/fs/cgroup", enables=enables, how=how)


def probe_bwrap(result: Answer) -> Probe:
    enables = "a second opinion on sandboxes in the tests"
    if result[0] == 0:
        return Probe(name="bubblewrap", status=Status.OK, found="starts a sandbox", enables=enables)
    missing = shutil.which("bwrap") is None
    found = "not installed" if missing else f"cannot start a sandbox: {_why(result)}"
    return Probe(
        name="bubblewrap", status=Status.NO, found=found, enables=enables, how="apt install bubblewrap" if missing else userns_advice()
    )


def probe_tool(name: str, result: Answer, enables: str, how: str) -> Probe:
    if result[0] == 0:
        return Probe(name=name, status=Status.OK, found=result[1].splitlines()[0], enables=enables)
    return Probe(name=name, status=Status.NO, found="not installed" if result[0] is None else _why(result), enables=enables, how=how)


def docker_sockets() -> list[str]:
    host = os.environ.get("DOCKER_HOST", "")
    paths = [host.removeprefix("unix://")] if host.startswith("unix://") else []
    paths += ["/var/run/docker.sock", str(Path.home() / ".docker/run/docker.sock")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        paths += [f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"]
    return list(dict.fromkeys(paths))


def ask_docker(path: str) -> str:
    """The daemon's version from `GET /version` over its socket; raises OSError or ValueError when it does not answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0.5)
        connection.connect(path)
        connection.sendall(b"GET /version HTTP/1.0\r\nHost: docker\r\n\r\n")
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    body = data.partition(b"\r\n\r\n")[2]
    return str(jsonlib.loads(body)["Version"])


def probe_docker(paths: list[str]) -> Probe:
    enables = "the docker sandbox backend, images of foreign tasks"
    trouble = "no socket"
    for path in paths:
        if not os.path.exists(path):
            continue
        try:
            return Probe(name="docker", status=Status.OK, found=f"{ask_docker(path)} at {path}", enables=enables)
        except (OSError, ValueError, KeyError, TypeError) as error:
            trouble = f"{path} is there but does not answer: {error}"
    how = "install Docker or podman, start its daemon, and join the docker group"
    return Probe(name="docker", status=Status.NO, found=trouble, enables=enables, how=how)


def virtualisation(flags: set[str], modules: Path = Path("/sys/module")) -> str:
    """svm | vmx | pvm | none. The device node is no evidence: under PVM it answers and stock guests do not boot."""
    for flag in ("svm", "vmx"):
        if flag in flags:
            return flag
    return "pvm" if (modules / "kvm_pvm").is_dir() else "none"


def probe_kvm() -> Probe:
    enables = "micro-VM sandboxes at hardware speed"
    kind = virtualisation(cpu_flags())
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
    if kind in ("svm", "vmx"):
        if usable:
            return Probe(name="kvm", status=Status.OK, found=f"{kind}, /dev/kvm can be opened", enables=enables)
        how = "modprobe kvm_amd or kvm_intel, and join the kvm group"
        return Probe(name="kvm", status=Status.PARTIAL, found=f"{kind}, but /dev/kvm cannot be opened", enables=enables, how=how)
    if kind == "pvm":
        how = "a guest kernel built with CONFIG_PVM_GUEST; stock kernels do not boot here (software emulation works, slower)"
        return Probe(name="kvm", status=Status.PARTIAL, found="pvm: no hardware virtualisation", enables=enables, how=how)
    found = "none: the CPU shows neither svm nor vmx" + ("; /dev/kvm is there all the same" if usable else "")
    return Probe(name="kvm", status=Status.NO, found=found, enables=enables, how="a bare-metal machine, or nested virtualisation")


# ---------------------------------------------------------------------------------------------------
# Probes that need a process of their own: `python -I -S doctor.py NAME`

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SYS_LANDLOCK_CREATE_RULESET, LANDLOCK_ABI_FLAG = 444, 1
PROBE_ERRNO = 42


def _checked(what: str, status: int) -> None:
    if status != 0:
        code = ctypes.get_errno()
        raise SystemExit(f"{what}: {os.strerror(code)}")


def _enter_user_namespace(libc: ctypes.CDLL, others: int) -> None:
    """Become root of a new user namespace, with the other namespaces asked for."""
    uid, gid = os.getuid(), os.getgid()
    _checked("unshare(CLONE_NEWUSER)", libc.unshare(CLONE_NEWUSER | others))
    try:
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path(f"/proc/self/{name}").write_text(line)
    except OSError as error:
        raise SystemExit(f"mapping ids in a user namespace: {error}") from None


def child_userns(libc: ctypes.CDLL) -> None:
    _enter_user_namespace(libc, CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET)
    print("user, mount, pid, ipc, net")


def child_overlay(libc: ctypes.CDLL) -> None:
    """Mount an overlay on a tmpfs in a user namespace, write and delete through it, look at the layers."""
    _enter_user_namespace(libc, CLONE_NEWNS)
    _checked("making mounts private", libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    with tempfile.TemporaryDirectory() as folder:
        _checked("mounting a tmpfs", libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=1m"))
        try:
            base = Path(folder)
            for name in ("lower", "upper", "work", "merged"):
                (base / name).mkdir()
            (base / "lower" / "old").write_text("old")
            options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work,userxattr".encode()
            _checked("mounting an overlay", libc.mount(b"overlay", f"{base}/merged".encode(), b"overlay", 0, options))
            (base / "merged" / "new").write_text("new")
            (base / "merged" / "old").unlink()
            works = (base / "upper" / "new").read_text() == "new" and (base / "lower" / "old").exists()
            if not works or os.listdir(base / "merged") != ["new"]:
                raise SystemExit("an overlay mounts but does not behave")
            libc.umount2(f"{base}/merged".encode(), 0)
        finally:
            libc.umount2(folder.encode(), 2)
    print("mounted in a user namespace; writes and deletions go to the upper layer")


def child_seccomp(libc: ctypes.CDLL) -> None:
    """Install a filter that answers getppid with an errno of ours, and see that it does."""
    number = {"x86_64": 110, "aarch64": 173, "riscv64": 173}.get(platform.machine())
    if number is None:
        raise SystemExit(f"not probed on {platform.machine()}")
    instruction = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | PROBE_ERRNO), (0x06, 0, 0, 0x7FFF0000)]

    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]

    filters = (Filter * len(instruction))(*(Filter(*words) for words in instruction))
    program = Program(len(instruction), filters)
    _checked("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked("installing a seccomp filter", libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))
    if libc.syscall(number) != -1 or ctypes.get_errno() != PROBE_ERRNO:
        raise SystemExit("a seccomp filter installs but does not filter")
    print("a filter was installed and hit")


def child_landlock(libc: ctypes.CDLL) -> None:
    libc.syscall.restype = ctypes.c_long
    abi = libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(LANDLOCK_ABI_FLAG))
    if abi < 1:
        raise SystemExit(f"landlock_create_ruleset: {os.strerror(ctypes.get_errno())}")
    print(abi)


CHILD_PROBES: dict[str, Callable[[ctypes.CDLL], None]] = {
    "userns": child_userns,
    "overlay": child_overlay,
    "seccomp": child_seccomp,
    "landlock": child_landlock,
}

if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("needs Linux")
    CHILD_PROBES[sys.argv[1]](ctypes.CDLL(None, use_errno=True))
