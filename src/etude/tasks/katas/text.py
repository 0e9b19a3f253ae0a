"""Function families over strings: shifting, cutting, masking, counting, nesting, run lengths."""

from __future__ import annotations

from etude.tasks.katas.family import LETTER_SETS, LETTERS, MARKS, PREFIXES, SYMBOLS, Axis, family, ints

ABC = "abcdefghijklmnopqrstuvwxyz"
_PAIRS = Axis(train=("()", "[]", "{}", "<>"), held=("()", "[]", "{}", "<>"))


_SHIFT = """\
$out = ""
for $v in $s:
    if "a" <= $v <= "z":
        $out += chr((ord($v) - 97 + $k) % 26 + 97)
    else:
        $out += $c
return $out"""
_DEPTH = """\
$t = $out = 0
for $v in $s:
    $t += ($v == $o) - ($v == $c)
    if $t < 0:
        return $d
    $out = max($out, $t)
return $out if $t == 0 else $d"""
_RUNS = """\
$out = []
for $v in $s:
    if $out and $out[-1][0] == $v:
        $out[-1][1] += 1
    else:
        $out.append([$v, 1])
return $c.join($v + $z + str($u) for $v, $u in $out if $u >= $m_up)"""


def _with_set(g, letters: str) -> str:
    return g.word(letters + "abcdeijop", 0, 6)


FAMILIES = (
    family(
        "caesar",
        "text",
        "caesar shift_text encode",
        "s:str",
        {"k": ints(1, 25), "c": SYMBOLS},
        [
            "Shift the letters a-z of $s by $k, wrapping round; other characters become $c.",
            "Move a-z in $s forward by $k (z wraps to a), all else to $c.",
        ],
        [_SHIFT],
        [
            _SHIFT.replace("(ord($v) - 97 + $k) % 26 + 97", "ord($v) + $k"),
            _SHIFT.replace("$k", "$k_up"),
            _SHIFT.replace("+= $c", "+= $v"),
            _SHIFT.replace("\n    else:\n        $out += $c", ""),
        ],
        lambda g, c: (g.word("abmxyz ?", 0, 5),),
        sig="str->str",
    ),
    family(
        "slug",
        "text",
        "slug slugify handle",
        "s:str",
        {"c": SYMBOLS, "k": ints(4, 20)},
        ["Lower-case $s with spaces as $c, cut to $k characters.", "$s in lower case, each space turned into $c, at most $k long."],
        [
            'return $s.lower().replace(" ", $c)[:$k]',
            '$out = $s.replace(" ", $c)\nreturn $out.lower()[:$k]',
        ],
        [
            'return $s.replace(" ", $c)[:$k]',
            "return $s.lower()[:$k]",
            'return $s.lower().replace(" ", $c)',
            'return $s.lower().replace(" ", $c)[:$k_dn]',
            'return $s.lower().replace(" ", "")[:$k]',
        ],
        lambda g, c: (g.word("ABc ", 0, 3) + " " + g.word("abXYz ", 0, g.pick((3, c.k))),),
        sig="str->str",
    ),
    family(
        "mask",
        "text",
        "mask hide cover",
        "s:str",
        {"k": ints(2, 7), "c": SYMBOLS, "p": PREFIXES},
        [
            "Replace all but the last $k characters of $s by $c, then put $p in front.",
            "$p, then $s with only its last $k characters shown, the others as $c.",
        ],
        [
            "return $p + $c * (len($s) - $k) + $s[-$k:]",
            "$out = $s[-$k:]\nreturn $p + $c * (len($s) - len($out)) + $out",
        ],
        [
            "return $c * (len($s) - $k) + $s[-$k:]",
            "return $p + $s[:$k] + $c * (len($s) - $k)",
            "return $p + $c + $s[-$k:]",
            "return $p + $c * (len($s) - $k_up) + $s[-$k_up:]",
        ],
        lambda g, c: ("".join(g.pick(ABC) for _ in range(g.pick((0, 1, c.k, c.k + 1, c.k + 2, c.k + 4)))),),
        sig="str->str",
    ),
    family(
        "cut",
        "text",
        "cut shorten clip_text",
        "s:str",
        {"k": ints(3, 15), "p": MARKS},
        [
            "$s cut to $k characters and followed by $p if it was longer.",
            "The first $k characters of $s plus $p; shorter text stays as it is.",
        ],
        [
            "return $s if len($s) <= $k else $s[:$k] + $p",
            "if len($s) > $k:\n    return $s[:$k] + $p\nreturn $s",
        ],
        [
            "return $s[:$k] + $p",
            "return $s[:$k]",
            "return $s if len($s) < $k else $s[:$k] + $p",
            "return $s if len($s) <= $k else $s[:$k_dn] + $p",
        ],
        lambda g, c: ("".join(g.pick(ABC) for _ in range(g.pick((0, 2, c.k - 1, c.k, c.k, c.k + 1, c.k + 3)))),),
    ),
    family(
        "count_of",
        "text",
        "count_of tally_of hits",
        "s:str",
        {"set": LETTER_SETS, "m": ints(2, 30)},
        ["How many characters of $s are in $set, times $m.", "$m for each character of $s found in $set."],
        [
            "return sum($v in $set for $v in $s) * $m",
            "$out = 0\nfor $v in $s:\n    if $v in $set:\n        $out += $m\nreturn $out",
        ],
        [
            "return sum($v not in $set for $v in $s) * $m",
            "return sum($v in $set for $v in $s)",
            "return len(set($s) & set($set)) * $m",
            "return sum($v in $set for $v in $s) * $m_up",
        ],
        lambda g, c: (_with_set(g, c.set),),
    ),
    family(
        "depth",
        "text",
        "depth nesting deepest",
        "s:str",
        {"pair": _PAIRS, "d": ints(20, 80)},
        ["Deepest nesting of $o $c in $s, or $d if they do not balance.", "How deep $o and $c nest in $s; $d when unbalanced."],
        [_DEPTH],
        [
            _DEPTH.replace("\n    if $t < 0:\n        return $d", ""),
            _DEPTH.replace("$out if $t == 0 else $d", "$out"),
            "return $s.count($o) if $s.count($o) == $s.count($c) else $d",
            _DEPTH.replace("$d", "$d_up"),
        ],
        lambda g, c: (
            g.pick(("", "()", "(a)(b)", "((a)b)", "(()", "())", ")(", "a)(b", "(()())", "x(y)", "((()))", "(a", "b)", "()()", "(()a)()"))
            .replace("(", c.o)
            .replace(")", c.c),
        ),
        derive=lambda c: {"o": c.pair[0], "c": c.pair[1]},
    ),
    family(
        "swap",
        "text",
        "swap exchange flip",
        "s:str",
        {"o": LETTERS, "shift": ints(1, 12)},
        ["Exchange $o and $p in $s.", "$s with every $o as $p and every $p as $o."],
        [
            'return "".join({$o: $p, $p: $o}.get($v, $v) for $v in $s)',
            '$out = ""\nfor $v in $s:\n    $out += $p if $v == $o else $o if $v == $p else $v\nreturn $out',
            "return $s.translate(str.maketrans($o + $p, $p + $o))",
        ],
        [
            "return $s.replace($o, $p)",
            "return $s.replace($p, $o)",
            "return $s.replace($o, $p).replace($p, $o)",
        ],
        lambda g, c: (g.word(c.o + c.p + "123", 1, 6),),
        derive=lambda c: {"p": ABC[(ABC.index(c.o) + c.shift) % 26]},
    ),
    family(
        "rle",
        "text",
        "rle pack squeeze",
        "s:str",
        {"c": MARKS, "m": ints(1, 2), "z": SYMBOLS},
        [
            "Runs of equal characters of $s as character, $z and length, joined by $c; runs under $m_up are dropped.",
            "Join with $c each run of $s of at least $m_up, written as its character, $z, its length.",
        ],
        [_RUNS],
        [
            _RUNS.replace(" if $u >= $m_up", ""),
            _RUNS.replace(">= $m_up", "> $m_up"),
            _RUNS.replace("$v + $z + str", "$v + str"),
            "return $c.join($v + $z + str($s.count($v)) for $v in dict.fromkeys($s) if $s.count($v) >= $m_up)",
        ],
        lambda g, c: ("".join(g.pick("abc") * g.num(1, 4) for _ in range(g.num(0, 3))),),
    ),
    family(
        "roman",
        "text",
        "roman coins worth",
        "s:str",
        {"o": LETTERS, "shift": ints(1, 6), "a": ints(1, 9), "b": ints(20, 50)},
        [
            "Value of $s: $p is $b, $o is $a, but minus $a when right before $p.",
            "Add up $s with $o as $a and $p as $b; an $o right before $p counts minus.",
        ],
        [
            "$out = 0\nfor $i, $v in enumerate($s):\n    if $v == $p:\n        $out += $b\n    elif $v == $o:\n"
            "        $out += -$a if $s[$i + 1:$i + 2] == $p else $a\nreturn $out",
            "$t = $s.count($o + $p)\nreturn $a * $s.count($o) + $b * $s.count($p) - 2 * $a * $t",
        ],
        [
            "return $a * $s.count($o) + $b * $s.count($p)",
            "$t = $s.count($o + $p)\nreturn $a * $s.count($o) + $b * $s.count($p) - $a * $t",
            "$t = $s.count($p + $o)\nreturn $a * $s.count($o) + $b * $s.count($p) - 2 * $a * $t",
            "$t = $s.count($o + $p)\nreturn $b * $s.count($o) + $a * $s.count($p) - 2 * $a * $t",
        ],
        lambda g, c: (g.word(c.o + c.p + c.o + c.p + "0", 0, 5),),
        derive=lambda c: {"p": ABC[(ABC.index(c.o) + c.shift) % 26]},
    ),
    family(
        "camel",
        "text",
        "camel join_caps humps",
        "s:str",
        {"c": SYMBOLS, "p": PREFIXES},
        ["$p, then the parts of $s between $c, each capitalised and joined.", "Split $s at $c, capitalise each part, join them after $p."],
        [
            'return $p + "".join($v.capitalize() for $v in $s.split($c))',
            "$out = $p\nfor $v in $s.split($c):\n    $out += $v.capitalize()\nreturn $out",
        ],
        [
            'return "".join($v.capitalize() for $v in $s.split($c))',
            'return $p + "".join($v for $v in $s.split($c))',
            "return $p + $c.join($v.capitalize() for $v in $s.split($c))",
            "return $p + $s.capitalize()",
        ],
        lambda g, c: (c.c.join(g.words(1, 3)),),
        sig="str->str",
    ),
    family(
        "ends",
        "text",
        "ends wrap_in edge",
        "s:str",
        {"p": PREFIXES, "q": MARKS},
        [
            "$s with $p in front unless it starts so, and $q at the end unless it ends so.",
            "Make $s start with $p and end with $q, adding what is missing.",
        ],
        [
            "if not $s.startswith($p):\n    $s = $p + $s\nif not $s.endswith($q):\n    $s += $q\nreturn $s",
            '$t = "" if $s.startswith($p) else $p\n$out = "" if $s.endswith($q) else $q\nreturn $t + $s + $out',
        ],
        [
            "return $p + $s + $q",
            "if not $s.startswith($p):\n    $s = $p + $s\nreturn $s",
            "if not $s.startswith($p):\n    $s = $p + $s\nreturn $s + $q",
            "if not $s.endswith($q):\n    $s += $q\nreturn $p + $s",
        ],
        lambda g, c: (g.pick(("", c.p)) + g.word("abcdeknr", 1, 4) + g.pick(("", c.q)),),
        sig="str->str",
    ),
)
