"""Patches as functions over bytes. The slow twin is `git apply`."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from etude.errors import PatchError
from etude.protocols import Change
from etude.sandbox.patch import parse, patched


def git(folder: Path, *arguments: str) -> bytes:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts]
    return {str(path.relative_to(folder)): (path.read_bytes(), 0o755 if path.stat().st_mode & 0o100 else 0o644) for path in files}


def after(files: dict[str, tuple[bytes, int]], changes: list[Change]) -> dict[str, tuple[bytes, int]]:
    now = dict(files)
    for change in changes:
        if change.data is None:
            del now[change.path]
        else:
            now[change.path] = (change.data, change.mode)
    return now


def scramble(rng: random.Random, lines: list[bytes]) -> list[bytes]:
    out = list(lines)
    for _ in range(rng.randint(1, 6)):
        at = rng.randint(0, len(out))
        if rng.random() < 0.5 and at < len(out):
            del out[at : at + rng.randint(1, 3)]
        else:
            out[at:at] = [b"new %d" % rng.randint(0, 99) for _ in range(rng.randint(1, 3))]
    return out


@pytest.mark.parametrize("seed", range(12))
def test_what_git_makes_of_random_edits_is_what_we_make(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    git(tmp_path, "init", "-q")
    names = ["a.txt", "dir/with space.txt", "caf\u00e9.txt", "gone.txt", "moved.txt", "mode.sh", 'quote".txt']
    contents = {}
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        contents[name] = [b"line %d" % rng.randint(0, 9) for _ in range(rng.randint(1, 40))]
        (tmp_path / name).write_bytes(b"\n".join(contents[name]) + b"\n" * rng.randint(0, 1))
    git(tmp_path, "add", "-A")
    git(tmp_path, "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "before")
    before = tree(tmp_path)
    for name in ("a.txt", "dir/with space.txt", "caf\u00e9.txt", 'quote".txt'):
        (tmp_path / name).write_bytes(b"\n".join(scramble(rng, contents[name])) + b"\n" * rng.randint(0, 1))
    (tmp_path / "gone.txt").unlink()
    (tmp_path / "moved.txt").rename(tmp_path / "dir" / "new.txt")
    (tmp_path / "mode.sh").chmod(0o755)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "born.txt").write_bytes(b"one\r\ntwo\n\nthree")
    git(tmp_path, "add", "-A")
    wanted = tree(tmp_path)
    for options in (["-M"], ["--no-renames"], ["-U1"], ["-U0"]):
        patch = git(tmp_path, "diff", "--cached", *options).decode()
        assert after(before, patched(parse(patch), before)) == wanted, options


def test_a_hunk_is_found_where_its_lines_moved_to() -> None:
    base = b"".join(b"%d\n" % n for n in range(20))
    patch = "--- x\n+++ x\n@@ -10,3 +10,3 @@\n 9\n-10\n+ten\n 11\n@@ -15,2 +15,2 @@\n 14\n-15\n+fifteen\n"
    moved = b"new\n" * 4 + base
    (change,) = patched(parse(patch), {"x": (moved, 0o644)})
    assert change.data == moved.replace(b"\n10\n", b"\nten\n").replace(b"\n15\n", b"\nfifteen\n")
    twice = b"a\nb\na\nb\na\n"
    (change,) = patched(parse("--- x\n+++ x\n@@ -3 +3 @@\n-a\n+c\n"), {"x": (twice, 0o644)})
    assert change.data == b"a\nb\nc\nb\na\n"


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ("", "names no file"),
        ("hello\n", "names no file"),
        ("@@ -1 +1 @@\n-a\n+b\n", "a hunk without a file"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n-a\n", "ends early"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n?a\n", "ends early"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-b\n+c\n", "hunk 1 of x does not fit; its line 'b'"),
        ("--- a/y\n+++ b/y\n@@ -1 +1 @@\n-b\n+c\n", "no such file"),
        ("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+c\n", "is there already"),
        ("--- a/x\n+++ /dev/null\n@@ -0,0 +0,0 @@\n", "lines that the patch does not name"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "relative to the workspace"),
        ("--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "relative to the workspace"),
        ("diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc\n", "only plain files"),
        ("diff --git a/x b/x\nindex 1..2\nGIT binary patch\nliteral 1\n", "binary"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary"),
        ('--- "a/\\377"\n+++ "b/\\377"\n@@ -1 +1 @@\n-a\n+b\n', "not UTF-8"),
    ],
)
def test_what_does_not_fit_is_named(patch: str, why: str) -> None:
    with pytest.raises(PatchError, match=why):
        patched(parse(patch), {"x": (b"a\n", 0o644)})
