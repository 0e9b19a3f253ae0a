"""Families whose functions call another function of the package (`$g`), so that deleting either breaks both."""

from __future__ import annotations

from etude.tasks.katas.family import MARKS, SYMBOLS, family, ints

FAMILIES = (
    family(
        "rows_each",
        "calls",
        "rows_each scale_rows row_scan",
        "rows:rows",
        {"k": ints(2, 30), "m": ints(31, 60)},
        ["`$g` of each of $rows, times $k, plus $m.", "Apply `$g` to each of $rows, multiply by $k and add $m."],
        [
            "return [$g($v) * $k + $m for $v in $rows]",
            "$out = []\nfor $v in $rows:\n    $out.append($k * $g($v) + $m)\nreturn $out",
        ],
        [
            "return [$g($v) * $k for $v in $rows]",
            "return [$g($v) + $m for $v in $rows]",
            "return [sum($v) * $k + $m for $v in $rows]",
            "return [$g($v) * $m + $k for $v in $rows]",
        ],
        lambda g, c: ([g.ints(1, 70, least=1, most=3) for _ in range(g.num(1, 3))],),
        calls="ints->int",
    ),
    family(
        "word_each",
        "calls",
        "word_each map_parts each_part",
        "s:str",
        {"c": MARKS, "p": SYMBOLS},
        ["Apply `$g` to each part of $s split at $c and join them with $p.", "Split $s at $c, put each part through `$g`, join with $p."],
        [
            "return $p.join($g($v) for $v in $s.split($c))",
            "return $p.join(map($g, $s.split($c)))",
        ],
        [
            "return $p.join($s.split($c))",
            "return $g($s)",
            "return $p.join($g($v) for $v in $s)",
            "return $c.join($g($v) for $v in $s.split($c))",
        ],
        lambda g, c: (c.c.join(g.word("AbcmnOpxyzrstuvw", 4, 9) for _ in range(g.num(1, 2))),),
        calls="str->str",
    ),
    family(
        "scaled",
        "calls",
        "scaled for_packs times_of",
        "x:int",
        {"k": ints(3, 40), "m": ints(1, 30)},
        ["`$g` of $k times $x, then plus $m.", "Multiply $x by $k, put it through `$g` and add $m."],
        [
            "return $g($k * $x) + $m",
            "$t = $x * $k\nreturn $g($t) + $m",
        ],
        [
            "return $g($x) * $k + $m",
            "return $g($k * $x)",
            "return $k * $x + $m",
            "return $g($k * $x) - $m",
        ],
        lambda g, c: (g.num(1, 60),),
        calls="int->int",
    ),
    family(
        "best_row",
        "calls",
        "best_row top_row pick_row",
        "rows:rows",
        {"k": ints(2, 30), "m": ints(1, 40)},
        ["Index of the row of $rows with the largest `$g` (the first on a tie), times $k, plus $m."],
        [
            "$t = [$g($v) for $v in $rows]\nreturn $t.index(max($t)) * $k + $m",
            "$i = max(range(len($rows)), key=lambda $v: $g($rows[$v]))\nreturn $i * $k + $m",
        ],
        [
            "$t = [$g($v) for $v in $rows]\nreturn $t.index(min($t)) * $k + $m",
            "$t = [$g($v) for $v in $rows]\nreturn $t.index(max($t)) * $k",
            "$t = [$g($v) for $v in $rows]\nreturn max($t) * $k + $m",
            "$t = [$g($v) for $v in $rows]\nreturn $t.index(max($t)) + $k + $m",
        ],
        lambda g, c: ([g.ints(1, 70, least=1, most=3) for _ in range(g.num(1, 4))],),
        calls="ints->int",
    ),
)
