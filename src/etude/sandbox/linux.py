"""The Linux calls a sandbox needs and Python does not offer, through ctypes. Standard library only.

Everything raises OSError with the name of the call. The seccomp filter is assembled by hand (classic BPF) for
x86_64 and aarch64; on another machine `deny_filter` returns b"" and the boundary record says so.

The filter is a deny list that is closed at its end. A list of what is allowed would have to name some 300 calls that
interpreters, compilers and test suites make, and each one forgotten is a task that fails for no reason of its own; what
must not be reached is short and known. What is not known, calls newer than NEWEST_REVIEWED, does not exist inside.
Denied is what lets a process without capabilities reach kernel surface that no test suite needs (mount family, user
namespaces, bpf, io_uring, userfaultfd, perf, keyrings, obsolete calls), or look at its neighbours (ptrace,
process_vm_*, kcmp, pidfd_getfd). AF_VSOCK matters most among socket families: it is not bound to a network namespace.

Landlock adds a second, independent no to what the mount namespace already does not show, and to signals that leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import platform
import select
import socket
import stat
import struct
from collections.abc import Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACE_FLAGS = 0x7E020000
"""Every CLONE_NEW* bit that clone(2) takes."""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 32, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP = 1, 4, 15, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 36, 38, 47

_libc = ctypes.CDLL(None, use_errno=True)

# Numbers that differ by machine; those from 424 up are the same everywhere.
_COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448, "set_mempolicy_home_node": 450,
    "statmount": 457, "listmount": 458, "lsm_set_self_attr": 460, "open_tree_attr": 467,
}  # fmt: skip
NEWEST_REVIEWED = 469
"""file_setattr, of Linux 6.17."""
_DENIED = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "personality": 135, "vhangup": 153, "pivot_root": 155, "adjtimex": 159, "chroot": 161,
        "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175,
        "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212, "clock_settime": 227, "mbind": 237, "set_mempolicy": 238,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272,
        "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "uselib": 134, "ustat": 136, "sysfs": 139, "modify_ldt": 154,
        "_sysctl": 156, "get_kernel_syms": 177, "query_module": 178, "nfsservctl": 180, "vserver": 236,
    },
    "aarch64": {
        "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
        "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
        "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "mbind": 235, "set_mempolicy": 237,
        "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
        "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
        "nfsservctl": 42,
    },
}  # fmt: skip
_DENIED_ALONE = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70,
        "msgctl": 71, "setpriority": 141, "semtimedop": 220, "mq_open": 240, "mq_unlink": 241, "ioprio_set": 251, "inotify_init": 253,
        "inotify_add_watch": 254, "inotify_init1": 294,
    },
    "aarch64": {
        "inotify_init1": 26, "inotify_add_watch": 27, "ioprio_set": 30,
        "setpriority": 140, "mq_open": 180, "mq_unlink": 181, "msgget": 186, "msgctl": 187, "msgrcv": 188,
        "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194, "shmctl": 195, "shmat": 196,
    },
}  # fmt: skip
"""Denied as well where no namespace keeps these objects and processes apart."""
_OWN_ONLY = {
    "x86_64": {"sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "prlimit64": 302, "sched_setattr": 314},
    "aarch64": {"sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "prlimit64": 261, "sched_setattr": 274},
}
"""Calls that name a process: without namespaces allowed on the caller (0) alone, with them not on process 1, the tool server."""
_OTHER = {
    "x86_64": {"audit": 0xC000003E, "clone": 56, "socket": 41, "socketpair": 53, "ioctl": 16, "pivot_root": 155, "capset": 126},
    "aarch64": {"audit": 0xC00000B7, "clone": 220, "socket": 198, "socketpair": 199, "ioctl": 29, "pivot_root": 41, "capset": 91},
}
CLONE3 = 435
MACHINE = platform.machine()
DEVICES = ("null", "zero", "full", "random", "urandom")
"""What a sandbox sees of /dev."""


def _call(name: str, *args: object) -> int:
    result = getattr(_libc, name)(*args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def setns(fd: int, flags: int) -> None:
    _call("setns", ctypes.c_int(fd), ctypes.c_int(flags))


def prctl(option: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
    _call("prctl", ctypes.c_int(option), *(ctypes.c_ulong(v) for v in (a, b, c, d)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = [text.encode() if text else None for text in (source, target, kind, data)]
    result = _libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3])
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount of {kind or source} on {target}: {os.strerror(code)}")


def unmount(target: str) -> None:
    _call("umount2", target.encode(), ctypes.c_int(MNT_DETACH))


def bind(source: str, target: str, *, readonly: bool = True) -> None:
    """Bind a file or a folder, with what is mounted below it: in a user namespace the parts of a locked tree cannot be taken apart."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if readonly:
        seal(target)


def seal(path: str) -> None:
    """Make the mount at `path`, and those below it, read-only and without set-uid; devices stay usable only where they were bound."""
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)
    at_fdcwd, at_recursive = -100, 0x8000
    buffer = ctypes.create_string_buffer(attributes)
    number = ctypes.c_long(_COMMON["mount_setattr"])
    result = _libc.syscall(
        number, ctypes.c_int(at_fdcwd), path.encode(), ctypes.c_uint(at_recursive), buffer, ctypes.c_size_t(len(attributes))
    )
    if result == 0:
        return
    code = ctypes.get_errno()
    if code != errno.ENOSYS:
        raise OSError(code, f"mount_setattr of {path}: {os.strerror(code)}")
    # Before Linux 5.12: remount one mount, keeping the flags that a user namespace may not clear.
    kept = os.statvfs(path).f_flag & (MS_NODEV | MS_NOEXEC | 1024 | 2048)
    mount("", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def pivot_root(new_root: str) -> None:
    """Make `new_root` the root and drop the old tree."""
    os.chdir(new_root)
    number = ctypes.c_long(_OTHER[MACHINE]["pivot_root"])
    if _libc.syscall(number, b".", b".") < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"pivot_root to {new_root}: {os.strerror(code)}")
    unmount(".")
    os.chdir("/")


def map_ids(inside: int, uid: int, gid: int) -> None:
    """Map one user and one group of the parent user namespace to `inside`."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def loopback_up() -> None:
    """Bring up `lo` of a fresh network namespace; suites talk to themselves over it."""
    siocsifflags, iff_up = 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, siocsifflags, struct.pack("16sh14x", b"lo", iff_up))


def drop_capabilities() -> None:
    """Empty all five capability sets, for good."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break
    try:
        prctl(PR_CAP_AMBIENT, 4)
    except OSError:
        pass
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    data = ctypes.create_string_buffer(struct.pack("6I", 0, 0, 0, 0, 0, 0))
    _call("syscall", ctypes.c_long(_OTHER[MACHINE]["capset"]), header, data)


def overlay_works(scratch: str) -> bool:
    """Whether an overlay with its upper layer in memory does all it should, tried on a tmpfs mounted at `scratch` for the moment.

    Linux before 5.11 mounts none in a user namespace; before 6.6 a folder cannot be replaced by a new one of its name,
    because tmpfs keeps no user attributes.
    """
    mount("trial", scratch, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m")
    try:
        for name in ("lower/folder", "upper", "work", "merged"):
            os.makedirs(f"{scratch}/{name}")
        with open(f"{scratch}/lower/folder/file", "w"):
            pass
        merged = f"{scratch}/merged"
        mount("trial", merged, "overlay", 0, f"userxattr,lowerdir={scratch}/lower,upperdir={scratch}/upper,workdir={scratch}/work")
        try:
            os.unlink(f"{merged}/folder/file")
            os.rmdir(f"{merged}/folder")
            os.mkdir(f"{merged}/folder")
            return os.listdir(f"{merged}/folder") == []
        finally:
            unmount(merged)
    except OSError:
        return False
    finally:
        unmount(scratch)


# ---------------------------------------------------------------------------------------------------
# seccomp

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARG0, _ARG1, _ARG2 = 0, 4, 16, 24, 32


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("HBBI", code, jt, jf, k)


@functools.cache
def deny_filter(machine: str = MACHINE, *, alone: bool = False) -> bytes:
    """The BPF program every process of a sandbox runs under; b"" where the machine is not known.

    `alone` is for a sandbox without namespaces: no sockets at all (a path leads to the host's), no System V objects, and
    no call that changes another process.
    """
    if machine not in _DENIED:
        return b""
    other = _OTHER[machine]

    def refuse(code: int) -> bytes:
        return _op(_RET, _ERRNO | code)

    program = [_op(_LD, _ARCH), _op(_JEQ, other["audit"], 1, 0), _op(_RET, _KILL), _op(_LD, _NR)]
    # Also the x32 calls, which are the same kernel code under other numbers.
    program += [_op(_JGE, NEWEST_REVIEWED + 1, 0, 1), refuse(errno.ENOSYS)]
    for number in sorted({*_DENIED[machine].values(), *_COMMON.values(), *(_DENIED_ALONE[machine].values() if alone else ())}):
        program += [_op(_JEQ, number, 0, 1), refuse(errno.EPERM)]
    # clone3 passes its flags by pointer, which a filter cannot follow; libc falls back to clone.
    program += [_op(_JEQ, CLONE3, 0, 1), refuse(errno.ENOSYS)]
    program += [_op(_JEQ, other["clone"], 0, 4), _op(_LD, _ARG0), _op(_JSET, NAMESPACE_FLAGS, 0, 1), refuse(errno.EPERM)]
    program += [_op(_RET, _ALLOW)]
    for number in sorted(_OWN_ONLY[machine].values()):
        named = _op(_JEQ, 0, 1, 0) if alone else _op(_JEQ, 1, 0, 1)
        program += [_op(_JEQ, number, 0, 4), _op(_LD, _ARG0), named, refuse(errno.EPERM), _op(_RET, _ALLOW)]
    program += _socket_rules(other, alone)
    # TIOCSTI and TIOCLINUX put characters into somebody else's terminal.
    program += [_op(_JEQ, other["ioctl"], 0, 4), _op(_LD, _ARG1), _op(_JEQ, 0x5412, 1, 0), _op(_JEQ, 0x541C, 0, 1)]
    program += [refuse(errno.EPERM), _op(_RET, _ALLOW)]
    return b"".join(program)


def _socket_rules(other: dict[str, int], alone: bool) -> list[bytes]:
    """Families that a suite needs; of netlink only the part that lists interfaces; pairs of unix sockets."""
    refuse, allow = _op(_RET, _ERRNO | errno.EAFNOSUPPORT), _op(_RET, _ALLOW)
    rules = [_op(_JEQ, other["socketpair"], 0, 4), _op(_LD, _ARG0), _op(_JEQ, socket.AF_UNIX, 1, 0), refuse, allow]
    if alone:
        return [*rules, _op(_JEQ, other["socket"], 0, 1), refuse]
    families = [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6]
    rules += [_op(_JEQ, other["socket"], 0, 6 + len(families)), _op(_LD, _ARG0)]
    rules += [_op(_JEQ, family, len(families) - i + 3, 0) for i, family in enumerate(families)]
    netlink_route = 0
    return [*rules, _op(_JEQ, socket.AF_NETLINK, 0, 2), _op(_LD, _ARG2), _op(_JEQ, netlink_route, 1, 0), refuse, allow]


def filter_hash(machine: str = MACHINE, *, alone: bool = False) -> str:
    """Names the filter in a boundary record; empty when there is none."""
    program = deny_filter(machine, alone=alone)
    return hashlib.sha256(program).hexdigest()[:16] if program else ""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install_filter(*, alone: bool = False) -> None:
    """Put the calling process and all its children under the filter. Needs no_new_privs."""
    program = deny_filter(alone=alone)
    if not program:
        return
    body = _Program(len(program) // 8, program)
    seccomp_mode_filter = 2
    result = _libc.prctl(ctypes.c_int(PR_SET_SECCOMP), ctypes.c_ulong(seccomp_mode_filter), ctypes.byref(body), 0, 0)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"seccomp filter: {os.strerror(code)}")


_EXECS = {"x86_64": {"seccomp": 317, "execve": 59, "execveat": 322}, "aarch64": {"seccomp": 277, "execve": 221, "execveat": 281}}
_NOTIFY = 0x7FC00000
_RECEIVE, _ANSWER, _STILL_VALID, _CONTINUE = 0xC0502100, 0xC0182101, 0x40082102, 1
MAX_WORDS, MAX_WORD = 512, 4096
"""Of a command line that is recorded."""


def notify_execs() -> int:
    """From now on every execve and execveat of this process and its children waits until the listener, which is returned, lets it go on.
    -1 where the kernel cannot. Needs no_new_privs."""
    if MACHINE not in _EXECS:
        return -1
    numbers = _EXECS[MACHINE]
    program = b"".join(
        [_op(_LD, _NR), _op(_JEQ, numbers["execve"], 1, 0), _op(_JEQ, numbers["execveat"], 0, 1), _op(_RET, _NOTIFY), _op(_RET, _ALLOW)]
    )
    body = _Program(len(program) // 8, program)
    set_mode_filter, new_listener, wait_killable = 1, 1 << 3, 1 << 5
    for flags in (new_listener | wait_killable, new_listener):  # the second is for Linux before 5.19
        result = _libc.syscall(ctypes.c_long(numbers["seccomp"]), ctypes.c_uint(set_mode_filter), ctypes.c_uint(flags), ctypes.byref(body))
        if result >= 0:
            os.set_inheritable(result, False)
            return result
    return -1


def execs_can_be_seen() -> bool:
    """Whether `notify_execs` works here, found by doing it in a child. A container's own listener may be in the way."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            code = 0 if notify_execs() >= 0 else 1
        finally:
            os._exit(code)
    major, minor, *_ = os.uname().release.split(".")
    goes_on = (int(major), int("".join(c for c in minor if c.isdigit()) or 0)) >= (5, 5)  # before, a call could only be refused
    return os.waitpid(pid, 0)[1] == 0 and goes_on


def next_exec(listener: int) -> tuple[int, str, list[str]] | None:
    """Let one waiting exec go on: its process, its program and its command line. None when nothing waits any more, or when there is no such
    program (a search along PATH tries many). OSError when the last process is gone.

    Read is what the arguments are now; a process with several threads can change them until the kernel reads them again.
    """
    notice = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, notice)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # it was killed meanwhile
            return None
        raise
    number, pid = struct.unpack_from("QI", notice)
    call, _, _, *arguments = struct.unpack_from("iIQ6Q", notice, 16)
    seen = None
    try:
        seen = _command(pid, call == _EXECS[MACHINE]["execveat"], arguments)
        fcntl.ioctl(listener, _STILL_VALID, struct.pack("Q", number))
    except OSError:  # it ended while it was read, or points nowhere and will fail
        pass
    with contextlib.suppress(OSError):
        fcntl.ioctl(listener, _ANSWER, bytearray(struct.pack("QqiI", number, 0, 0, _CONTINUE)))
    return seen


def hung_up(fd: int) -> bool:
    """Whether the other side is gone and nothing is left to read."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(events & select.POLLHUP and not events & select.POLLIN for _, events in poll.poll(0))


def _command(pid: int, at: bool, arguments: list[int]) -> tuple[int, str, list[str]] | None:
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        path = os.fsdecode(_string(memory, arguments[1 if at else 0]))
        folder = f"/proc/{pid}/fd/{arguments[0] & 0xFFFFFFFF}" if at and arguments[0] & 0xFFFFFFFF != 0xFFFFFF9C else f"/proc/{pid}/cwd"
        place = f"/proc/{pid}/root{path}" if path.startswith("/") else f"{folder}/{path}" if path else folder
        if not path.startswith("/proc/") and not os.path.exists(place):
            return None
        words = []
        for pointer in _pointers(memory, arguments[2 if at else 1]):
            words.append(os.fsdecode(_string(memory, pointer)))
        return pid, path or os.readlink(folder), words
    finally:
        os.close(memory)


def _pointers(memory: int, place: int) -> list[int]:
    found: list[int] = []
    while place and len(found) < MAX_WORDS:
        data = os.pread(memory, min(64 * 8, 4096 - place % 4096), place)
        for (pointer,) in struct.iter_unpack("Q", data[: len(data) // 8 * 8]):
            if pointer == 0:
                return found
            found.append(pointer)
        if len(data) < 8:
            break
        place += len(data)
    return found[:MAX_WORDS]


def _string(memory: int, place: int) -> bytes:
    """Up to its zero, a page at a time: the next page may not be there."""
    text = b""
    while len(text) < MAX_WORD:
        part = os.pread(memory, 4096 - place % 4096, place)
        if b"\0" in part:
            return (text + part[: part.index(b"\0")])[:MAX_WORD]
        if not part:
            break
        text, place = text + part, place + len(part)
    return text[:MAX_WORD]


# ---------------------------------------------------------------------------------------------------
# Landlock

_FS_READ = 0b1101
"""Execute, read a file, list a folder."""
_FS_FILE = 0b111 | 1 << 14 | 1 << 15
"""What can be allowed on a single file: execute, write, read, truncate, ioctl of a device."""
_FS_DEVICES = 1 << 6 | 1 << 11
"""Make character and block devices: never allowed."""
_FS_BY_ABI = {2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_NET_TCP, _SCOPE_SOCKETS_AND_SIGNALS = 3, 3
LANDLOCK_NEEDED = 2
"""Before ABI 2 (Linux 5.19) every rename from one folder into another is refused, which breaks ordinary programs."""


@functools.cache
def landlock_abi() -> int:
    """Version of Landlock that this kernel has, 0 without."""
    return max(int(_libc.syscall(ctypes.c_long(444), None, ctypes.c_size_t(0), ctypes.c_uint(1))), 0)


def landlock(*, read: Sequence[str], write: Sequence[str], devices: Sequence[str] = (), no_tcp: bool = False) -> int:
    """Allow this process and its children only these trees, and no signal or abstract socket out of them. Returns the ABI; 0, and
    nothing was done, below LANDLOCK_NEEDED. Paths that do not exist are passed over. Needs no_new_privs."""
    abi = landlock_abi()
    if abi < LANDLOCK_NEEDED:
        return 0
    handled = _FS_BY_ABI[min(abi, 5)]
    fields = [handled, _NET_TCP if no_tcp and abi >= 4 else 0, _SCOPE_SOCKETS_AND_SIGNALS if abi >= 6 else 0]
    attributes = struct.pack("QQQ", *fields)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _landlock_call(444, ctypes.create_string_buffer(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        rules = [(path, _FS_READ) for path in read] + [(path, handled & ~_FS_DEVICES) for path in write]
        for path, rights in (*rules, *((path, handled & _FS_FILE & ~1) for path in devices)):
            _landlock_allow(ruleset, path, rights)
        _landlock_call(446, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)
    return abi


def _landlock_allow(ruleset: int, path: str, rights: int) -> None:
    path_beneath = 1
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _FS_FILE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, fd))
        _landlock_call(445, ctypes.c_int(ruleset), ctypes.c_int(path_beneath), rule, ctypes.c_uint(0))
    finally:
        os.close(fd)


def _landlock_call(number: int, *args: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock (call {number}): {os.strerror(code)}")
    return result
