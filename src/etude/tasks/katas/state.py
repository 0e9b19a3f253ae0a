"""Families of small classes that keep state; the method is deleted, the class and its constructor stay."""

from __future__ import annotations

from etude.tasks.katas.family import family, ints

FAMILIES = (
    family(
        "cap_add",
        "state",
        "put load take_in",
        "x:int",
        {"k": ints(25, 70), "s": ints(1, 12)},
        ["Add $x and $s more, keep at most $k, return the new level.", "Raise the level by $x plus $s but not over $k; return it."],
        [
            "self.$n = min(self.$n + $x + $s, $k)\nreturn self.$n",
            "self.$n += $x + $s\nif self.$n > $k:\n    self.$n = $k\nreturn self.$n",
        ],
        [
            "self.$n += $x + $s\nreturn self.$n",
            "return min(self.$n + $x + $s, $k)",
            "self.$n = min(self.$n + $x, $k)\nreturn self.$n",
            "self.$n = min(self.$n + $x + $s, $k_dn)\nreturn self.$n",
        ],
        lambda g, c: (g.ints(1, c.k * 2 // 3, least=2, most=4),),
        frame='class $C:\n    """A level that starts at 0."""\n\n    def __init__(self):\n        self.$n = 0',
    ),
    family(
        "history",
        "state",
        "push record note",
        "x:int",
        {"k": ints(2, 4), "s": ints(10, 80)},
        ["Append $x, forget all but the last $k, return their sum plus $s.", "Remember $x; return $s plus the sum of the last $k values."],
        [
            "self.$n = (self.$n + [$x])[-$k:]\nreturn sum(self.$n) + $s",
            "self.$n = [*self.$n, $x]\nif len(self.$n) > $k:\n    self.$n = self.$n[1:]\nreturn sum(self.$n) + $s",
        ],
        [
            "self.$n = self.$n + [$x]\nreturn sum(self.$n) + $s",
            "self.$n = (self.$n + [$x])[:$k]\nreturn sum(self.$n) + $s",
            "self.$n = (self.$n + [$x])[-$k_up:]\nreturn sum(self.$n) + $s",
            "self.$n = (self.$n + [$x])[-$k:]\nreturn sum(self.$n)",
        ],
        lambda g, c: ([g.num(1, 9) for _ in range(g.pick((c.k, c.k + 1, c.k + 1, 2)))],),
        frame='class $C:\n    """The last values, at first none."""\n\n    def __init__(self):\n        self.$n = []',
    ),
    family(
        "gate",
        "state",
        "feed check step",
        "x:int",
        {"lo": ints(5, 30), "w": ints(6, 40)},
        [
            "On when $x is above $hi, off when below $lo, else unchanged; return it.",
            "Turn on over $hi and off under $lo; return whether it is on.",
        ],
        [
            "if $x > $hi:\n    self.$n = True\nelif $x < $lo:\n    self.$n = False\nreturn self.$n",
            "self.$n = $x > $hi or (self.$n and $x >= $lo)\nreturn self.$n",
        ],
        [
            "if $x >= $hi:\n    self.$n = True\nelif $x < $lo:\n    self.$n = False\nreturn self.$n",
            "if $x > $hi:\n    self.$n = True\nelif $x <= $lo:\n    self.$n = False\nreturn self.$n",
            "self.$n = $x > $hi\nreturn self.$n",
            "if $x > $hi:\n    self.$n = True\nreturn self.$n",
        ],
        lambda g, c: (
            g.pick(
                ([c.hi, c.hi + 1, c.lo, c.lo - 1], [c.hi + 2, c.lo + 1, c.lo], g.nears(c.lo, c.hi, low=3), [c.hi + 3, c.lo - 2], [c.hi])
            ),
        ),
        derive=lambda c: {"hi": c.lo + c.w},
        frame='class $C:\n    """A switch that starts off."""\n\n    def __init__(self):\n        self.$n = False',
    ),
    family(
        "streak",
        "state",
        "hit score track",
        "x:int",
        {"k": ints(5, 60), "m": ints(2, 30)},
        [
            "Add $m when $x is above $k, else go back to 0; return the score.",
            "Over $k the score grows by $m, otherwise it is 0 again; return it.",
        ],
        [
            "self.$n = self.$n + $m if $x > $k else 0\nreturn self.$n",
            "if $x > $k:\n    self.$n += $m\nelse:\n    self.$n = 0\nreturn self.$n",
        ],
        [
            "self.$n = self.$n + $m if $x >= $k else 0\nreturn self.$n",
            "if $x > $k:\n    self.$n += $m\nreturn self.$n",
            "self.$n = self.$n + 1 if $x > $k else 0\nreturn self.$n",
            "self.$n = $m if $x > $k else 0\nreturn self.$n",
        ],
        lambda g, c: (g.nears(c.k, c.k + 6, c.k + 9, low=2, high=4),),
        frame='class $C:\n    """A score of hits in a row."""\n\n    def __init__(self):\n        self.$n = 0',
    ),
    family(
        "account",
        "state",
        "pay move apply",
        "x:int",
        {"k": ints(10, 60), "s": ints(1, 9)},
        [
            "Add $x less a fee of $s unless that would be below -$k; return the balance.",
            "Change the balance by $x - $s, but never to under -$k; return it.",
        ],
        [
            "if self.$n + $x - $s >= -$k:\n    self.$n += $x - $s\nreturn self.$n",
            "$t = self.$n + $x - $s\nif $t < -$k:\n    return self.$n\nself.$n = $t\nreturn $t",
        ],
        [
            "if self.$n + $x - $s > -$k:\n    self.$n += $x - $s\nreturn self.$n",
            "self.$n += $x - $s\nreturn self.$n",
            "self.$n = max(self.$n + $x - $s, -$k)\nreturn self.$n",
            "if self.$n + $x >= -$k:\n    self.$n += $x\nreturn self.$n",
        ],
        lambda g, c: (
            g.pick(([c.s - c.k, 9], [c.s - c.k - 1, 12], [g.num(1, 20), -g.num(1, 60), -g.num(1, 60)], [c.s - c.k - g.num(1, 9), 14])),
        ),
        frame='class $C:\n    """A balance that starts at 0."""\n\n    def __init__(self):\n        self.$n = 0',
    ),
)
