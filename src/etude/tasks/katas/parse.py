"""Function families that read small formats: key-value lists, sizes, clocks, fields."""

from __future__ import annotations

from etude.tasks.katas.family import LETTERS, MARKS, SHORT, SYMBOLS, family, ints

FAMILIES = (
    family(
        "pairs",
        "parse",
        "pairs read_pairs options",
        "s:str",
        {"a": MARKS, "b": SYMBOLS, "m": ints(2, 9)},
        ["Dict from $s: items split at $a, key and number split at $b, number times $m; skip items without $b."],
        [
            "$out = {}\nfor $v in $s.split($a):\n    if $b in $v:\n        $i, $u = $v.split($b)\n"
            "        $out[$i] = int($u) * $m\nreturn $out",
            "$t = [$v.split($b) for $v in $s.split($a) if $b in $v]\nreturn {$i: int($u) * $m for $i, $u in $t}",
        ],
        [
            "$t = [$v.split($b) for $v in $s.split($a)]\nreturn {$i: int($u) * $m for $i, $u in $t}",
            "$t = [$v.split($b) for $v in $s.split($a) if $b in $v]\nreturn {$i: int($u) for $i, $u in $t}",
            "$t = [$v.split($b) for $v in $s.split($a) if $b in $v]\nreturn {$i: $u * $m for $i, $u in $t}",
            "$t = [$v.split($b) for $v in $s.split($a) if $b in $v]\nreturn {$i: int($u) * $m_up for $i, $u in $t}",
        ],
        lambda g, c: (
            c.a.join(g.word("abcdk", 1, 2) + (c.b + str(g.num(1, 30)) if g.rng.random() < 0.75 else "") for _ in range(g.num(0, 3))),
        ),
    ),
    family(
        "size_of",
        "parse",
        "size_of amount_of read_size",
        "s:str",
        {"c": LETTERS, "k": ints(2, 60)},
        ["Number in $s; a final $c multiplies it by $k.", "$s as a number, times $k when it ends with $c."],
        [
            "if $s.endswith($c):\n    return int($s[:-1]) * $k\nreturn int($s)",
            "return int($s[:-1]) * $k if $s[-1:] == $c else int($s)",
        ],
        [
            "return int($s.rstrip($c)) * $k",
            "return int($s.rstrip($c))",
            "if $s.endswith($c):\n    return int($s[:-1]) * $k_up\nreturn int($s)",
            "if $s.endswith($c):\n    return int($s[:-1]) + $k\nreturn int($s)",
        ],
        lambda g, c: (str(g.num(3, 99)) + g.pick(("", c.c)),),
    ),
    family(
        "clock",
        "parse",
        "clock total_of read_time",
        "s:str",
        {"c": SYMBOLS, "k": ints(7, 60)},
        ["$s is a or a, $c, b: return a times $k plus b, b being 0 if missing.", "Split $s at $c into a and maybe b; return a * $k + b."],
        [
            "$i, $t, $u = $s.partition($c)\nreturn int($i) * $k + int($u or 0)",
            "$t = [int($v) for $v in $s.split($c)]\nreturn $t[0] * $k + sum($t[1:])",
        ],
        [
            "$i, $u = $s.split($c)\nreturn int($i) * $k + int($u)",
            "$i, $t, $u = $s.partition($c)\nreturn int($i) + int($u or 0) * $k",
            "$i, $t, $u = $s.partition($c)\nreturn int($i) * $k_up + int($u or 0)",
            "$i, $t, $u = $s.partition($c)\nreturn int($i) * $k",
        ],
        lambda g, c: (g.pick((str(g.num(1, 30)), f"{g.num(0, 30)}{c.c}{g.num(1, 59)}")),),
    ),
    family(
        "to_int",
        "parse",
        "to_int number_or as_num",
        "s:str",
        {"k": ints(2, 40), "d": ints(3, 60)},
        ["$s as a whole number times $k; $d if it is not all digits.", "Digits in $s give their number times $k, anything else $d."],
        [
            "return int($s) * $k if $s.isdigit() else $d",
            "if not $s.isdigit():\n    return $d\nreturn int($s) * $k",
        ],
        [
            "return int($s) if $s.isdigit() else $d",
            "return int($s) * $k if $s else $d",
            "return int($s) * $k if $s.isdigit() else 0",
            "return int($s) * $k if $s.isdigit() else $d * $k",
        ],
        lambda g, c: (
            g.pick((str(g.num(1, 99)), str(g.num(1, 9)), "", "x" + str(g.num(1, 9)), "-" + str(g.num(1, 9)), g.word("abc", 1, 3))),
        ),
    ),
    family(
        "part_at",
        "parse",
        "part_at field nth_part",
        "s:str",
        {"k": ints(1, 3), "c": SYMBOLS, "d": SHORT},
        [
            "Part $k (from 0) of $s split at $c, stripped; $d if there is none.",
            "Split $s at $c and return part $k, counting from 0, without outer spaces, else $d.",
        ],
        [
            "$t = $s.split($c)\nreturn $t[$k].strip() if len($t) > $k else $d",
            "$out = $s.split($c)\nif len($out) <= $k:\n    return $d\nreturn $out[$k].strip()",
        ],
        [
            "$t = $s.split($c)\nreturn $t[$k].strip()",
            "$t = $s.split($c)\nreturn $t[$k] if len($t) > $k else $d",
            "$t = $s.split($c)\nreturn $t[$k_dn].strip() if len($t) >= $k else $d",
            "$t = $s.split()\nreturn $t[$k].strip() if len($t) > $k else $d",
        ],
        lambda g, c: (c.c.join(g.pick(("", " ")) + g.word("abkrst", 1, 3) + g.pick(("", " ")) for _ in range(c.k + g.pick((0, 1, 1, 2)))),),
    ),
)
