"""Function families over dicts and records: tallies, merges, groups, bills."""

from __future__ import annotations

from etude.tasks.katas.family import SHORT, family, ints


def _table(g, low: int, high: int, most: int = 3) -> dict[str, int]:
    return {g.pick("abcde"): g.num(low, high) for _ in range(g.num(0, most))}


FAMILIES = (
    family(
        "tally",
        "tables",
        "tally counts histogram",
        "xs:ints",
        {"k": ints(3, 40), "m": ints(1, 30)},
        ["Dict of how often each of $xs above $k occurs, plus $m.", "Count the $xs over $k by value, each count starting at $m."],
        [
            "$out = {}\nfor $v in $xs:\n    if $v > $k:\n        $out[$v] = $out.get($v, $m) + 1\nreturn $out",
            "return {$v: $xs.count($v) + $m for $v in $xs if $v > $k}",
        ],
        [
            "return {$v: $xs.count($v) + $m for $v in $xs if $v >= $k}",
            "return {$v: $xs.count($v) for $v in $xs if $v > $k}",
            "$out = {}\nfor $v in $xs:\n    if $v > $k:\n        $out[$v] = $out.get($v, 0) + $m\nreturn $out",
            "return {$v: $xs.count($v) + $m for $v in $xs}",
            "return {$v: 1 + $m for $v in $xs if $v > $k}",
        ],
        lambda g, c: (g.nears(c.k, c.k + 1, low=1, spread=3),),
    ),
    family(
        "merge",
        "tables",
        "merge combine add_up",
        "tab:dict tab2:dict2",
        {"k": ints(10, 50), "m": ints(1, 9)},
        [
            "Add $tab2 to $tab by key, a missing key counting $m; keep totals of at least $k.",
            "Totals of $tab and $tab2 by key (missing: $m), without those below $k.",
        ],
        [
            "$t = {$v: $tab.get($v, $m) + $tab2.get($v, $m) for $v in $tab | $tab2}\nreturn {$v: $u for $v, $u in $t.items() if $u >= $k}",
            "$out = {}\nfor $v in set($tab) | set($tab2):\n    $t = $tab.get($v, $m) + $tab2.get($v, $m)\n"
            "    if $t >= $k:\n        $out[$v] = $t\nreturn $out",
        ],
        [
            "$t = {$v: $tab.get($v, 0) + $tab2.get($v, 0) for $v in $tab | $tab2}\nreturn {$v: $u for $v, $u in $t.items() if $u >= $k}",
            "$t = {$v: $tab.get($v, $m) + $tab2.get($v, $m) for $v in $tab}\nreturn {$v: $u for $v, $u in $t.items() if $u >= $k}",
            "$t = {$v: $tab.get($v, $m) + $tab2.get($v, $m) for $v in $tab | $tab2}\nreturn {$v: $u for $v, $u in $t.items() if $u > $k}",
            "return {$v: $tab.get($v, $m) + $tab2.get($v, $m) for $v in $tab | $tab2}",
        ],
        lambda g, c: (
            ({"a": c.k - 5, "b": g.num(0, 60)}, {"a": 5, "c": c.k - g.num(0, 3)})
            if g.rng.random() < 0.4
            else (_table(g, c.k - 9, c.k + 9, 2), _table(g, c.k - 9, c.k + 9, 2))
        ),
    ),
    family(
        "group",
        "tables",
        "group bucket by_rest",
        "xs:ints",
        {"k": ints(3, 12), "m": ints(4, 40)},
        ["Dict of the $xs above $m by their remainder of $k, in order.", "Group $xs over $m into lists by value modulo $k."],
        [
            "$out = {}\nfor $v in $xs:\n    if $v > $m:\n        $out.setdefault($v % $k, []).append($v)\nreturn $out",
            "$t = [$v for $v in $xs if $v > $m]\nreturn {$u % $k: [$v for $v in $t if $v % $k == $u % $k] for $u in $t}",
        ],
        [
            "$out = {}\nfor $v in $xs:\n    if $v >= $m:\n        $out.setdefault($v % $k, []).append($v)\nreturn $out",
            "$out = {}\nfor $v in $xs:\n    if $v > $m:\n        $out[$v % $k] = [$v]\nreturn $out",
            "$out = {}\nfor $v in $xs:\n    if $v > $m:\n        $out.setdefault($v // $k, []).append($v)\nreturn $out",
            "$out = {}\nfor $v in $xs:\n    $out.setdefault($v % $k, []).append($v)\nreturn $out",
        ],
        lambda g, c: (g.pick((g.nears(c.m, c.m + c.k, high=4), [c.m + 2, c.m + 2 + c.k, c.m + 3], [c.m, c.m + c.k])),),
    ),
    family(
        "bill",
        "tables",
        "bill price_of total_cost",
        "ws:words tab:dict",
        {"k": ints(2, 30), "m": ints(31, 70)},
        ["Sum of $tab over $ws, $k for a missing one, at most $m.", "Look up $ws in $tab (missing: $k) and add up, limited to $m."],
        [
            "return min(sum($tab.get($v, $k) for $v in $ws), $m)",
            "$out = 0\nfor $v in $ws:\n    $out += $tab.get($v, $k)\nreturn min($out, $m)",
        ],
        [
            "return min(sum($tab.get($v, 0) for $v in $ws), $m)",
            "return sum($tab.get($v, $k) for $v in $ws)",
            "return min(sum($tab.get($v, $k) for $v in set($ws)), $m)",
            "return min(sum($tab.get($v, $k) for $v in $ws), $m_up)",
        ],
        lambda g, c: ([g.pick("abc") for _ in range(g.num(0, 3))], {"a": g.num(1, 9), "b": g.pick((g.num(1, 20), c.m))}),
    ),
    family(
        "best_key",
        "tables",
        "best_key leader winner",
        "tab:dict",
        {"k": ints(5, 60), "p": SHORT},
        [
            "Key of the largest value of $tab above $k, the first by name on a tie; else $p.",
            "Name with the highest value over $k in $tab (ties: alphabetical), or $p.",
        ],
        [
            "$t = [$v for $v in sorted($tab) if $tab[$v] > $k]\nreturn max($t, key=$tab.get, default=$p)",
            "$out = [(-$u, $v) for $v, $u in $tab.items() if $u > $k]\nreturn min($out)[1] if $out else $p",
        ],
        [
            "$t = [$v for $v in sorted($tab) if $tab[$v] >= $k]\nreturn max($t, key=$tab.get, default=$p)",
            "$t = [$v for $v in $tab if $tab[$v] > $k]\nreturn max($t, key=$tab.get, default=$p)",
            "return max(sorted($tab), key=$tab.get, default=$p)",
            "$t = [$v for $v in sorted($tab) if $tab[$v] > $k]\nreturn max($t, default=$p)",
        ],
        lambda g, c: (
            g.pick(
                (
                    {"c": (t := c.k + g.num(1, 9)), "a": t},
                    {"b": c.k},
                    {"a": c.k + 8, "c": c.k + g.num(1, 5)},
                    _table(g, c.k - 9, c.k + 15),
                )
            ),
        ),
    ),
)
