"""Unified diffs: what they say, and what they make of files. Pure functions over bytes; no file system.

    for part in parse(text): ...
    changes = patched(parse(text), {"a.py": (b"...", 0o644)})     # -> [Change, ...], or PatchError and nothing was done

Read are the output of `git diff` (new, deleted, renamed, copied files, modes, quoted names) and of `diff -u`. Refused are
binary patches, links, and paths that leave the workspace. A hunk fits where its old lines stand: at the line it names,
else at the nearest other place after the hunk before it; no line may differ. So a patch made on a slightly older file is
applied, and one that does not fit is an error that names the hunk and the first line that is not found.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.errors import PatchError
from etude.protocols import Change

HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NULL = b"/dev/null"
Files = Mapping[str, tuple[bytes, int]]
"""path -> (contents, mode)"""


@dataclass(kw_only=True)
class Hunk:
    at: int
    """Line of the old file, from 1, that its first old line is at."""
    old: list[bytes] = field(default_factory=list)
    new: list[bytes] = field(default_factory=list)


@dataclass(kw_only=True)
class FilePatch:
    """What a patch says about one file. `old` is "" for a new file, `new` is "" for a deletion."""

    old: str = ""
    new: str = ""
    mode: int | None = None
    keeps_old: bool = False
    """A copy: the old file stays."""
    hunks: list[Hunk] = field(default_factory=list)


def parse(patch: str) -> list[FilePatch]:
    """The files of a patch, in its order."""
    lines = patch.encode("utf-8", "surrogateescape").split(b"\n")
    if lines and lines[-1] == b"":
        lines.pop()
    parts: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith(b"diff --git "):
            part, at = _git_part(lines, at)
            parts.append(part)
        elif lines[at].startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            part, at = _plain_part(lines, at)
            parts.append(part)
        elif lines[at].startswith(b"@@ "):
            raise PatchError(f"line {at + 1} of the patch is a hunk without a file; it should follow lines that begin with --- and +++")
        else:
            at += 1
    if not parts:
        raise PatchError("the patch names no file; a unified diff has lines that begin with --- and +++")
    for part in parts:
        _check(part)
    return parts


def paths_of(parts: Sequence[FilePatch]) -> list[str]:
    """Every path whose contents `patched` may ask for."""
    return list(dict.fromkeys(path for part in parts for path in (part.old, part.new) if path))


def patched(parts: Sequence[FilePatch], files: Files) -> list[Change]:
    """What the patch makes of `files`. Nothing is changed when any part of it does not fit."""
    now: dict[str, tuple[bytes, int] | None] = dict(files)
    for part in parts:
        if part.old and now.get(part.old) is None:
            raise PatchError(f"{part.old} should be patched, and there is no such file")
        if part.new and part.new != part.old and now.get(part.new) is not None:
            raise PatchError(f"{part.new} should be created, and is there already")
        data, mode = now.get(part.old) or (b"", 0o644)
        data = _apply(part, data)
        if not part.new and data:
            raise PatchError(f"{part.old} should be deleted, and has lines that the patch does not name")
        if part.old and not part.keeps_old:
            now[part.old] = None
        if part.new:
            now[part.new] = (data, part.mode if part.mode is not None else mode)
    changes = []
    for path in paths_of(parts):
        after = now.get(path)
        if after != files.get(path):
            changes.append(Change(path=path, data=None) if after is None else Change(path=path, data=after[0], mode=after[1]))
    return changes


def _git_part(lines: list[bytes], at: int) -> tuple[FilePatch, int]:
    """A part that begins with `diff --git`, and the line after it."""
    part, names = FilePatch(), _git_names(lines[at], at)
    created = deleted = False
    at += 1
    while at < len(lines) and not lines[at].startswith((b"diff --git ", b"@@ ", b"--- ")):
        key, _, value = lines[at].partition(b" ")
        line = lines[at]
        if line.startswith((b"GIT binary patch", b"Binary files ")):
            raise PatchError(f"line {at + 1} of the patch is binary, which a text patch cannot carry; write the file instead")
        if line.startswith(b"new file mode "):
            created, part.mode = True, _mode(line, at)
        elif line.startswith(b"deleted file mode "):
            deleted = True
        elif line.startswith(b"new mode "):
            part.mode = _mode(line, at)
        elif line.startswith((b"rename from ", b"copy from ")):
            part.old, part.keeps_old = _name(value[5:], at), key == b"copy"
        elif line.startswith((b"rename to ", b"copy to ")):
            part.new = _name(value[3:], at)
        elif line and not line.startswith((b"index ", b"old mode ", b"similarity index ", b"dissimilarity index ")):
            break
        at += 1
    moved = bool(part.old)
    if at + 1 < len(lines) and lines[at].startswith(b"--- ") and lines[at + 1].startswith(b"+++ "):
        told, at = _plain_part(lines, at)
        part.hunks = told.hunks
        if not moved:
            part.old, part.new = told.old, told.new
    elif not moved:
        if names is None:
            raise PatchError(f"line {at} of the patch does not tell its two names apart; it needs lines with --- and +++")
        part.old, part.new = ("" if created else names), ("" if deleted else names)
    return part, at


def _plain_part(lines: list[bytes], at: int) -> tuple[FilePatch, int]:
    """`---`, `+++` and hunks."""
    old, new = (_file_name(lines[at + i][4:], at + i) for i in (0, 1))
    if all(name == NULL.decode() or name.startswith(prefix) for name, prefix in ((old, "a/"), (new, "b/"))):
        old, new = old.removeprefix("a/"), new.removeprefix("b/")
    part = FilePatch(old="" if old == NULL.decode() else old, new="" if new == NULL.decode() else new)
    at += 2
    while at < len(lines) and (head := HUNK.match(lines[at])):
        hunk, at = _hunk(lines, at, head)
        part.hunks.append(hunk)
    return part, at


def _hunk(lines: list[bytes], at: int, head: re.Match[bytes]) -> tuple[Hunk, int]:
    first = at + 1
    old_left, new_left = (int(head[i]) if head[i] is not None else 1 for i in (2, 4))
    hunk = Hunk(at=int(head[1]) if old_left else int(head[1]) + 1)
    at += 1
    while old_left or new_left:
        line = lines[at] if at < len(lines) else None
        sign, text = (line[:1], line[1:] + b"\n") if line else (b" ", b"\n")
        if line is None or sign not in (b" ", b"-", b"+"):
            raise PatchError(f"the hunk at line {first} of the patch ends early: {old_left} old and {new_left} new lines are missing")
        if sign != b"+":
            hunk.old.append(text)
            old_left -= 1
        if sign != b"-":
            hunk.new.append(text)
            new_left -= 1
        if old_left < 0 or new_left < 0:
            raise PatchError(f"the hunk at line {first} of the patch has other lines than its @@ line counts")
        at += 1
        if at < len(lines) and lines[at].startswith(b"\\"):  # no newline at the end of the file
            for side, wanted in ((hunk.old, b" -"), (hunk.new, b" +")):
                if sign in wanted:
                    side[-1] = side[-1][:-1]
            at += 1
    return hunk, at


def _apply(part: FilePatch, data: bytes) -> bytes:
    """The contents of the new file."""
    lines = data.split(b"\n")
    have = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    out: list[bytes] = []
    done = drift = 0
    for number, hunk in enumerate(part.hunks, 1):
        place = _find(have, hunk.old, max(hunk.at - 1, 0) + drift, done)
        if place is None:
            missing = next((line for line in hunk.old if line not in have[done:]), hunk.old[0] if hunk.old else b"")
            text = missing.decode("utf-8", "replace").rstrip("\n")
            raise PatchError(f"hunk {number} of {part.old or part.new} does not fit; its line {text!r} is not where it should be")
        drift = place - max(hunk.at - 1, 0)
        out += have[done:place] + hunk.new
        done = place + len(hunk.old)
    return b"".join(out + have[done:])


def _find(have: list[bytes], wanted: list[bytes], near: int, first: int) -> int | None:
    """Where `wanted` stands in `have`, from `first` on and as near as can be."""
    last = len(have) - len(wanted)
    for distance in range(max(abs(near - first), abs(last - near)) + 1):
        for place in dict.fromkeys((near - distance, near + distance)):
            if first <= place <= last and have[place : place + len(wanted)] == wanted:
                return place
    return None


def _mode(line: bytes, at: int) -> int:
    text = line.rsplit(b" ", 1)[1]
    if text not in (b"100644", b"100755"):
        raise PatchError(
            f"line {at + 1} of the patch has mode {text.decode(errors='replace')}; only plain files (100644, 100755) can be patched"
        )
    return int(text, 8) & 0o777


def _git_names(line: bytes, at: int) -> str | None:
    """The one name in `diff --git a/NAME b/NAME`; None when they differ or cannot be told apart."""
    rest = line[len(b"diff --git ") :]
    if rest.startswith(b'"'):
        return None
    half = (len(rest) - 1) // 2
    old, new = rest[:half], rest[half + 1 :]
    return _name(old[2:], at) if old[:2] == b"a/" and new[:2] == b"b/" and old[2:] == new[2:] else None


def _file_name(text: bytes, at: int) -> str:
    """The name on a `---` or `+++` line: a tab ends it."""
    return _name(text if text.startswith(b'"') else text.split(b"\t")[0].rstrip(b"\r"), at)


def _name(text: bytes, at: int) -> str:
    if text.startswith(b'"'):
        text = re.sub(rb"\\([0-7]{3}|.)", _unquoted, text[1:].rpartition(b'"')[0])
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise PatchError(f"line {at + 1} of the patch names a file that is not UTF-8: {text!r}") from None


def _unquoted(escape: re.Match[bytes]) -> bytes:
    code = escape[1]
    if len(code) == 3:
        return bytes([int(code, 8) & 0xFF])
    return {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}.get(code, code)


def _check(part: FilePatch) -> None:
    for path in (part.old, part.new):
        if path and (path.startswith("/") or "\0" in path or posixpath.normpath(path) != path or path.split("/")[0] == ".."):
            raise PatchError(f"path {path!r} of the patch should be relative to the workspace, in its plain form")
    if not part.old and not part.new:
        raise PatchError("a part of the patch has /dev/null on both sides")
