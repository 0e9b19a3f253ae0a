"""The base file system of all sandboxes, and how the zygote is started in it. Runs in sandboxd; standard library only.

What is visible inside, read-only: the host's /usr (and /bin, /lib ... as links into it), this interpreter's
installation as /opt/python and the folder that holds pytest as /opt/venv/lib/pythonX.Y/site-packages (all of it, so
also what else is installed there), an /etc of six small files, five devices. Nothing else of the host: no home, no
/work, no /etc, no /sys, no /run. Paths are the same on every machine, so that what a policy sees does not depend on it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox import linux

SANDBOX_UID = 61000
"""Whom sandboxes run as when sandboxd is root: nobody else's number."""
PYTHON, VENV = "/opt/python", "/opt/venv"
DEVICES = ("null", "zero", "full", "random", "urandom")
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


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """Where this Python lives, outside and inside."""

    base: str
    """Installation prefix on the host."""
    inside: str
    """The same, in a sandbox."""
    program: str
    """The interpreter in a sandbox, below `inside`."""
    site: str
    """Folder on the host that holds pytest; "" when it lies inside of the installation."""
    library_path: str
    version: str

    @classmethod
    def current(cls) -> Interpreter:
        base = os.path.realpath(sys.base_prefix)
        in_place = base == "/usr" or base.startswith("/usr/")
        inside = base if in_place else PYTHON
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        program = os.path.relpath(os.path.realpath(sys._base_executable), base)  # type: ignore[attr-defined]
        spec = importlib.util.find_spec("pytest")
        if spec is None or spec.origin is None:
            raise OSError(f"pytest is not installed for {sys.executable}; sandboxes run tests with it: pip install pytest")
        site = os.path.realpath(Path(spec.origin).parent.parent)
        shared = bool(sysconfig.get_config_var("Py_ENABLE_SHARED")) and not in_place
        return cls(
            base=base,
            inside=inside,
            program=f"{inside}/{program}",
            site="" if site.startswith(base + os.sep) else site,
            library_path=f"{inside}/lib" if shared else "",
            version=version,
        )

    def environment(self) -> dict[str, str]:
        """What every process of a sandbox starts with."""
        variables = {
            "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "USER": "agent",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TERM": "dumb",
            "COLUMNS": "80",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONNOUSERSITE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
        }
        if self.library_path:
            variables["LD_LIBRARY_PATH"] = self.library_path
        return variables


def sandbox_owner() -> tuple[int, int]:
    """User and group on the host that own the files of sandboxes."""
    return (SANDBOX_UID, SANDBOX_UID) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


def start_zygote(root: Path) -> tuple[int, socket.socket]:
    """Fork the zygote. Returns the process to wait for and its socket, on which it will say ready or failed.

    Called while single-threaded. The process returned stays outside of the zygote's pid namespace and ends with it.
    """
    interpreter = Interpreter.current()
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
    names = ("linux", "toolserver", "zygote")
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
    if interpreter.site:
        wanted["site"] = interpreter.site
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
    held = {name: os.open(path, os.O_PATH) for name, path in paths.items()}  # `new` may cover them
    linux.mount("base", new, "tmpfs", linux.MS_NOSUID, "size=8m,mode=755")
    for folder in ("usr", "etc", "dev/shm", "proc", "tmp", "repo", "var", "opt", "mnt/layers", "mnt/scratch"):
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
    if "alternatives" in paths:
        bind("alternatives", "/etc/alternatives")
    for name in DEVICES:
        Path(f"{new}/dev/{name}").touch()
        linux.bind(f"/dev/{name}", f"{new}/dev/{name}", readonly=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{new}/dev/{name}")
    if "python" in paths:
        bind("python", PYTHON)
    _make_venv(new, interpreter, bind if interpreter.site else None)
    linux.mount("proc", f"{new}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.pivot_root(new)
    linux.seal("/")
    linux.mount("warm", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=4m,mode=700")  # for the zygote's warm-up run


def _make_venv(new: str, interpreter: Interpreter, bind) -> None:
    """A virtual environment at /opt/venv whose packages are those of the host's."""
    folder = f"{new}{VENV}"
    os.makedirs(f"{folder}/bin")
    inherit = "false" if bind else "true"
    config = f"home = {os.path.dirname(interpreter.program)}\ninclude-system-site-packages = {inherit}\nversion = {interpreter.version}\n"
    Path(f"{folder}/pyvenv.cfg").write_text(config)
    for name in ("python", "python3", f"python{interpreter.version}"):
        os.symlink(interpreter.program, f"{folder}/bin/{name}")
    for name in ("pytest", "py.test"):
        script = Path(f"{folder}/bin/{name}")
        script.write_text(f"#!{VENV}/bin/python\nimport sys\nimport pytest\nsys.exit(pytest.main())\n")
        script.chmod(0o755)
    if bind:
        bind("site", f"{VENV}/lib/python{interpreter.version}/site-packages")
