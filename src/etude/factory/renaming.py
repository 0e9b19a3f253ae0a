"""Fresh names for a trace or a package, so that a small policy learns to copy names instead of knowing a few.

Package, modules and functions of a kata get made-up words, the same everywhere in one trace. Nothing in a trace depends
on a name but the name itself, so the renamed trace is what the same rollout would have been in a renamed package.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from etude.tasks.katas.package import Package

_SYLLABLES = tuple(c + v for c in "bcdfghjklmnprstvwz" for v in "aeiou")
_ENDS = ("", "n", "r", "s", "t", "l", "x", "m")


def word(rng: random.Random) -> str:
    """A made-up word of two or three syllables, such as "tazone"."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 2, 3)))) + rng.choice(_ENDS)


def renaming(package: Package, rng: random.Random) -> Callable[[str], str]:
    """A function that renames a text of this package.

    Example:
        rename = renaming(make_package(7), random.Random(0))
        rename("from shop import ops")          # "from tazo import bemur"
    """
    taken: set[str] = set()

    def fresh() -> str:
        while (made := word(rng)) in taken:
            continue
        taken.add(made)
        return made

    new_package = fresh()
    modules = {m: fresh() for m in sorted({k.module for k in package.functions})}
    names: dict[str, str] = {}
    for kata in package.functions:
        if "_" in kata.name or len(kata.name) > 6:
            head, _, tail = kata.name.rpartition("_")
            names[kata.name] = f"{head}_{fresh()}" if head and tail else fresh()
    table: dict[str, str] = {f"{package.name}.{m}": f"{new_package}.{n}" for m, n in modules.items()}
    table |= {f"test_{m}": f"test_{n}" for m, n in modules.items()}
    return _substitute(table | names, modules | {package.name: new_package})


def _substitute(inside: Mapping[str, str], alone: Mapping[str, str]) -> Callable[[str], str]:
    """`inside` are replaced between non-letters, underscores allowed around; `alone` only as whole words that are no attribute."""
    both = {**alone, **inside}
    first = "|".join(re.escape(n) for n in sorted(inside, key=len, reverse=True))
    second = "|".join(re.escape(n) for n in sorted(alone, key=len, reverse=True))
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{first})(?![A-Za-z0-9])|(?<![\w.])(?:{second})(?!\w)")
    return lambda text: pattern.sub(lambda match: both[match[0]], text)
