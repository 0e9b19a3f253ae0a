"""Function families that validate, and families over spans of numbers."""

from __future__ import annotations

from etude.tasks.katas.family import PREFIXES, SHORT, family, ints

_FUSE = """\
$out = []
for $v, $u in sorted($spans):
    if $out and $v - $out[-1][1] <= $k:
        $out[-1] = ($out[-1][0], max($u, $out[-1][1]))
    else:
        $out.append(($v, $u))
return [($v, $u) for $v, $u in $out if $u - $v >= $m]"""


def _spans(g, low: int, high: int, most: int = 3) -> list[tuple[int, int]]:
    starts = [g.num(low, high) for _ in range(g.num(0, most))]
    return [(a, a + g.num(1, 15)) for a in starts]


FAMILIES = (
    family(
        "code_ok",
        "checks",
        "code_ok is_code valid_code",
        "s:str",
        {"p": PREFIXES, "k": ints(2, 9)},
        ["Whether $s is $p and then exactly $k digits.", "True if $s starts with $p followed by $k digits and nothing else."],
        [
            "$t = $s[len($p):]\nreturn $s.startswith($p) and len($t) == $k and $t.isdigit()",
            "if not $s.startswith($p):\n    return False\n$t = $s.removeprefix($p)\nreturn $t.isdigit() and len($t) == $k",
        ],
        [
            "return $s.startswith($p) and $s[len($p):].isdigit()",
            "return $s.startswith($p) and len($s) == len($p) + $k",
            "$t = $s[len($p):]\nreturn len($t) == $k and $t.isdigit()",
            "$t = $s[len($p):]\nreturn $s.startswith($p) and len($t) >= $k and $t.isdigit()",
        ],
        lambda g, c: (
            g.pick((c.p, c.p, c.p, "z" * len(c.p)))
            + "".join(g.pick("0123456789") for _ in range(c.k + g.pick((0, 0, -1, 1)) - 1))
            + g.pick(("x", "4", "7", "9")),
        ),
    ),
    family(
        "all_in",
        "checks",
        "all_in fits scores_ok",
        "xs:ints",
        {"lo": ints(1, 20), "w": ints(8, 40), "k": ints(2, 4)},
        ["Whether $xs has at most $k items, all from $lo to $hi.", "True if no more than $k $xs and each is $lo..$hi."],
        [
            "return len($xs) <= $k and all($lo <= $v <= $hi for $v in $xs)",
            "if len($xs) > $k:\n    return False\nreturn all($lo <= $v <= $hi for $v in $xs)",
        ],
        [
            "return all($lo <= $v <= $hi for $v in $xs)",
            "return len($xs) <= $k and all($lo < $v <= $hi for $v in $xs)",
            "return len($xs) <= $k and all($lo <= $v < $hi for $v in $xs)",
            "return len($xs) <= $k and any($lo <= $v <= $hi for $v in $xs)",
            "return len($xs) < $k and all($lo <= $v <= $hi for $v in $xs)",
        ],
        lambda g, c: (
            g.pick(
                (
                    [c.lo],
                    [c.hi],
                    [g.num(c.lo + 1, c.hi - 1) for _ in range(c.k)],
                    [g.num(c.lo + 1, c.hi - 1) for _ in range(c.k + 1)],
                    [g.pick((c.lo - 1, c.hi + 1, c.hi + 4)), g.num(c.lo, c.hi)],
                    [],
                )
            ),
        ),
        derive=lambda c: {"hi": c.lo + c.w},
    ),
    family(
        "need",
        "checks",
        "need require checked",
        "x:int",
        {"lo": ints(1, 30), "w": ints(6, 40), "m": ints(1, 9)},
        ["$x times $m_up; ValueError unless $lo <= $x <= $hi.", "Multiply $x by $m_up, raising ValueError below $lo or above $hi."],
        [
            "if not $lo <= $x <= $hi:\n    raise ValueError($x)\nreturn $x * $m_up",
            "if $x < $lo or $x > $hi:\n    raise ValueError($x)\nreturn $x * $m_up",
        ],
        [
            "return $x * $m_up",
            "if not $lo < $x <= $hi:\n    raise ValueError($x)\nreturn $x * $m_up",
            "if not $lo <= $x < $hi:\n    raise ValueError($x)\nreturn $x * $m_up",
            "if not $lo <= $x <= $hi:\n    return None\nreturn $x * $m_up",
        ],
        lambda g, c: (g.pick((c.lo, c.hi, c.lo - g.num(1, 3), c.hi + g.num(1, 3), g.num(c.lo, c.hi))),),
        derive=lambda c: {"hi": c.lo + c.w},
    ),
    family(
        "grade",
        "checks",
        "grade rank_of band",
        "x:int",
        {"lo": ints(5, 40), "w": ints(5, 40), "p": SHORT},
        ["$p for $x of at least $hi, 'ok' from $lo, else 'no'.", "'no' below $lo, 'ok' below $hi, otherwise $p, for $x."],
        [
            'if $x >= $hi:\n    return $p\nreturn "ok" if $x >= $lo else "no"',
            'if $x < $lo:\n    return "no"\nif $x < $hi:\n    return "ok"\nreturn $p',
        ],
        [
            'if $x > $hi:\n    return $p\nreturn "ok" if $x >= $lo else "no"',
            'if $x >= $hi:\n    return $p\nreturn "ok" if $x > $lo else "no"',
            'if $x >= $lo:\n    return "ok"\nreturn $p if $x >= $hi else "no"',
            'if $x >= $hi:\n    return $p\nreturn "no" if $x >= $lo else "ok"',
        ],
        lambda g, c: (g.near(c.lo, c.hi, spread=10),),
        derive=lambda c: {"hi": c.lo + c.w},
    ),
    family(
        "gap_ok",
        "checks",
        "gap_ok spaced well_apart",
        "xs:ints",
        {"k": ints(2, 20), "m": ints(3, 40)},
        [
            "Whether $xs start at $m or more and each is at least $k above the one before.",
            "True if no $xs is below $m and every step up is $k or more.",
        ],
        [
            "return all($v >= $m for $v in $xs) and all($u - $v >= $k for $v, $u in zip($xs, $xs[1:]))",
            "$t = $m - $k\nfor $v in $xs:\n    if $v - $t < $k:\n        return False\n    $t = $v\nreturn True",
        ],
        [
            "return all($u - $v >= $k for $v, $u in zip($xs, $xs[1:]))",
            "return all($v >= $m for $v in $xs) and all($u - $v > $k for $v, $u in zip($xs, $xs[1:]))",
            "return all($v > $m for $v in $xs) and all($u - $v >= $k for $v, $u in zip($xs, $xs[1:]))",
            "return all($v >= $m for $v in $xs)",
            "return all($v >= $m for $v in $xs) and all(abs($u - $v) >= $k for $v, $u in zip($xs, $xs[1:]))",
        ],
        lambda g, c: (
            g.pick(
                (
                    [c.m, c.m + c.k + g.num(1, 5)],
                    [c.m + (t := g.num(1, 9)), c.m + t + c.k],
                    [c.m - g.num(1, 2), c.m + c.k + 3],
                    [c.m + 3, c.m + 3 + c.k - 1],
                    [c.m + 2 * c.k, c.m + 1],
                    [c.m],
                    [c.m - g.num(1, 3)],
                    [c.m + 1, c.m + 2 + c.k, c.m + 3 + 2 * c.k + g.num(-3, 3)],
                )
            ),
        ),
    ),
    family(
        "merge_spans",
        "spans",
        "merge_spans join_gaps fuse",
        "spans:spans",
        {"k": ints(1, 12), "m": ints(3, 24)},
        [
            "Sort $spans, join those at most $k apart, keep the ones at least $m long.",
            "Join sorted $spans with gaps up to $k; drop results shorter than $m.",
        ],
        [_FUSE],
        [
            _FUSE.replace("<= $k", "< $k"),
            _FUSE.replace("max($u, $out[-1][1])", "$u"),
            _FUSE.replace("[($v, $u) for $v, $u in $out if $u - $v >= $m]", "$out"),
            "return [($v, $u) for $v, $u in sorted($spans) if $u - $v >= $m]",
        ],
        lambda g, c: (
            g.pick(
                (
                    [(4, 4 + c.m + 5), (5, 5 + c.m)],
                    [(1, 1 + c.m), (1 + c.m + c.k, 3 + 2 * c.m + c.k)],
                    [(20, 20 + c.m), (g.num(1, 9), 10)],
                    _spans(g, 0, 60),
                    [(g.num(2, 9), 9 + c.m), (10 + c.m + c.k, 12 + c.m + c.k)],
                )
            ),
        ),
    ),
    family(
        "covered",
        "spans",
        "covered inside_len clip_len",
        "spans:spans",
        {"lo": ints(1, 30), "w": ints(10, 50)},
        ["Total length of $spans after cutting each to $lo..$hi.", "Sum of how much of each of $spans lies in $lo..$hi."],
        [
            "return sum(max(0, min($u, $hi) - max($v, $lo)) for $v, $u in $spans)",
            "$out = 0\nfor $v, $u in $spans:\n    $out += max(min($u, $hi) - max($v, $lo), 0)\nreturn $out",
        ],
        [
            "return sum(min($u, $hi) - max($v, $lo) for $v, $u in $spans)",
            "return sum(max(0, min($u, $hi) - $v) for $v, $u in $spans)",
            "return sum(max(0, $u - max($v, $lo)) for $v, $u in $spans)",
            "return sum($u - $v for $v, $u in $spans if $lo <= $v and $u <= $hi)",
        ],
        lambda g, c: (
            [
                g.pick(
                    (
                        (c.lo - g.num(1, 9), c.lo + g.num(1, 9)),
                        (c.hi - g.num(1, 9), c.hi + g.num(1, 9)),
                        (c.hi + g.num(1, 5), c.hi + 9),
                        (c.lo + 1, c.lo + g.num(2, 8)),
                        (c.lo - 9, c.lo - g.num(2, 8)),
                    )
                )
                for _ in range(g.num(0, 3))
            ],
        ),
        derive=lambda c: {"hi": c.lo + c.w},
    ),
    family(
        "inside",
        "spans",
        "inside near_any covers",
        "x:int spans:spans",
        {"k": ints(1, 20), "m": ints(2, 30)},
        [
            "Whether $x is in any of $spans started $k earlier and ended $m later, ends included.",
            "True if some span (a, b) of $spans has a - $k <= $x <= b + $m.",
        ],
        [
            "return any($v - $k <= $x <= $u + $m for $v, $u in $spans)",
            "for $v, $u in $spans:\n    if $v - $k <= $x <= $u + $m:\n        return True\nreturn False",
        ],
        [
            "return any($v - $k <= $x < $u + $m for $v, $u in $spans)",
            "return any($v - $k < $x <= $u + $m for $v, $u in $spans)",
            "return any($v <= $x <= $u for $v, $u in $spans)",
            "return all($v - $k <= $x <= $u + $m for $v, $u in $spans)",
        ],
        lambda g, c: (
            (x := g.num(20, 60)),
            g.pick(
                (
                    [(x + c.k, x + c.k + 4)],
                    [(x - c.m - 5, x - c.m)],
                    [(x + c.k + 1, x + c.k + 9), (x - c.m - 7, x - c.m - 1)],
                    [],
                    [(x - 3, x + 3), (x + c.k + 5, x + c.k + 8)],
                    [(x + g.num(1, c.k), x + c.k + 5)],
                )
            ),
        ),
    ),
)
