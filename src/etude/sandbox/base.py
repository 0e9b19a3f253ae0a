"""The base file system of all sandboxes, and how the zygote is started in it. Runs in sandboxd; standard library only.

What is visible inside, read-only: the host's /usr without its Python packages (and /bin, /lib ... as links into it),
this interpreter's installation as /opt/python (or where it is, when that is below /usr), the packages that
interpreter.py chose as /opt/venv, an /etc of six small files, five devices. Nothing else of the host: no home, no /etc,
no /sys, no /run. Names of host folders can still be read in /proc/self/mountinfo; their contents cannot.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from etude.sandbox import linux
from etude.sandbox.interpreter import PYTHON, VENV, Interpreter

SANDBOX_UID = 61000
"""Whom sandboxes run as when sandboxd is root: nobody else's number."""
ETC = {
    "passwd": "root:x:0:0:root:/:/bin/false\nagent:x:1000:1000:agent:/tmp:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
BOOTSTRAP = """\
import sys, types, marshal, os
control, source = int(sys.argv[1]), int(sys.argv[2])
sys.path[:] = [p for p in sys.path if p]
with open(source, 'rb') as file:
    sources = marshal.load(file)
for name in ('etude', 'etude.sandbox'):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
for name, text in sources:
    module = sys.modules['etude.sandbox.' + name] = types.ModuleType('etude.sandbox.' + name)
    setattr(sys.modules['etude.sandbox'], name, module)
    exec(compile(text, name + '.py', 'exec'), module.__dict__)
sys.argv[:] = ['']
module.main(control)
"""


def sandbox_owner() -> tuple[int, int]:
    """User and group on the host that own the files of sandboxes."""
    return (SANDBOX_UID, SANDBOX_UID) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


def start_zygote(root: Path, interpreter: Interpreter) -> tuple[int, socket.socket]:
    """Fork the zygote. Returns the process to wait for and its socket, on which it will say ready or failed.

    Called while single-threaded. The process returned stays outside of the zygote's pid namespace and ends with it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sources = _sources()
    pid = os.fork()
    if pid:
        theirs.close()
        os.close(sources)
        return pid, ours
    try:
        kept = sorted({0, 1, 2, theirs.fileno(), sources})
        for low, high in zip(kept, [*kept[1:], 1 << 16], strict=True):
            os.closerange(low + 1, high)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        _enter(interpreter, root, theirs, sources)
    except BaseException as error:
        theirs.send(json.dumps({"failed": str(error)}).encode())
    finally:
        os._exit(1)


def _sources() -> int:
    """A descriptor of the modules the zygote needs, in the order in which they are executed."""
    import marshal

    folder = Path(__file__).parent
    names = ("linux", "redirect", "toolserver", "zygote")
    fd = os.memfd_create("sources", 0)
    os.write(fd, marshal.dumps([(name, (folder / f"{name}.py").read_text()) for name in names]))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _enter(interpreter: Interpreter, root: Path, control: socket.socket, sources: int) -> None:
    """Give up root, make the outer namespaces, and continue as process 1 of them."""
    paths, new = _outside(interpreter, root), "/tmp"
    uid, gid = sandbox_owner()
    if os.geteuid() == 0:
        paths, new = _stage(paths)
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID)
    linux.map_ids(0, uid, gid)
    pid = os.fork()
    if pid:
        control.close()
        os.waitpid(pid, 0)
        os._exit(0)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    build(interpreter, paths, new)
    for fd in (control.fileno(), sources):
        os.set_inheritable(fd, True)
    environment = interpreter.environment()
    argv = ["python", "-c", BOOTSTRAP, str(control.fileno()), str(sources)]
    os.closerange(max(control.fileno(), sources) + 1, 1 << 16)
    os.execve(f"{VENV}/bin/python", argv, environment)


def _outside(interpreter: Interpreter, root: Path) -> dict[str, str]:
    """Folders of the host that are bound into the base."""
    wanted = {"layers": str(root / "layers"), "usr": "/usr"}
    if interpreter.inside == PYTHON:
        wanted["python"] = interpreter.base
    wanted |= {f"packages{i}": folder for i, folder in enumerate(dict.fromkeys(folder for folder, _ in interpreter.packages))}
    if os.path.isdir("/etc/alternatives"):
        wanted["alternatives"] = "/etc/alternatives"
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            wanted[name] = f"/{name}"
    return wanted


def _stage(paths: dict[str, str]) -> tuple[dict[str, str], str]:
    """As root: bind the folders where the sandboxes' user can reach them. Any of them may lie below a folder of mode 700."""
    stage = "/tmp"
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    held = {name: os.open(path, os.O_PATH) for name, path in paths.items()}
    linux.mount("stage", stage, "tmpfs", linux.MS_NOSUID, "size=1m,mode=755")
    for name, fd in held.items():
        os.mkdir(f"{stage}/{name}")
        linux.bind(f"/proc/self/fd/{fd}", f"{stage}/{name}", readonly=False)
        os.close(fd)
    os.mkdir(f"{stage}/new")
    return {name: f"{stage}/{name}" for name in paths}, f"{stage}/new"


def build(interpreter: Interpreter, paths: dict[str, str], new: str) -> None:
    """Make the base file system on `new` and move into it. `paths` are the folders that are bound in."""
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    links = {name: os.readlink(f"/{name}") for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") if os.path.islink(f"/{name}")}
    linker_cache = Path("/etc/ld.so.cache").read_bytes() if os.path.exists("/etc/ld.so.cache") else b""
    authorities = _authorities()
    held = {name: os.open(path, os.O_PATH) for name, path in paths.items()}  # `new` may cover them
    linux.mount("base", new, "tmpfs", linux.MS_NOSUID, "size=256m,mode=755")
    for folder in ("usr", "etc/ssl/certs", "dev/shm", "proc", "tmp", "repo", "var", "opt", "mnt/layers", "mnt/scratch"):
        os.makedirs(f"{new}/{folder}")
    os.symlink("/tmp", f"{new}/var/tmp")

    def bind(name: str, target: str) -> None:
        os.makedirs(new + target, exist_ok=True)
        linux.bind(f"/proc/self/fd/{held[name]}", new + target)

    bind("usr", "/usr")
    bind("layers", "/mnt/layers")
    for name, target in links.items():
        os.symlink(target, f"{new}/{name}")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if name in paths:
            bind(name, f"/{name}")
    for name, text in ETC.items():
        Path(f"{new}/etc/{name}").write_text(text)
    Path(f"{new}/etc/ld.so.cache").write_bytes(linker_cache)
    Path(f"{new}/etc/ssl/certs/ca-certificates.crt").write_bytes(authorities)
    os.symlink("certs/ca-certificates.crt", f"{new}/etc/ssl/cert.pem")
    if "alternatives" in paths:
        bind("alternatives", "/etc/alternatives")
    for name in linux.DEVICES:
        Path(f"{new}/dev/{name}").touch()
        linux.bind(f"/dev/{name}", f"{new}/dev/{name}", readonly=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{new}/dev/{name}")
    if "python" in paths:
        bind("python", PYTHON)
    _make_python(interpreter, paths, held, new, bind)
    linux.mount("proc", f"{new}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.pivot_root(new)
    linux.seal("/")
    linux.mount("warm", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=4m,mode=700")  # for the zygote's warm-up run


def _authorities() -> bytes:
    """The certificate authorities that the host trusts, in one file; they are public."""
    for path in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"):
        if os.path.isfile(path):
            return Path(path).read_bytes()
    return b""


def _make_python(interpreter: Interpreter, paths: dict[str, str], held: dict[str, int], new: str, bind: Callable[[str, str], None]) -> None:
    """/opt/venv with its packages, and covers over the package folders that are visible otherwise."""
    interpreter.make_venv(new)
    for folder in interpreter.covered:
        linux.mount("none", new + folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=4k,mode=755")
    if interpreter.packages[0][1] == "":
        bind("packages0", interpreter.site)
        return
    names = [name for name in paths if name.startswith("packages")]
    folders = dict.fromkeys(folder for folder, _ in interpreter.packages)
    interpreter.copy_packages(
        {folder: f"/proc/self/fd/{held[name]}" for folder, name in zip(folders, names, strict=True)}, new + interpreter.site
    )
