"""What a function family is, and how one is drawn: templates, constants, names, and a checked twin of every body.

A `Family` is a docstring, one or more correct bodies and at least three wrong ones, written with `$placeholders`:

* `$xs`, `$s` ...   an argument of the function (its pool of names is given by the family)
* `$v`, `$i`, ...   a local of `LOCALS`; `$n` is the attribute of a class family
* `$k`, `$lo` ...   a constant, drawn from an `Axis`; `$k_up` and `$k_dn` are the constant plus and minus one
* `$g`              (families that call another function) the name of that function

Invariants:
* A family's constants are numbered: `decode(family, part, index)` is one-to-one, and different constants give a
  different syntax tree whatever the names are. So tasks without duplicates come from counting, not from a set.
* Constants and names are cut in two disjoint parts, "train" and "held", wherever an axis has enough values (`shared`
  names the axes that do not).
* Expected values come from running the body itself. Each template is compiled once with its constants as globals
  (`callable_for`), which makes drawing thousands of packages cheap; tests/tasks compare it with the written source.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOCALS: dict[str, tuple[str, ...]] = {
    "v": ("v", "x", "a", "e"),
    "u": ("u", "y", "b", "w"),
    "i": ("i", "j", "p", "q"),
    "out": ("out", "res", "acc", "got"),
    "t": ("t", "tot", "cur", "run"),
}
"""Placeholder of a local variable -> the names it may take. Argument pools share no name with these."""

ATTRIBUTES = {"train": ("n", "level", "held", "state", "val", "total"), "held": ("amount", "mark")}
CLASSES = {
    "train": ("Meter", "Tank", "Cell", "Box", "Track", "Node", "Desk", "Unit", "Lane", "Pool", "Queue", "Dial"),
    "held": ("Gauge", "Silo", "Berth", "Vat"),
}
PACKAGES = {
    "train": ("shop", "bank", "farm", "game", "mail", "city", "lab", "port", "clinic", "school", "rail", "hotel", "mill", "club", "stage"),
    "held": ("museum", "harbor", "bakery", "garage", "studio"),
}
MODULES = {
    "train": ("ops", "core", "calc", "tools", "rules", "parts", "steps", "forms", "units", "base", "items", "logic"),
    "held": ("bits", "trims", "kinds", "flows", "gears"),
}
NOUNS = {
    "train": _words(
        "fees ages sizes marks costs loads times cards rooms seats lots bags jobs runs hits pages rows notes files books "
        "cars trips days tabs logs tags plots crops orders bills stamps posts"
    ),
    "held": _words("visits tolls crates berths meals rents stops clips sheets panes"),
}
ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "ints": {"train": ("xs", "nums", "vals", "data", "row", "ns", "points", "scores"), "held": ("seq", "samples", "series")},
    "more": {"train": ("ys", "ws", "other", "weights", "extra"), "held": ("zs", "shares")},
    "int": {"train": ("n", "num", "val", "amount", "size"), "held": ("quota", "reading")},
    "str": {"train": ("s", "text", "word", "line", "raw"), "held": ("phrase", "title")},
    "words": {"train": ("words", "names", "parts", "keys"), "held": ("tokens", "labels")},
    "dict": {"train": ("d", "table", "prices", "stock", "m"), "held": ("ledger", "lookup")},
    "dict2": {"train": ("new", "add", "delta"), "held": ("patch", "update")},
    "rows": {"train": ("rows", "grid", "lists", "groups"), "held": ("batches", "matrix")},
    "spans": {"train": ("spans", "gaps", "ranges", "slots"), "held": ("windows", "bounds")},
    "span": {"train": ("left", "first", "one"), "held": ("near",)},
    "span2": {"train": ("right", "second", "two"), "held": ("far",)},
}
"""Kind of an argument -> its names by part."""

_PLACEHOLDER = re.compile(r"\$([A-Za-z]\w*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The values one constant may take, in two parts."""

    train: tuple[Any, ...]
    held: tuple[Any, ...]

    def part(self, part: str) -> tuple[Any, ...]:
        return self.train if part == "train" else self.held

    @property
    def shared(self) -> bool:
        """Too few values to keep the parts apart."""
        return not set(self.train).isdisjoint(self.held)


def ints(low: int, high: int) -> Axis:
    """Whole numbers low..high; every fourth is held out. Fewer than six values are shared by both parts."""
    values = tuple(range(low, high + 1))
    if len(values) < 6:
        return Axis(train=values, held=values)
    return Axis(train=tuple(v for v in values if v % 4 != 3), held=tuple(v for v in values if v % 4 == 3))


def texts(words: str) -> Axis:
    """Words separated by spaces; every fourth is held out."""
    values = tuple(words.split())
    return Axis(train=tuple(v for i, v in enumerate(values) if i % 4 != 3), held=tuple(v for i, v in enumerate(values) if i % 4 == 3))


SYMBOLS = texts("- _ . * + ~ # = : / | @ % & ! ^")
MARKS = texts("-- :: .. -> ++ == || ~~ // ** => -_ ,, :- <> .: =/ +- &. ##")
LETTERS = texts(" ".join("abcdefghijklmnopqrstuvwxyz"))
PREFIXES = texts(
    "no- my- the- id: to: log. tmp_ new_ x- re- un- old_ sub- top. key: row: at- in- q_ z. ab- co- ex- up- by- lo- hi- go- do- we-"
)
SHORT = texts("red tea oak sun fox ink bay jet elm ore map cup rye log pin wax den ivy hay gem fig cot ash bow kit yak urn zip owl mud")
LETTER_SETS = texts(
    "aeiou rst lmn abc xyz bdp fgh krt mno stu aei sdf qwe jkl nrst eio bcd tnl gkp ouy hjm wvz pqr ace bdf imo lrn dgt esu fhk"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One kind of function: everything needed to draw, test and break it."""

    name: str
    kind: str
    """numbers | lists | text | parse | tables | state | checks | spans | calls"""
    names: tuple[str, ...]
    """Base names of the function."""
    args: tuple[tuple[str, str], ...]
    """(placeholder, kind of argument), in order."""
    consts: Mapping[str, Axis]
    docs: tuple[str, ...]
    body: tuple[str, ...]
    """Correct bodies, the same behaviour in different forms."""
    wrong: tuple[str, ...]
    cases: Callable[[Gen, Any], tuple[Any, ...]]
    """(generator, constants) -> arguments of one call; aims at the boundaries."""
    derive: Callable[[Any], Mapping[str, Any]] | None = None
    """Constants that follow from the drawn ones."""
    sig: str = ""
    """"ints->int", "int->int" or "str->str": may be called by another function of the package."""
    calls: str = ""
    """The signature of the function this one calls."""
    frame: str = ""
    """Class families: the class up to the method; `$C` is its name. The method is called once per item of the case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """The choices behind one function: constants and the text of every placeholder."""

    family: Family
    index: int
    constants: Mapping[str, Any]
    words: Mapping[str, str]
    """placeholder -> its text in code; docstrings say constants with `repr`."""
    name: str
    class_name: str = ""


class Gen:
    """Draws the arguments of test cases."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def num(self, low: int, high: int) -> int:
        return low + int(self.rng.random() * (high - low + 1))

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.random() * len(values))]

    def near(self, *marks: int, spread: int = 12) -> int:
        """A number at, beside, or some way from one of the marks."""
        mark = self.pick(marks)
        r = self.rng.random()
        if r < 0.35:
            return mark
        if r < 0.6:
            return mark + (1 if r < 0.475 else -1)
        return mark + self.num(-spread, spread)

    def nears(self, *marks: int, low: int = 0, high: int = 5, spread: int = 12) -> list[int]:
        return [self.near(*marks, spread=spread) for _ in range(self.num(low, high))]

    def ints(self, low: int, high: int, *, least: int = 0, most: int = 5) -> list[int]:
        return [self.num(low, high) for _ in range(self.num(least, most))]

    def word(self, letters: str, low: int, high: int) -> str:
        return "".join(self.pick(letters) for _ in range(self.num(low, high)))

    def words(self, low: int, high: int, *, letters: str = "abcdeknostu", longest: int = 4) -> list[str]:
        return [self.word(letters, 1, longest) for _ in range(self.num(low, high))]


def family(
    name: str,
    kind: str,
    names: str,
    args: str,
    consts: Mapping[str, Axis],
    docs: Sequence[str],
    body: Sequence[str],
    wrong: Sequence[str],
    cases: Callable[[Gen, Any], tuple[Any, ...]],
    *,
    derive: Callable[[Any], Mapping[str, Any]] | None = None,
    sig: str = "",
    calls: str = "",
    frame: str = "",
) -> Family:
    """A Family from short forms: names separated by spaces, arguments as "xs:ints x:int".

    Example:
        family("sum_over", "numbers", "sum_over big_sum", "xs:ints", {"k": ints(3, 60)}, ["Sum of $xs above $k."],
               ["return sum($v for $v in $xs if $v > $k)"], [...], lambda g, c: (g.nears(c.k),))
    """
    pairs = tuple((a.split(":")[0], a.split(":")[1]) for a in args.split())
    return Family(
        name=name,
        kind=kind,
        names=tuple(names.split()),
        args=pairs,
        consts=dict(consts),
        docs=tuple(docs),
        body=tuple(body),
        wrong=tuple(wrong),
        cases=cases,
        derive=derive,
        sig=sig,
        calls=calls,
        frame=frame,
    )


def size(family: Family, part: str) -> int:
    """How many distinct functions the family has in one part."""
    total = 1
    for axis in family.consts.values():
        total *= len(axis.part(part))
    return total


def decode(family: Family, part: str, index: int) -> dict[str, Any]:
    """The constants with this number, 0 <= index < size(family, part)."""
    out: dict[str, Any] = {}
    for name, axis in family.consts.items():
        values = axis.part(part)
        index, at = divmod(index, len(values))
        out[name] = values[at]
    if family.derive is not None:
        out.update(family.derive(SimpleNamespace(**out)))
    return out


def with_neighbours(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Constants plus `<k>_up` and `<k>_dn` of whole numbers, which only wrong bodies use."""
    out = dict(constants)
    for name, value in constants.items():
        if type(value) is int:
            out[name + "_up"] = value + 1
            out[name + "_dn"] = value - 1
    return out


def fill(template: str, words: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda m: words[m[1]], template)


def literal(value: Any) -> str:
    """The value as it is written in code: like `repr`, but with double quotes where nothing needs escaping."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')


def indent(text: str, spaces: int) -> str:
    pad = " " * spaces
    return "\n".join(pad + line if line else line for line in text.split("\n"))


# ---------------------------------------------------------------------------------------------------
# The checked twin: the same template with constants as globals


@functools.cache
def _code(family_name: str, args: tuple[str, ...], template: str, frame: str) -> CodeType:
    text = _PLACEHOLDER.sub(lambda m: f"C_{m[1]}", template)
    if not frame:
        return _function_code(f"def f({', '.join('C_' + a for a in args)}):\n{indent(text, 4)}\n", family_name)
    head = _PLACEHOLDER.sub(lambda m: f"C_{m[1]}", frame)
    source = f"{head}\n\n    def f(self, {', '.join('C_' + a for a in args)}):\n{indent(text, 8)}\n"
    return compile(source, f"<{family_name}>", "exec")


def _function_code(source: str, name: str) -> CodeType:
    module = compile(source, f"<{name}>", "exec")
    return next(c for c in module.co_consts if isinstance(c, CodeType))


def callable_for(family: Family, template: str, constants: Mapping[str, Any]) -> Callable[..., Any]:
    """A Python function that behaves as the written one would. A class family's takes the list of items it is fed."""
    env = {"C_" + k: v for k, v in constants.items()}
    code = _code(family.name, tuple(a for a, _ in family.args), template, family.frame)
    if not family.frame:
        return FunctionType(code, {"__builtins__": __builtins__, **env}, "f")
    return functools.partial(_drive, code, env)


def _drive(code: CodeType, env: dict[str, Any], items: Sequence[Any]) -> list[Any]:
    scope = {"__builtins__": __builtins__, "__name__": "kata", **env}
    exec(code, scope)
    thing = scope["C_C"]()
    return [thing.f(item) for item in items]


class Raised:
    """The outcome of a call that raised: equal to another of the same exception."""

    def __init__(self, error: BaseException) -> None:
        self.name = type(error).__name__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # a wrong body may raise anything; that is an outcome like any other
        return Raised(error)
