"""Deletion: only the function goes, everything else keeps its bytes, and what cannot be cut cleanly is refused."""

from __future__ import annotations

import ast

import pytest

from etude.errors import TaskError
from etude.tasks.deletion import Refusal, ast_hash, delete, find, functions, source_hash
from etude.tasks.katas import make_package


def one(source, name="f", level="body"):
    return delete({"m.py": source}, "m.py", name, level).files["m.py"]


def test_body_keeps_signature_and_docstring_and_every_other_line(shop):
    cut = delete(shop, "shop/stats.py", "mean")
    before, after = shop["shop/stats.py"].splitlines(), cut.files["shop/stats.py"].splitlines()
    at = after.index("    raise NotImplementedError")
    assert after[at - 1] == '    """Mean of the values, rounded down; 7 when there are none."""'
    assert before[:at] == after[:at]
    assert before[at + 5 :] == after[at + 1 :]
    assert "empty list has no mean" in cut.deleted
    assert {p: t for p, t in cut.files.items() if p != "shop/stats.py"} == {p: t for p, t in shop.items() if p != "shop/stats.py"}
    assert cut.restoring == {"shop/stats.py": shop["shop/stats.py"]}
    assert cut.signature == "mean(values)"
    assert "+    result = math.floor(sum(values) / len(values))" in cut.diff


BODIES = {
    "one line": ("def f(x): return x\n\n\ny = 1\n", "def f(x):\n    raise NotImplementedError\n\n\ny = 1\n"),
    "no docstring": ("def f(x):\n    # why\n    return x\n", "def f(x):\n    raise NotImplementedError\n"),
    "long signature": (
        "def f(\n    x: dict = {1: 2},\n    g=lambda a: a,\n) -> int:\n    return x\n",
        "def f(\n    x: dict = {1: 2},\n    g=lambda a: a,\n) -> int:\n    raise NotImplementedError\n",
    ),
    "comment below": (
        "def f():\n    return 1\n    # the end\n\n\n# next\nz = 2\n",
        "def f():\n    raise NotImplementedError\n\n\n# next\nz = 2\n",
    ),
    "two-line docstring": (
        'def f():\n    """A\n    b."""\n    return 1\n',
        'def f():\n    """A\n    b."""\n    raise NotImplementedError\n',
    ),
    "no final newline": ("def f():\n    return 1", "def f():\n    raise NotImplementedError\n"),
    "decorated": ("@cache\ndef f():\n    return 1\n", "@cache\ndef f():\n    raise NotImplementedError\n"),
    "async": ("async def f():\n    return 1\n", "async def f():\n    raise NotImplementedError\n"),
    "carriage returns": ("def f():\r\n    return 1\r\n", "def f():\r\n    raise NotImplementedError\r\n"),
    "not ascii": ('def f(x="\u00e9\u00e8"): return "\u00e9"\n', 'def f(x="\u00e9\u00e8"):\n    raise NotImplementedError\n'),
    "tabs": ("def f():\n\treturn 1\n", "def f():\n\traise NotImplementedError\n"),
}


@pytest.mark.parametrize("name", BODIES)
def test_body_forms(name):
    source, expected = BODIES[name]
    assert one(source) == expected


def test_method_body():
    source = 'class A:\n    """Doc."""\n\n    def f(self, x):\n        """Say."""\n        return x\n\n    def g(self):\n        return 2\n'
    assert one(source, "A.f") == source.replace("        return x\n", "        raise NotImplementedError\n")


def test_definition_leaves_no_gap():
    source = '"""M."""\n\n\ndef a():\n    return 1\n\n\n@dec\ndef f():\n    return 2\n    # end\n\n\ndef b():\n    return 3\n'
    assert one(source, level="definition") == '"""M."""\n\n\ndef a():\n    return 1\n\n\ndef b():\n    return 3\n'
    assert one("def a():\n    return 1\n\n\ndef f():\n    return 2\n", level="definition") == "def a():\n    return 1\n"
    assert one("def f():\n    return 2\n\n\nx = 1\n", level="definition") == "x = 1\n"


def test_definition_of_a_method():
    source = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    assert one(source, "A.f", "definition") == "class A:\n    def g(self):\n        return 2\n"
    assert one("class A:\n    def f(self):\n        return 1\n", "A.f", "definition") == "class A:\n    pass\n"


def test_definition_takes_exports_reexports_and_dead_imports_along(shop):
    cut = delete(shop, "shop/stats.py", "mean", "definition")
    assert cut.files["shop/__init__.py"] == '"""A shop."""\n\nfrom shop.stats import total\n\n__all__ = ["total"]\n'
    assert "import math" not in cut.files["shop/stats.py"]
    assert "import re" in cut.files["shop/stats.py"]
    assert "mean" not in cut.files["shop/stats.py"]
    assert "\n\n\n\n" not in cut.files["shop/stats.py"]
    assert set(cut.restoring) == {"shop/__init__.py", "shop/stats.py"}
    assert {**cut.files, **cut.restoring} == shop


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"m.py": "def f():\n    return 1\n\n\nx = f()\n"}, "needed_on_import"),
        ({"m.py": "def f(a):\n    return 1\n\n\n@f\ndef g():\n    return 2\n"}, "needed_on_import"),
        ({"m.py": "def f():\n    return 1\n", "n.py": "from m import f\n\n\ndef g():\n    return f()\n"}, "still_imported"),
        ({"m.py": "def f():\n    return 1\n", "n.py": "def g():\n    from m import f\n\n    return f()\n"}, "still_imported"),
        ({"m.py": "__all__ = [n for n in ('f',)]\n\n\ndef f():\n    return 1\n"}, "unsupported"),
        ({"m.py": "def f():\n    return 1\n\n\ndef f():\n    return 2\n"}, "unsupported"),
        ({"m.py": "def f(:\n"}, "unparsable"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_reason(files, reason):
    with pytest.raises(Refusal) as caught:
        delete(files, "m.py", "f", "definition")
    assert caught.value.reason == reason


def test_a_function_of_only_a_docstring_is_refused():
    with pytest.raises(Refusal, match="no body besides"):
        one('def f():\n    """Only this."""\n')


def test_unknown_names_are_told_with_the_nearest():
    with pytest.raises(TaskError, match="did you mean 'mean'"):
        one("def mean():\n    return 1\n", "maen")
    with pytest.raises(TaskError, match="no class 'B'"):
        one("class A:\n    pass\n", "B.f")
    with pytest.raises(TaskError, match=r"no file 'x\.py'"):
        delete({"m.py": ""}, "x.py", "f")


def test_every_function_of_many_packages_can_be_cut_and_restored():
    for seed in range(25):
        package = make_package(seed)
        for kata in package.functions:
            for level in ("body", "definition"):
                if level == "definition" and package.callers(kata):
                    with pytest.raises(Refusal):
                        delete(package.files, kata.path, kata.qualname, level)
                    continue
                cut = delete(package.files, kata.path, kata.qualname, level)
                assert kata.correct_body not in cut.files[kata.path]
                assert {**cut.files, **cut.restoring} == package.files
                assert "\n\n\n\n" not in cut.files[kata.path]
                if level == "body":
                    stub = package.files[kata.path].replace(
                        kata.source, kata.with_body(" " * (8 if kata.is_method else 4) + "raise NotImplementedError")
                    )
                    assert cut.files[kata.path] == stub


def test_hash_ignores_names_and_docstrings_but_not_constants():
    a = "def f(xs):\n    '''Doc.'''\n    return sum(v for v in xs if v > 3)\n"
    b = "def g(items: list) -> int:\n    return sum(x for x in items if x > 3)\n"
    c = a.replace("3", "4")
    assert source_hash(a, "f") == source_hash(b, "g")
    assert source_hash(a, "f") != source_hash(c, "f")
    assert source_hash(a, "f") != source_hash(a.replace("sum", "max"), "f")


def test_hash_leaves_the_tree_alone():
    tree = ast.parse("def f(xs):\n    return xs\n")
    node, _ = find(tree, "f", "m.py")
    before = ast.dump(tree)
    ast_hash(node)
    assert ast.dump(tree) == before


def test_functions_lists_methods_with_their_class():
    assert [name for name, _ in functions("def a():\n    pass\n\n\nclass B:\n    def c(self):\n        pass\n")] == ["a", "B.c"]
