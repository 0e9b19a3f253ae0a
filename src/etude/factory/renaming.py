"""Fresh names and numbers for a trace or a package, so that a small policy learns to copy them instead of knowing a few.

Package, modules, functions, their arguments, classes, text constants and constants of two digits get made-up ones, the same
everywhere in one text. So the renamed text is what the same rollout would have been in a renamed package, but for the values
that tests compare with and constants that follow from others, which nobody computes. Without it a policy that had only met
`vals` and numbers of the training split wrote `vals` for `counts` and 32 for 39 (docs/log.md).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Set

from etude.tasks.katas.family import literal
from etude.tasks.katas.names import RESERVED, word
from etude.tasks.katas.package import FAMILIES, Package

_NUMBER = re.compile(r"(?<![\w\\])(?<!\d\.)[1-9]\d(?!\w|\.\d)")
"""A whole number of two digits that stands alone."""
MARK_CHARACTERS = "-_.*+~#=:/|@%&!^<>?;,"
COMMON_WORDS = tuple(
    sorted(
        {word for family in FAMILIES.values() for doc in family.docs for word in re.findall(r"(?<![$\w'])[a-z]{3,}(?![\w'])", doc)}
        - RESERVED
    )
)
"""Words of docstrings that may name an argument; those that name one in evaluation tasks are left out."""
HELD_TEXTS = frozenset(
    value
    for family in FAMILIES.values()
    for axis in family.consts.values()
    for value in axis.held
    if isinstance(value, str) and not axis.shared
)
"""What evaluation tasks have for text constants; nothing made up may be one of these."""


def renaming(package: Package, rng: random.Random, *, inside: float = 0.0) -> Callable[[str], str]:
    """A function that renames a text of this package; with probability `inside` each, arguments, numbers, and classes
    with text constants too.

    Example:
        rename = renaming(make_package(7), random.Random(0))
        rename("from shop import ops")          # "from tazo import bemur"
    """
    taken: set[str] = set()

    def fresh() -> str:
        made = word(rng, taken)
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
    rename = _substitute(table | names, modules | {package.name: new_package})
    if inside and rng.random() < inside:
        rename = _then(rename, _arguments(_new_arguments(package, rng, fresh)))
    if inside and rng.random() < inside:
        rename = _then(rename, _shifted(rng.randrange(100, 900)) if rng.random() < 0.6 else _last_digit(_held_numbers(package)))
    if inside and rng.random() < inside:
        rename = _then(_classes(package, fresh), _then(_texts(package, rng), rename))
    return rename


def _then(first: Callable[[str], str], second: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: second(first(text))


def _argument_names(package: Package) -> list[str]:
    signatures = (kata.signature.partition("(")[2].rstrip(")") for kata in package.functions)
    return sorted({name.strip() for inner in signatures for name in inner.split(",")} - {"", "self"})


def _new_arguments(package: Package, rng: random.Random, fresh: Callable[[], str]) -> dict[str, str]:
    """Half of them made-up words, half common ones: a policy that had met a common word in docstrings only would not write it."""
    common = [w for w in COMMON_WORDS if all(w not in kata.name.split("_") for kata in package.functions)]
    rng.shuffle(common)
    return {old: common.pop() if rng.random() < 0.5 else fresh() for old in _argument_names(package)}


def _arguments(names: Mapping[str, str]) -> Callable[[str], str]:
    """Whole words, wherever they stand: the text stays of one piece, even where such a word was no argument."""
    pattern = re.compile(rf"(?<![\w\\])(?:{'|'.join(map(re.escape, names))})(?!\w)")
    return lambda text: pattern.sub(lambda match: names[match[0]], text)


def _classes(package: Package, fresh: Callable[[], str]) -> Callable[[str], str]:
    """Classes and the attribute each of them keeps."""
    owners = [drawn for drawn, _ in package.drawn.values() if drawn.class_name]
    classes = {drawn.class_name: fresh().capitalize() for drawn in owners}
    attributes = {drawn.words["n"]: fresh() for drawn in owners}
    if not owners:
        return str
    whole = re.compile(rf"(?<![\w\\])(?:{'|'.join(classes)})(?!\w)")
    kept = re.compile(rf"(?<=self\.)(?:{'|'.join(attributes)})(?!\w)")
    return lambda text: kept.sub(lambda m: attributes[m[0]], whole.sub(lambda m: classes[m[0]], text))


def _texts(package: Package, rng: random.Random) -> Callable[[str], str]:
    """Constants that are text, quoted as code and docstrings quote them: letters become letters, marks become marks."""
    values = sorted({v for drawn, _ in package.drawn.values() for v in drawn.constants.values() if isinstance(v, str) and v})
    arguments = _argument_names(package)
    new: dict[str, str] = {}
    for value in values:
        made = _like(value, rng)
        while made in HELD_TEXTS or made in arguments or made in new.values():
            made = _like(value, rng)
        new[value] = made
    table = {quote(old): quote(made) for old, made in new.items() for quote in (repr, literal)}
    if not table:
        return str
    pattern = re.compile("|".join(map(re.escape, sorted(table, key=len, reverse=True))))
    return lambda text: pattern.sub(lambda match: table[match[0]], text)


def _like(text: str, rng: random.Random) -> str:
    """As long as `text`, of the same kind of characters."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz" if c.isalpha() else MARK_CHARACTERS) for c in text)


def _shifted(by: int) -> Callable[[str], str]:
    """Numbers of two digits moved by the same amount, so that neighbours stay neighbours (a bound and the bound plus one)."""
    return lambda text: _NUMBER.sub(lambda match: str(int(match[0]) + by), text)


def _last_digit(held: Set[int]) -> Callable[[str], str]:
    """Numbers of two digits cut to one, but for what evaluation tasks of the same families have."""

    def cut(match: re.Match[str]) -> str:
        digit = int(match[0]) % 10
        return match[0] if digit in held else str(digit)

    return lambda text: _NUMBER.sub(cut, text)


def _held_numbers(package: Package) -> set[int]:
    axes = (axis for kata in package.functions for axis in FAMILIES[kata.family].consts.values() if not axis.shared)
    return {value for axis in axes for value in axis.held if isinstance(value, int)}


def _substitute(inside: Mapping[str, str], alone: Mapping[str, str]) -> Callable[[str], str]:
    """`inside` are replaced between non-letters, underscores allowed around; `alone` only as whole words that are no attribute."""
    both = {**alone, **inside}
    first = "|".join(re.escape(n) for n in sorted(inside, key=len, reverse=True))
    second = "|".join(re.escape(n) for n in sorted(alone, key=len, reverse=True))
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{first})(?![A-Za-z0-9])|(?<![\w.])(?:{second})(?!\w)")
    return lambda text: pattern.sub(lambda match: both[match[0]], text)
