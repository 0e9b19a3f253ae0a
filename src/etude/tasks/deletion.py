"""Feature deletion: take one function out of a tree of Python files, leaving everything else byte for byte.

Two levels:
* BODY: signature and docstring stay, the rest becomes `raise NotImplementedError`;
* DEFINITION: the whole definition goes, with its decorators, its name in `__all__` and in re-exports, and the imports
  of its file that nothing uses any more. A candidate that other code still imports by name, or that its module needs
  while it is imported, is refused with a `Refusal`.

Invariants: the deleted tree parses; lines outside the deletion keep their text and their blank lines, so that no gap
shows where the code was; applying `restoring` files gives the original tree back; `Fingerprint` is all that a leak
scan needs to know about what was deleted, and it never enters a sandbox.

The levels, and why no marker or gap may remain at definition level: FeatureBench (2602.10975), SWE-smith (2504.21798).
"""

from __future__ import annotations

import ast
import difflib
import enum
import functools
import hashlib
import io
import re
import tokenize
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from etude.errors import TaskError, nearest

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
STUB = "raise NotImplementedError"
SHINGLE = 5
"""Tokens in a shingle, as in winnowing-based copy detection."""
_WORD = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|[^\s\w]")


class DeleteLevel(enum.StrEnum):
    BODY = "body"
    DEFINITION = "definition"


class Refusal(TaskError):
    """This function cannot be deleted cleanly; the reason is a value of `validate.Reject`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What was deleted, as a leak scan looks for it."""

    name: str
    ast_hash: str
    strings: tuple[str, ...]
    """Longer string constants of the body, docstring excluded."""
    shingles: frozenset[int]
    """Hashes of every run of `SHINGLE` tokens of the deleted lines."""
    parameters: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    """Of the docstring, white space made single; empty where the docstring stays."""
    numbers: tuple[str, ...] = ()
    """Number constants of the body with at least five digits."""
    variables: tuple[str, ...] = ()
    """Arguments and locals in the compiler's order, as bytecode keeps them."""
    uses: tuple[str, ...] = ()
    """Globals and attributes, as bytecode keeps them."""
    line: str = ""
    """The longest line of the body, where it has 24 characters: what to look for in a lot of text."""
    gone: bool = False
    """The definition is gone too, so name, parameters and docstring are part of what is looked for."""


@dataclass(frozen=True, kw_only=True)
class Deletion:
    path: str
    qualname: str
    level: DeleteLevel
    files: Mapping[str, str]
    """The whole tree after the deletion."""
    restoring: Mapping[str, str]
    """Files that change, as they were before."""
    signature: str
    doc: str
    deleted: str
    """The text that was taken out."""
    body: str
    """The lines below signature and docstring, as they were."""
    node: Function
    """The function as it was."""

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.node, self.body, gone=self.level is DeleteLevel.DEFINITION)

    @property
    def diff(self) -> str:
        """Unified diff that restores what was deleted."""
        return "".join(unified(p, self.files.get(p, ""), text) for p, text in sorted(self.restoring.items()))


def unified(path: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def delete(
    files: Mapping[str, str], path: str, qualname: str, level: DeleteLevel | str = DeleteLevel.BODY, *, tests: Sequence[str] = ()
) -> Deletion:
    """Delete one function ("name" or "Class.method") of `files[path]`. Files in `tests` may go on importing it by name.

    Example:
        cut = delete({"shop/ops.py": text, ...}, "shop/ops.py", "clip_sum")
        cut.files["shop/ops.py"]      # ... def clip_sum(xs): / doc / raise NotImplementedError
    """
    if path not in files:
        raise TaskError(f"no file {path!r} in the tree; {nearest(path, files)}")
    source = files[path]
    tree = parse(source, path)
    node, parents = find(tree, qualname, path)
    lines = source.splitlines(True)
    body = _body_lines(node, lines)
    level = DeleteLevel(level)
    if level is DeleteLevel.BODY:
        changed = {path: _stub(node, lines, body)}
        deleted = "".join(lines[body[0] : body[1]])
    else:
        changed, deleted = _remove({p: t for p, t in files.items() if p not in tests}, path, tree, node, parents, lines)
    after = {**files, **changed}
    for name in changed:
        parse(after[name], name)
    return Deletion(
        path=path,
        qualname=qualname,
        level=level,
        files=after,
        restoring={name: files[name] for name in changed},
        signature=_signature(node),
        doc=ast.get_docstring(node) or "",
        deleted=deleted,
        body="".join(lines[body[0] : body[1]]),
        node=node,
    )


def parse(source: str, path: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise Refusal("unparsable", f"{path} is not Python that this interpreter reads: {error}") from error


def functions(source: str, path: str = "<source>") -> list[tuple[str, Function]]:
    """(qualified name, node) of every function at module level or in a class at module level."""
    out: list[tuple[str, Function]] = []
    for node in parse(source, path).body:
        if isinstance(node, Function):
            out.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            out += [(f"{node.name}.{m.name}", m) for m in node.body if isinstance(m, Function)]
    return out


def find(tree: ast.Module, qualname: str, path: str) -> tuple[Function, list[ast.ClassDef]]:
    """The function and the classes around it."""
    parents: list[ast.ClassDef] = []
    scope: ast.Module | ast.ClassDef = tree
    *outer, last = qualname.split(".")
    for name in outer:
        inner = next((n for n in scope.body if isinstance(n, ast.ClassDef) and n.name == name), None)
        if inner is None:
            raise TaskError(f"{path} has no class {name!r} (looking for {qualname!r})")
        parents.append(inner)
        scope = inner
    found = [n for n in scope.body if isinstance(n, Function) and n.name == last]
    if not found:
        known = [n.name for n in scope.body if isinstance(n, Function)]
        raise TaskError(f"{path} has no function {qualname!r}; {nearest(last, known)}")
    if len(found) > 1:
        raise Refusal("unsupported", f"{path} defines {qualname!r} {len(found)} times (overloads, properties); pick another function")
    return found[0], parents


# ---------------------------------------------------------------------------------------------------
# Where the body is


def _body_lines(node: Function, lines: list[str]) -> tuple[int, int]:
    """0-based [start, end) of the lines between signature or docstring and the end of the function, comments included."""
    docstring = _docstring(node)
    end = _with_trailing_comments(node, lines)
    if docstring is not None and docstring.end_lineno is not None:
        return min(docstring.end_lineno, end), end
    return _header_end(node, lines), end


def _docstring(node: Function) -> ast.Expr | None:
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return first if is_text else None  # type: ignore[return-value]


def _header_end(node: Function, lines: list[str]) -> int:
    """Line after the colon that ends the signature."""
    depth = 0
    text = iter(lines[node.lineno - 1 :])
    for token in tokenize.generate_tokens(lambda: next(text, "")):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == ":" and depth == 0:
                return node.lineno - 1 + token.end[0]
    raise AssertionError(f"no colon after def at line {node.lineno}")


def _with_trailing_comments(node: Function, lines: list[str]) -> int:
    """The syntax tree ends at the last statement; comments below it that are indented deeper belong to it too."""
    end = at = node.end_lineno or node.lineno
    while at < len(lines):
        text = lines[at].strip()
        if text and not (text.startswith("#") and _indent_of(lines[at]) > node.col_offset):
            break
        at += 1
        if text:
            end = at
    return end


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _signature(node: Function) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ast.unparse(node.args)
    head, _, rest = arguments.partition(", ")
    if head in ("self", "cls"):
        arguments = rest
    return f"{node.name}({arguments}){returns}"


# ---------------------------------------------------------------------------------------------------
# Level BODY


def _stub(node: Function, lines: list[str], body: tuple[int, int]) -> str:
    start, end = body
    first = node.body[0]
    newline = "\n" if start >= end or not lines[end - 1].endswith("\r\n") else "\r\n"
    if first.lineno <= _header_end(node, lines):  # def f(x): return x
        prefix = _text_before(lines[first.lineno - 1], first.col_offset).rstrip()
        pad = " " * (node.col_offset + 4)
        kept = "".join(lines[: first.lineno - 1]) + prefix + newline
        if _docstring(node) is not None:
            raise Refusal("unsupported", f"{node.name} is written on one line with its docstring; pick another function")
        return kept + pad + STUB + newline + "".join(lines[end:])
    pad = _text_before(lines[first.lineno - 1], first.col_offset)
    if pad.strip():
        raise Refusal("unsupported", f"the body of {node.name} shares a line with its signature; pick another function")
    if start >= end:
        raise Refusal("unsupported", f"{node.name} has no body besides its docstring; pick another function")
    return "".join(lines[:start]) + pad + STUB + newline + "".join(lines[end:])


def _text_before(line: str, byte_offset: int) -> str:
    """`col_offset` counts UTF-8 bytes."""
    return line.encode()[:byte_offset].decode()


# ---------------------------------------------------------------------------------------------------
# Level DEFINITION


def _remove(
    files: Mapping[str, str], path: str, tree: ast.Module, node: Function, parents: list[ast.ClassDef], lines: list[str]
) -> tuple[dict[str, str], str]:
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    end = _with_trailing_comments(node, lines)
    if _text_before(lines[start], node.col_offset).strip():
        raise Refusal("unsupported", f"{node.name} does not start its own line; pick another function")
    deleted = "".join(lines[start:end])
    if parents:
        kept = cut_lines(lines, start, end)
        if len(parents[-1].body) == 1:
            pad = " " * node.col_offset
            kept = "".join(lines[:start]) + pad + "pass\n" + "".join(lines[end:])
        return {path: kept}, deleted
    if _runs_on_import(tree, node):
        raise Refusal("needed_on_import", f"{path} uses {node.name} while it is imported; pick another function")
    changed = {path: _without_name_in_all(cut_lines(lines, start, end), path, node.name)}
    changed[path] = _without_dead_imports(changed[path], path, node)
    for other, text in files.items():
        if other != path and other.endswith(".py") and node.name in text:
            edited = _without_reexport(text, other, path, node.name)
            if edited != text:
                changed[other] = edited
    return changed, deleted


def cut_lines(lines: list[str], start: int, end: int) -> str:
    """Without lines [start, end) and without the blank lines that set them apart; the file's spacing stays."""
    before, after = lines[:start], lines[end:]
    above = _blank_tail(before)
    below = next((i for i, line in enumerate(after) if line.strip()), len(after))
    before = before[: len(before) - above]
    after = after[below:]
    if not after:
        return "".join(before)
    if not before:
        return "".join(after)
    opens_block = before[-1].rstrip().endswith(":")
    return "".join(before) + "\n" * (above if opens_block else max(above, below)) + "".join(after)


def _blank_tail(lines: list[str]) -> int:
    return next((i for i, line in enumerate(reversed(lines)) if line.strip()), len(lines))


def _runs_on_import(tree: ast.Module, node: Function) -> bool:
    """Whether module-level code (decorators and defaults included) names the function."""
    outer = [n for n in tree.body if n is not node]
    for statement in outer:
        for part in _import_time(statement):
            if any(isinstance(n, ast.Name) and n.id == node.name for n in ast.walk(part)):
                return True
    return False


def _import_time(node: ast.stmt) -> Iterable[ast.AST]:
    """The parts of a statement that run when the module is imported. Bodies of functions do not."""
    if isinstance(node, Function):
        yield from node.decorator_list
        yield from node.args.defaults
        yield from (d for d in node.args.kw_defaults if d is not None)
    elif isinstance(node, ast.ClassDef):
        yield from [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]
        for inner in node.body:
            yield from _import_time(inner)
    else:
        yield node


def _without_name_in_all(source: str, path: str, name: str) -> str:
    """Remove "name" from a literal `__all__`."""
    for node in parse(source, path).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and target.id == "__all__"):
            continue
        values = getattr(node, "value", None)
        if not isinstance(values, (ast.List, ast.Tuple)):
            if name in source:
                raise Refusal("unsupported", f"{path} builds __all__ by code, so {name!r} cannot be taken out of it")
            continue
        for i, element in enumerate(values.elts):
            if isinstance(element, ast.Constant) and element.value == name:
                return _drop_item(source, values.elts, i)
    return source


def _drop_item(source: str, items: list, at: int) -> str:
    """Remove one item of a comma-separated list, with the comma that belongs to it."""
    lines = source.splitlines(True)
    offset = [0]
    for line in lines:
        offset.append(offset[-1] + len(line))

    def index(line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return offset[line - 1] + len(lines[line - 1].encode()[:column].decode())

    item = items[at]
    start, end = index(item.lineno, item.col_offset), index(item.end_lineno, item.end_col_offset)
    if at + 1 < len(items):
        end = index(items[at + 1].lineno, items[at + 1].col_offset)
    elif at > 0:
        start = index(items[at - 1].end_lineno, items[at - 1].end_col_offset)
    return source[:start] + source[end:]


def _without_reexport(source: str, path: str, home: str, name: str) -> str:
    """Take the name out of `from home import name` where it is only passed on; refuse where it is used."""
    tree = parse(source, path)
    module = home.removesuffix(".py").removesuffix("/__init__").replace("/", ".").split("src.")[-1]
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not _same_module(node, path, module):
            continue
        for i, alias in enumerate(node.names):
            if alias.name != name:
                continue
            bound = alias.asname or name
            if not path.endswith("__init__.py") or any(isinstance(n, ast.Name) and n.id == bound for n in ast.walk(tree)):
                raise Refusal("still_imported", f"{path} imports {name!r} from {home}; without it the import breaks")
            if len(node.names) > 1:
                edited = _drop_item(source, node.names, i)
            else:
                lines = source.splitlines(True)
                edited = "".join(lines[: node.lineno - 1] + lines[node.end_lineno or node.lineno :])
            return _without_name_in_all(edited, path, bound)
    if any(isinstance(n, ast.ImportFrom) and _same_module(n, path, module) and name in [a.name for a in n.names] for n in ast.walk(tree)):
        raise Refusal("still_imported", f"{path} imports {name!r} from {home} inside of a function")
    return source


def _same_module(node: ast.ImportFrom, path: str, module: str) -> bool:
    if node.level == 0:
        return node.module == module or module.endswith("." + (node.module or " "))
    package = path.split("/")[:-1]
    base = package[: len(package) - (node.level - 1)]
    full = ".".join([*base, *([node.module] if node.module else [])]).split("src.")[-1]
    return full == module


def _without_dead_imports(source: str, path: str, removed: Function) -> str:
    """Drop plain imports at module level that only the removed function used."""
    used_before = {n.id for n in ast.walk(removed) if isinstance(n, ast.Name)}
    tree = parse(source, path)
    used_now = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | _all_names(tree)
    for node in reversed(tree.body):
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            continue
        bound = [(a.asname or a.name).split(".")[0] for a in node.names]
        if all(b in used_before and b not in used_now for b in bound):
            source = _drop_statement(source, node)
    return source


def _drop_statement(source: str, node: ast.stmt) -> str:
    """Remove whole lines; between blank lines, only one of the two gaps stays."""
    lines = source.splitlines(True)
    start, end = node.lineno - 1, node.end_lineno or node.lineno
    if _blank_tail(lines[:start]) and end < len(lines) and not lines[end].strip():
        return cut_lines(lines, start, end)
    return "".join(lines[:start] + lines[end:])


def _all_names(tree: ast.Module) -> set[str]:
    """Strings inside `__all__`: an import may be there only to be passed on."""
    out: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            out |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return out


# ---------------------------------------------------------------------------------------------------
# Fingerprints


def fingerprint(node: Function, text: str, *, gone: bool = False) -> Fingerprint:
    docstring = _docstring(node)
    constants = [
        n.value for statement in node.body if statement is not docstring for n in ast.walk(statement) if isinstance(n, ast.Constant)
    ]
    strings = [value for value in constants if isinstance(value, str) and len(value) >= 8]
    numbers = [repr(value) for value in constants if isinstance(value, (int, float)) and sum(map(str.isdigit, repr(value))) >= 5]
    variables, uses = _compiled(node)
    line = max((line.strip() for line in text.splitlines()), key=len, default="")
    arguments = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    return Fingerprint(
        name=node.name,
        ast_hash=ast_hash(node),
        strings=tuple(dict.fromkeys(strings)),
        shingles=shingles(text),
        parameters=tuple(a for a in arguments if a not in ("self", "cls")),
        sentences=sentences(ast.get_docstring(node) or "") if gone else (),
        numbers=tuple(dict.fromkeys(numbers)),
        variables=variables,
        uses=uses,
        line=line if len(line) >= 24 else "",
        gone=gone,
    )


def sentences(doc: str) -> tuple[str, ...]:
    """Sentences of at least five words and 25 characters, white space made single."""
    found = (" ".join(part.split()) for part in re.split(r"(?<=[.!?:])\s+|\n\s*\n", doc))
    return tuple(dict.fromkeys(s for s in found if len(s) >= 25 and s.count(" ") >= 4))


def _compiled(node: Function) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Variables and used names of the function's code object. It is compiled by itself, never run."""
    alone = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(alone, Function)
    alone.decorator_list = []
    try:
        module = compile(ast.fix_missing_locations(ast.Module(body=[alone], type_ignores=[])), "<deleted>", "exec")
    except (SyntaxError, ValueError):  # such as a nonlocal without its outer function
        return (), ()
    code = next(c for c in module.co_consts if isinstance(c, types.CodeType) and c.co_name == alone.name)
    return (*code.co_varnames, *code.co_cellvars, *code.co_freevars), code.co_names


def ast_hash(node: Function) -> str:
    """Hash of a function up to its name, docstring, annotations, decorators and the names of its arguments and locals.

    Two functions that differ in a constant, an operator or a called name have different hashes.
    """
    text = f"{ast.dump(_Renamed(node).visit(_copy(node)))}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def source_hash(source: str, qualname: str) -> str:
    """`ast_hash` of one function of a file."""
    return ast_hash(find(parse(source, "<source>"), qualname, "<source>")[0])


def _copy(node: Function) -> Function:
    clone = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(clone, Function)
    return clone


class _Renamed(ast.NodeTransformer):
    """Arguments and locals become n0, n1 ... in the order in which they are bound."""

    def __init__(self, node: Function) -> None:
        names: list[str] = []
        for child in ast.walk(node):
            if isinstance(child, ast.arg):
                names.append(child.arg)
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.append(child.id)
        self.names = {name: f"n{i}" for i, name in enumerate(dict.fromkeys(names))}
        self.top = True

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: Function) -> ast.AST:
        if self.top:
            self.top = False
            node.name, node.decorator_list, node.returns = "f", [], None
            if _docstring(node) is not None:
                node.body = node.body[1:]
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg, node.annotation = self.names.get(node.arg, node.arg), None
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.names.get(node.id, node.id)
        return node


def shingles(text: str) -> frozenset[int]:
    """Hashes of every run of `SHINGLE` tokens. Works on any text, so also on caches and documents."""
    words = _WORD.findall(_without_comments(text))
    return frozenset(
        int.from_bytes(hashlib.blake2b("\0".join(words[i : i + SHINGLE]).encode(), digest_size=8).digest(), "big")
        for i in range(len(words) - SHINGLE + 1)
    )


def _without_comments(text: str) -> str:
    """Python source without comments; anything else as it is."""
    if "#" not in text:
        return text
    try:
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    except (tokenize.TokenError, SyntaxError):
        return text
    lines = text.splitlines(True)
    for token in tokens:
        row, column = token.start
        lines[row - 1] = lines[row - 1][:column] + "\n"
    return "".join(lines)
