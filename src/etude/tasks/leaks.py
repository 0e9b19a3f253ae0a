"""Proof by content that a deleted function cannot be copied from what is left.

`Prover` looks at every file of a tree, whatever its name, and at everything packed inside of it (`unwrap`). Found are:
source with the same syntax tree (names changed or not), text that shares most of the 5-token shingles, code objects
with the same signature, names and longer constants in caches and other binary files, and, where the whole definition
was deleted, its signature and the sentences of its docstring. What cannot be opened is a finding as well. Scrub lists
by file name go stale (a type checker that wrote JSON yesterday writes SQLite today), so no rule here depends on where a
file lies, but one: `allow` names the files that may go on calling the deleted code (tests), and they may hold no copy.

Every finding names the path, through which containers it was reached, and what was found.
"""

from __future__ import annotations

import ast
import enum
import fnmatch
import hashlib
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import TaskError
from etude.tasks.deletion import Fingerprint, ast_hash, shingles
from etude.tasks.marshalled import CodeInfo
from etude.tasks.unwrap import Budget, Piece, unwrap

SHARE = 0.6
"""Share of the deleted shingles in one file from which it counts as a copy. Over 2,900 kata deletions the largest share
in an honest file was 0.20 (tests/tasks/test_katas_slow.py prints it)."""
SHARE_OF_VERSIONS = 0.3
"""The same in installed code that holds the longest line of the deleted body word for word: an older version of it."""
LEAST = 6
"""Shingles below which text alone proves nothing: `return self.n` is everywhere."""
LEAST_OF_SEVERAL = 24
"""The same where several functions were deleted together: a twin of a two-line helper beside them gives nothing away."""
TESTS = ("tests/*", "test/*", "*/tests/*", "*/test/*", "test_*.py", "*/test_*.py", "*_test.py", "conftest.py", "*/conftest.py")
"""Files that may name what was deleted."""
_BYTECODE = (".pyc", ".pyo")
_SOURCE = (".py", ".pyi")
_LONG_STRING = 12
_MAX_FILE = 64 * 2**20


class Evidence(enum.StrEnum):
    SAME_CODE = "same code"
    TEXT = "text"
    BYTECODE = "bytecode"
    NAME = "binary"
    SIGNATURE = "signature"
    DOCSTRING = "docstring"
    CONSTANT = "constant"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Leak:
    path: str
    """Of the file, and after each "!" of what lies inside of the one before."""
    channel: str
    """Containers it was reached through, then the evidence: "zip > gzip > same code"."""
    what: str
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class _Look:
    """A piece and what is computed about it once."""

    piece: Piece
    words: tuple[frozenset[int], ...] = ()
    """Shingles of each function, and of the rest: a file of many similar functions is no copy of one of them."""
    hashes: frozenset[str] = frozenset()
    functions: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(name, parameters) of what a piece of source defines."""
    flat: str = ""
    """Text with single white space."""


class Prover:
    """Scans trees for what was deleted. What a file holds is computed once, so many deletions of one package cost little more.

    Example:
        leaks = Prover().find(cut.files, [cut.fingerprint], given=prompt)
    """

    def __init__(self, *, allow: Sequence[str] = TESTS) -> None:
        self._allow = tuple(allow)
        self._seen: dict[bytes, tuple[_Look, ...]] = {}

    def find(
        self, files: Mapping[str, str | bytes], deleted: Sequence[Fingerprint], *, modules: Sequence[str] = (), given: str = ""
    ) -> list[Leak]:
        """Every place where deleted code can be read. `modules` are the stems of the files it was in; `given` is the text
        that may say what it says (the instruction)."""
        out: list[Leak] = []
        budget = Budget()
        kept = "\n".join(text for path, text in files.items() if isinstance(text, str) and path.endswith(".py"))
        least = LEAST if len(deleted) == 1 else LEAST_OF_SEVERAL
        sought = [_Sought.of(mark, kept, given, least) for mark in deleted]
        for path, data in files.items():
            raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
            allowed = any(fnmatch.fnmatchcase(path, pattern) for pattern in self._allow)
            for look in self._looks(path, raw, budget):
                for one in sought:
                    out += _match(look, one, modules, allowed)
        return list(dict.fromkeys(out))

    def find_installed(self, roots: Sequence[Path | str], deleted: Sequence[Fingerprint]) -> list[Leak]:
        """Copies in folders that every sandbox sees (the interpreter and its packages). There names and constants prove
        nothing: a file is looked into when it holds the longest line of a deleted body, and only code counts."""
        sought = [(mark.line.encode(), _Sought.of(mark, "", "")) for mark in deleted if mark.line]
        out: list[Leak] = []
        budget = Budget()
        for path in (p for root in roots for p in _walk(Path(root))):
            try:
                raw = path.read_bytes() if path.stat().st_size <= _MAX_FILE else b""
            except OSError as error:
                raise TaskError(f"cannot read {path} while looking for copies: {error}") from error
            packed = raw[:4] == b"PK\x03\x04"
            pieces = unwrap(str(path), raw, budget) if packed else [Piece(path=str(path), text=raw.decode("utf-8", "replace"))]
            for piece in pieces:
                data = raw if not packed else (piece.text or "").encode("utf-8", "replace")
                here = [one for line, one in sought if line in data]
                if not here:
                    continue
                look = _look(piece)
                for one in here:
                    hard = [leak for leak in _match(look, one, (), False) if leak.evidence in _HARD]
                    out += hard or _older(look, one.mark)
        return list(dict.fromkeys(out))

    def _looks(self, path: str, raw: bytes, budget: Budget) -> Iterator[_Look]:
        key = hashlib.blake2b(raw, digest_size=16).digest() + path.encode("utf-8", "replace")
        if key not in self._seen:
            self._seen[key] = tuple(map(_look, unwrap(path, raw, budget)))
        yield from self._seen[key]


_HARD = (Evidence.SAME_CODE, Evidence.TEXT, Evidence.BYTECODE)


def find_copies(files: Mapping[str, str | bytes], deleted: Fingerprint, *, module: str = "") -> list[Leak]:
    """Every place where one deleted function can be read. `module` is the stem of the file it was in."""
    return Prover().find(files, [deleted], modules=(module,) if module else ())


def share(text: str, deleted: Fingerprint) -> float:
    """How much of the deleted text is in `text`, by shingles."""
    return len(deleted.shingles & shingles(text)) / len(deleted.shingles) if deleted.shingles else 0.0


def _older(look: _Look, mark: Fingerprint) -> list[Leak]:
    """Another version of the function: beside its longest line, enough of its text."""
    found = max((len(mark.shingles & words) for words in look.words), default=0) / max(len(mark.shingles), 1)
    if len(mark.shingles) < LEAST or found < SHARE_OF_VERSIONS:
        return []
    channel = " > ".join((*look.piece.via, Evidence.TEXT.value))
    return [Leak(path=look.piece.path, channel=channel, what=f"{found:.0%} of the text of {mark.name}", evidence=Evidence.TEXT)]


def _walk(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in sorted(names) if Path(folder, name).is_file() and not Path(folder, name).is_symlink())


# ---------------------------------------------------------------------------------------------------
# What is looked for


@dataclass(frozen=True, kw_only=True)
class _Sought:
    """A fingerprint less what stays known: constants and sentences that the remaining source or its tests hold, and what
    the instruction says."""

    mark: Fingerprint
    least: int
    strings: tuple[str, ...]
    sentences: tuple[str, ...]
    signature: bool
    """The signature is to be found nowhere."""
    in_binary: re.Pattern[bytes] | None
    call: re.Pattern[str] | None

    @classmethod
    def of(cls, mark: Fingerprint, kept: str, given: str, least: int = LEAST) -> _Sought:
        known = kept + "\n" + given
        told = " ".join(known.split()) if mark.sentences else ""
        words = [re.escape(p) for p in mark.parameters]
        pattern = rf"(?<!\w){re.escape(mark.name)}\s*\(\s*[^()]{{0,80}}?" + r"\b[^()]{0,200}?".join(rf"\b{w}" for w in words)
        signature = mark.gone and len(words) >= 2
        if signature and given:
            signature = re.search(pattern, given) is None
        return cls(
            mark=mark,
            least=least,
            strings=tuple(s for s in (*mark.strings, *mark.numbers) if s not in known and (len(s) >= _LONG_STRING or s in mark.numbers)),
            sentences=tuple(s for s in mark.sentences if s not in told),
            signature=signature,
            in_binary=_binary_pattern(mark.name, [s for s in mark.strings if s not in known]),
            call=re.compile(pattern) if signature else None,
        )


def _binary_pattern(name: str, strings: Sequence[str]) -> re.Pattern[bytes] | None:
    """The name and the longer strings, as words, inside of a C symbol, or after a byte with their length."""
    words = [w.encode("utf-8", "surrogatepass") for w in (name, *strings) if len(w) >= 4]
    if not words:
        return None
    whole = [rb"(?<![A-Za-z])" + re.escape(w) + rb"(?![A-Za-z])" for w in words]
    counted = [re.escape(bytes([len(w)]) + w) for w in words if len(w) < 256]
    return re.compile(b"|".join(whole + counted))


# ---------------------------------------------------------------------------------------------------
# Looking


def _look(piece: Piece) -> _Look:
    if piece.text is None:
        return _Look(piece=piece)
    flat = " ".join(piece.text.split())
    tree = _parsed(piece.text)
    if tree is None:
        return _Look(piece=piece, words=(shingles(piece.text),), flat=flat)
    nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [(n.name, tuple(a.arg for a in [*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs])) for n in nodes]
    words = tuple(map(shingles, _segments(tree, piece.text.splitlines(True))))
    return _Look(piece=piece, words=words, hashes=frozenset(map(ast_hash, nodes)), functions=tuple(names), flat=flat)


def _parsed(text: str) -> ast.Module | None:
    """The syntax tree of a text that is source with functions."""
    if "def " not in text:
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _segments(tree: ast.Module, lines: Sequence[str]) -> list[str]:
    """The text of each outermost function, and everything else together."""
    out, rest = [], list(lines)
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                start, end = node.lineno - 1, node.end_lineno or node.lineno
                out.append(textwrap.dedent("".join(lines[start:end])))
                rest[start:end] = [""] * (end - start)
            else:
                waiting.append(node)
    return [*out, "".join(rest)]


def _match(look: _Look, sought: _Sought, modules: Sequence[str], allowed: bool) -> Iterator[Leak]:
    piece, mark = look.piece, sought.mark

    def leak(evidence: Evidence, what: str) -> Leak:
        return Leak(path=piece.path, channel=" > ".join((*piece.via, evidence.value)), what=what, evidence=evidence)

    if piece.refused:
        yield leak(Evidence.UNREADABLE, piece.refused)
    elif piece.code is not None:
        if _same_code_object(piece.code, mark):
            yield leak(Evidence.BYTECODE, f"a code object with the signature of {mark.name}")
    elif piece.strings:
        yield from (leak(*found) for found in _in_strings(piece.strings, sought))
    elif piece.text is None:
        stem = re.split(r"[/!]", piece.path)[-1]
        if stem.endswith(_BYTECODE) and stem.split(".")[0] in modules:
            yield leak(Evidence.BYTECODE, f"compiled {stem.split('.')[0]}")
        elif sought.in_binary is not None and (hit := sought.in_binary.search(piece.raw)):
            yield leak(Evidence.NAME, repr(hit[0].decode("utf-8", "replace").lstrip("".join(map(chr, range(32))))))
    else:
        yield from (leak(*found) for found in _in_text(look, sought, allowed))


def _in_text(look: _Look, sought: _Sought, allowed: bool) -> Iterator[tuple[Evidence, str]]:
    mark, text = sought.mark, look.piece.text or ""
    if len(mark.shingles) >= sought.least:
        found = max((len(mark.shingles & words) for words in look.words), default=0) / len(mark.shingles)
        if mark.ast_hash in look.hashes:
            yield Evidence.SAME_CODE, f"a function with the code of {mark.name}"
            return
        if found >= SHARE:
            yield Evidence.TEXT, f"{found:.0%} of the text of {mark.name}"
            return
    if allowed:
        return
    source = bool(look.functions) or look.piece.path.endswith(_SOURCE)
    if sought.signature and (
        any(name == mark.name and _in_order(mark.parameters, names) for name, names in look.functions)
        if source
        else sought.call is not None and sought.call.search(text)
    ):
        yield Evidence.SIGNATURE, f"{mark.name}({', '.join(mark.parameters)})"
    for sentence in sought.sentences:
        if sentence in look.flat:
            yield Evidence.DOCSTRING, repr(sentence[:80])
            break
    if not look.piece.path.endswith(_SOURCE):
        yield from ((Evidence.CONSTANT, repr(s[:80])) for s in sought.strings[:50] if s in text)


def _in_strings(strings: Sequence[str], sought: _Sought) -> Iterator[tuple[Evidence, str]]:
    """Values of a row, a pickle, a document: a name beside all of its parameters, sentences, constants."""
    mark = sought.mark
    exact = set(strings)
    named = sought.signature and any(mark.name in re.split(r"\W+", s) for s in strings if mark.name in s)
    if named and (exact.issuperset(mark.parameters) or any(sought.call is not None and sought.call.search(s) for s in strings)):
        yield Evidence.SIGNATURE, f"{mark.name} with {', '.join(mark.parameters)}"
    flat = [" ".join(s.split()) for s in strings] if sought.sentences else []
    if any(sentence in each for sentence in sought.sentences for each in flat):
        yield Evidence.DOCSTRING, "a sentence of its docstring"
    for wanted in sought.strings:
        if any(wanted in s for s in strings):
            yield Evidence.CONSTANT, repr(wanted[:80])
            return


def _in_order(wanted: Sequence[str], names: Sequence[str]) -> bool:
    rest = iter(names)
    return all(each in rest for each in wanted)


def _same_code_object(code: CodeInfo, mark: Fingerprint) -> bool:
    """The same used names and as many variables under any names, or most of the used names under its own name."""
    if not mark.variables and not mark.uses:
        return False
    if code.names == mark.uses and len(code.variables) == len(mark.variables):
        known = len(code.names) + (len(code.variables) if code.variables == mark.variables else 0)
        if known >= 4:
            return True
    common = len(set(code.names) & set(mark.uses))
    if code.name != mark.name:
        return False
    return bool(code.variables == mark.variables and mark.gone) or (len(mark.uses) >= 1 and common >= SHARE * len(mark.uses))
