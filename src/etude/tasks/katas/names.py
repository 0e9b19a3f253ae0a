"""Names of packages, modules, functions, arguments and classes: from a split's pools, or made up.

A policy that meets a few dozen names learns those, and not to read names where they stand. So packages of the train split, which
reinforcement works on, have mostly made-up ones, and so has the pretraining corpus (`factory.renaming`). Evaluation has its own pools.
"""

from __future__ import annotations

import builtins
import keyword
import random
from collections.abc import Collection, Sequence

from etude.tasks.katas.family import ARGUMENTS, ATTRIBUTES, LOCALS, MODULES, NOUNS, PACKAGES

MADE_UP = 0.7
"""Share of made-up names in packages of the train split."""


def _pieces(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONSETS = _pieces("b c d f g h j k l m n p qu r s t v w y z bl br ch cl cr dr fl fr gl gr ph pl pr sc sh sk sl sm sn sp st str sw th tr wh")
_VOWELS = _pieces("a e i o u a e i o u ai au ea ee ei ie oa oo ou ui")
_CODAS = _pieces("b ck d dge ft g ght l ld ll lt m mp n nd ng nt p r rk rm rn rt s se sh ss st t te th tle ve x ze y")

RESERVED = (
    {*keyword.kwlist, *dir(builtins), "self"}
    | {name for names in LOCALS.values() for name in names}
    | {name for pools in ARGUMENTS.values() for name in pools["held"]}
    | {name for pools in (ATTRIBUTES, PACKAGES, MODULES, NOUNS) for name in pools["held"]}
)
"""No made-up name is one of these: Python's words, locals of bodies, names of evaluation tasks."""


def word(rng: random.Random, taken: Collection[str] = ()) -> str:
    """A made-up word of one to three syllables that is not taken, such as "tazone" or "strampse". Clusters of letters matter: a
    policy copies only sequences of tokens that are like those it has copied."""
    while (made := _word(rng)) in taken or made in RESERVED or len(made) < 3:
        continue
    return made


def _word(rng: random.Random) -> str:
    count = rng.choice((1, 2, 2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if rng.random() < (0.9 if last else 0.3) else "")
        for last in (i == count - 1 for i in range(count))
    ) + rng.choice(("", "", "", "s"))


class Names:
    """Draws the names of one package."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self._rng = rng
        self._made_up = MADE_UP if split == "train" else 0.0

    def draw(self, pool: Sequence[str], taken: Collection[str] = ()) -> str:
        """One of the pool, or a made-up word."""
        if self._made_up and self._rng.random() < self._made_up:
            return word(self._rng, taken)
        return self._rng.choice([name for name in pool if name not in taken])

    def draw_class(self, pool: Sequence[str], taken: Collection[str]) -> str:
        if self._made_up and self._rng.random() < self._made_up:
            return word(self._rng, {name.lower() for name in taken}).capitalize()
        return self._rng.choice([name for name in pool if name not in taken])

    def sample(self, pool: Sequence[str], count: int, taken: Collection[str] = ()) -> list[str]:
        """Different ones."""
        if not self._made_up:
            return self._rng.sample(pool, count)
        chosen: list[str] = []
        for _ in range(count):
            chosen.append(self.draw(pool, {*taken, *chosen}))
        return chosen
