"""Function families over lists: rotating, chunking, windows, runs."""

from __future__ import annotations

from etude.tasks.katas.family import family, ints

FAMILIES = (
    family(
        "rotate",
        "lists",
        "rotate turn shift",
        "xs:ints",
        {"k": ints(1, 9), "m": ints(2, 60)},
        ["Rotate $xs left by $k and add $m to each.", "$xs turned left by $k places, every item plus $m."],
        [
            "if not $xs:\n    return []\n$i = $k % len($xs)\nreturn [$v + $m for $v in $xs[$i:] + $xs[:$i]]",
            "$t = len($xs)\nreturn [$xs[($i + $k) % $t] + $m for $i in range($t)]",
        ],
        [
            "if not $xs:\n    return []\n$i = $k % len($xs)\nreturn [$v + $m for $v in $xs[-$i:] + $xs[:-$i]]",
            "$i = $k % len($xs)\nreturn [$v + $m for $v in $xs[$i:] + $xs[:$i]]",
            "if not $xs:\n    return []\n$i = $k % len($xs)\nreturn $xs[$i:] + $xs[:$i]",
            "$t = len($xs)\nreturn [$xs[($i + $k_up) % $t] + $m for $i in range($t)]",
        ],
        lambda g, c: (g.pick(([], g.ints(0, 30, least=3, most=5), g.ints(0, 30, least=1, most=4))),),
    ),
    family(
        "chunk",
        "lists",
        "chunk batch pieces",
        "xs:ints",
        {"k": ints(2, 7), "p": ints(40, 99)},
        ["Split $xs into lists of $k, the last padded with $p.", "Lists of $k consecutive $xs; fill the last with $p."],
        [
            "$out = [$xs[$i:$i + $k] for $i in range(0, len($xs), $k)]\nif $out:\n    $out[-1] += [$p] * ($k - len($out[-1]))\nreturn $out",
            "$t = $xs + [$p] * (-len($xs) % $k)\nreturn [$t[$i:$i + $k] for $i in range(0, len($t), $k)]",
        ],
        [
            "return [$xs[$i:$i + $k] for $i in range(0, len($xs), $k)]",
            "$t = $xs + [$p] * ($k - len($xs) % $k)\nreturn [$t[$i:$i + $k] for $i in range(0, len($t), $k)]",
            "$t = $xs + [$p_up] * (-len($xs) % $k)\nreturn [$t[$i:$i + $k] for $i in range(0, len($t), $k)]",
            "$t = $xs + [$p] * (-len($xs) % $k_up)\nreturn [$t[$i:$i + $k_up] for $i in range(0, len($t), $k_up)]",
        ],
        lambda g, c: ([g.num(0, 30) for _ in range(g.pick((0, 1, c.k - 1, c.k, c.k + 1, g.num(2, 7))))],),
    ),
    family(
        "dedupe",
        "lists",
        "dedupe unique once",
        "xs:ints",
        {"k": ints(3, 50), "m": ints(2, 9)},
        [
            "Distinct $xs above $k in first-seen order, each times $m.",
            "Drop repeats and anything up to $k from $xs, keep order, multiply by $m.",
        ],
        [
            "return [$v * $m for $v in dict.fromkeys($xs) if $v > $k]",
            "$out = []\nfor $v in $xs:\n    if $v > $k and $v * $m not in $out:\n        $out.append($v * $m)\nreturn $out",
        ],
        [
            "return [$v * $m for $v in $xs if $v > $k]",
            "return [$v * $m for $v in sorted(set($xs)) if $v > $k]",
            "return [$v * $m for $v in dict.fromkeys($xs) if $v >= $k]",
            "return [$v for $v in dict.fromkeys($xs) if $v > $k]",
        ],
        lambda g, c: (g.pick(([c.k + 5, c.k + 2, c.k, c.k + 5], g.nears(c.k + 2, c.k, low=2, spread=3), g.nears(c.k, spread=5))),),
    ),
    family(
        "windows",
        "lists",
        "windows slide rolling",
        "xs:ints",
        {"k": ints(2, 4), "m": ints(6, 99)},
        ["Sums of every $k neighbours of $xs that are at least $m.", "Slide a window of $k over $xs; keep the sums from $m up."],
        [
            "$t = [sum($xs[$i:$i + $k]) for $i in range(len($xs) - $k_dn)]\nreturn [$v for $v in $t if $v >= $m]",
            "$out = []\nfor $i in range(len($xs) - $k + 1):\n    $t = sum($xs[$i:$i + $k])\n"
            "    if $t >= $m:\n        $out.append($t)\nreturn $out",
        ],
        [
            "$t = [sum($xs[$i:$i + $k]) for $i in range(len($xs))]\nreturn [$v for $v in $t if $v >= $m]",
            "$t = [sum($xs[$i:$i + $k]) for $i in range(len($xs) - $k_dn)]\nreturn [$v for $v in $t if $v > $m]",
            "$t = [sum($xs[$i:$i + $k]) for $i in range(len($xs) - $k)]\nreturn [$v for $v in $t if $v >= $m]",
            "return [sum($xs[$i:$i + $k]) for $i in range(len($xs) - $k_dn)]",
        ],
        lambda g, c: (
            g.pick(
                (
                    [c.m - c.k + 1] + [1] * (c.k - 1) + [0],
                    [c.m + 1] * g.num(1, c.k + 1),
                    [g.num(0, 2 * c.m // c.k + 2) for _ in range(g.num(2, 6))],
                )
            ),
        ),
    ),
    family(
        "stamp",
        "lists",
        "stamp every_nth mark",
        "xs:ints",
        {"k": ints(2, 4), "m": ints(30, 99)},
        ["Replace every $k-th of $xs (counting from 1) by $m.", "$xs with each $k-th item, counted from 1, set to $m."],
        [
            "return [$m if $i % $k == 0 else $v for $i, $v in enumerate($xs, 1)]",
            "$out = list($xs)\nfor $i in range($k_dn, len($out), $k):\n    $out[$i] = $m\nreturn $out",
        ],
        [
            "return [$m if $i % $k == 0 else $v for $i, $v in enumerate($xs)]",
            "return [$v for $i, $v in enumerate($xs, 1) if $i % $k]",
            "return [$m if $i % $k_up == 0 else $v for $i, $v in enumerate($xs, 1)]",
            "return [$m if $i == $k else $v for $i, $v in enumerate($xs, 1)]",
        ],
        lambda g, c: ([g.num(0, 20) for _ in range(g.pick((0, 1, c.k, 2 * c.k, c.k + 1, 6)))],),
    ),
    family(
        "top",
        "lists",
        "top best leaders",
        "xs:ints",
        {"k": ints(2, 4), "m": ints(5, 90)},
        ["The $k largest $xs above $m, largest first.", "$xs over $m, sorted down, at most $k of them."],
        [
            "return sorted([$v for $v in $xs if $v > $m], reverse=True)[:$k]",
            "$t = [$v for $v in $xs if $v > $m]\n$t.sort(reverse=True)\nreturn $t[:$k]",
        ],
        [
            "return sorted([$v for $v in $xs if $v > $m])[:$k]",
            "return sorted([$v for $v in $xs if $v >= $m], reverse=True)[:$k]",
            "return sorted([$v for $v in $xs if $v > $m], reverse=True)[:$k_up]",
            "return sorted($xs, reverse=True)[:$k]",
        ],
        lambda g, c: (g.pick((g.nears(c.m, low=1, high=3), [c.m + g.num(1, 20) for _ in range(c.k + 2)], g.nears(c.m, c.m + 9, low=3))),),
    ),
    family(
        "runs",
        "lists",
        "runs running build_up",
        "xs:ints",
        {"k": ints(20, 60), "m": ints(1, 19)},
        [
            "Running totals of $xs from $m; after one above $k start from $m again.",
            "Totals so far of $xs, starting at $m and reset to $m once over $k.",
        ],
        [
            "$out = []\n$t = $m\nfor $v in $xs:\n    $t += $v\n    $out.append($t)\n    if $t > $k:\n        $t = $m\nreturn $out",
        ],
        [
            "$out = []\n$t = $m\nfor $v in $xs:\n    $t += $v\n    $out.append($t)\n    if $t >= $k:\n        $t = $m\nreturn $out",
            "$out = []\n$t = $m\nfor $v in $xs:\n    $t += $v\n    $out.append($t)\n    if $t > $k:\n        $t = 0\nreturn $out",
            "$out = []\n$t = $m\nfor $v in $xs:\n    $t += $v\n    $out.append($t)\nreturn $out",
            "$out = []\n$t = 0\nfor $v in $xs:\n    $t += $v\n    $out.append($t)\n    if $t > $k:\n        $t = $m\nreturn $out",
        ],
        lambda g, c: (
            g.pick(([c.k - c.m, 2, 3], [c.k - c.m + 1, g.num(1, 9)], [g.num(c.k, c.k + 9), g.num(1, 9), 1], g.ints(1, 20, most=4))),
        ),
    ),
    family(
        "pad",
        "lists",
        "pad fill_up stretch",
        "xs:ints",
        {"k": ints(2, 6), "p": ints(40, 99)},
        [
            "Pad $xs with $p on the left to $k items; cut longer ones to the last $k.",
            "The last $k of $xs, filled with $p in front when there are fewer.",
        ],
        [
            "return [$p] * ($k - len($xs)) + $xs[-$k:]",
            "$out = $xs[-$k:]\nwhile len($out) < $k:\n    $out = [$p] + $out\nreturn $out",
        ],
        [
            "return $xs[-$k:] + [$p] * ($k - len($xs))",
            "return [$p] * ($k - len($xs)) + $xs",
            "return [$p] * ($k - len($xs)) + $xs[:$k]",
            "return [$p] * ($k_up - len($xs)) + $xs[-$k_up:]",
        ],
        lambda g, c: ([g.num(0, 30) for _ in range(g.pick((0, 1, c.k - 1, c.k, c.k + 1, c.k + 2)))],),
    ),
    family(
        "split_low",
        "lists",
        "split_low sift divide",
        "xs:ints",
        {"k": ints(5, 50), "m": ints(51, 99)},
        ["The $xs below $k, then $m, then the rest, both in order.", "Move $xs under $k to the front, put $m between them and the others."],
        [
            "return [$v for $v in $xs if $v < $k] + [$m] + [$v for $v in $xs if $v >= $k]",
            "$out = [$v for $v in $xs if $v < $k]\n$t = [$v for $v in $xs if $v >= $k]\nreturn $out + [$m] + $t",
        ],
        [
            "return [$v for $v in $xs if $v <= $k] + [$m] + [$v for $v in $xs if $v > $k]",
            "return [$v for $v in $xs if $v < $k] + [$v for $v in $xs if $v >= $k]",
            "return [$v for $v in $xs if $v < $k] + [$m] + [$v for $v in $xs if $v > $k]",
            "return sorted([$v for $v in $xs if $v < $k]) + [$m] + sorted([$v for $v in $xs if $v >= $k])",
        ],
        lambda g, c: (g.nears(c.k, high=4),),
    ),
)
