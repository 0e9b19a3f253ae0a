"""The prompt of a deletion task: as a user would write it, and never with anything of the code.

`make_prompt` is for one function (katas), `feature_prompt` for a feature of real code, short or in full.

At body level the docstring in the file is the specification. At definition level it is gone, so the prompt carries the
signature and the docstring, and nothing of the code.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence

from etude.tasks.deletion import DeleteLevel, Deletion

TERSE = 400
"""Characters of a short prompt, about what users write (the median of real requests is a few hundred)."""

BODY = (
    "Implement `{name}` in `{path}`. Tests: `pytest {tests}`",
    "`{name}` in {path} has no body yet. Write it so that `pytest {tests}` passes.",
    "{path}: fill in `{name}` as its docstring says. Check with `pytest {tests}`.",
    "Please finish `{name}` in `{path}`; `pytest {tests}` should pass.",
    "`{name}` raises NotImplementedError. It lives in {path}, its tests in {tests}. Fix that.",
)
DEFINITION = (
    "Add `{signature}` to `{path}`: {doc} Tests: `pytest {tests}`",
    "{path} needs `{signature}`. {doc} Check with `pytest {tests}`.",
    "Write `{signature}` in {path} so that `pytest {tests}` passes. It should do this: {doc}",
)


def make_prompt(
    *, path: str, qualname: str, tests: Sequence[str], level: DeleteLevel, rng: random.Random, signature: str = "", doc: str = ""
) -> str:
    """`tests` are the visible test files of the function."""
    owner = qualname.rpartition(".")[0]
    return rng.choice(BODY if level is DeleteLevel.BODY else DEFINITION).format(
        name=qualname,
        path=path,
        tests=" ".join(tests),
        signature=f"{owner}.{signature}" if owner else signature,
        doc=" ".join(doc.split()),
    )


def feature_prompt(parts: Sequence[Deletion], level: DeleteLevel, tests: Sequence[str], *, terse: bool) -> str:
    """What is missing and which tests say so: names and places, and in the full form signatures and docstrings."""
    places = sorted({part.path for part in parts})
    check = f"`pytest {' '.join(tests)}` should pass." if len(tests) <= 3 else "`pytest` should pass."
    if terse:
        return _terse(parts, level, places, check)
    verb = "have no body any more" if level is DeleteLevel.BODY else "are gone"
    lines = [f"These functions {verb}; write them again so that everything works as before.", ""]
    for path in places:
        lines.append(f"In `{path}`:")
        for part in sorted((p for p in parts if p.path == path), key=lambda p: p.qualname):
            owner = part.qualname.rpartition(".")[0]
            lines.append(f"- `{owner + '.' if owner else ''}{part.signature}`{_kind(part)}")
            doc = part.doc.strip()
            if level is DeleteLevel.DEFINITION and doc:
                lines += [f"  {line}".rstrip() for line in doc.splitlines()]
    return "\n".join([*lines, "", check])


def _kind(part: Deletion) -> str:
    """What a reader of the bare signature would not know."""
    names = [ast.unparse(decorator) for decorator in part.node.decorator_list]
    return f" ({', '.join(f'@{name}' for name in names)})" if names and part.level is DeleteLevel.DEFINITION else ""


def _terse(parts: Sequence[Deletion], level: DeleteLevel, places: Sequence[str], check: str) -> str:
    """At most `TERSE` characters: as many names as fit, then the first sentence of a docstring where there is room."""
    verb = "Implement" if level is DeleteLevel.BODY else "Add"
    where = f"in {places[0]}" if len(places) == 1 else f"across {len(places)} files ({', '.join(places)[:120]})"
    names = sorted((part.qualname for part in parts), key=lambda name: (name.rpartition(".")[2].startswith("_"), name))
    labels = {part.qualname: f"`{part.qualname}`{_kind(part)}" for part in parts}
    shown: list[str] = []
    for name in names:
        rest = len(names) - len(shown) - 1
        if shown and len(f"{verb} {', '.join([*shown, labels[name]])} and {rest} more {where}. {check}") > TERSE:
            break
        shown.append(labels[name])
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    text = f"{verb} {', '.join(shown)}{more} {where}."
    doc = next((" ".join(part.doc.split("\n\n")[0].split()) for part in parts if part.qualname == names[0] and part.doc), "")
    if doc and len(text) + len(doc) + len(check) + 2 <= TERSE:
        text += f" {doc}"
    return f"{text} {check}"
