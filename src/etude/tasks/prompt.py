"""The prompt of a deletion task: one or two lines, as a user would write them.

At body level the docstring in the file is the specification. At definition level it is gone, so the prompt carries the
signature and the docstring, and nothing of the code.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from etude.tasks.deletion import DeleteLevel

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
