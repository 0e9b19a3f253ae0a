"""The error tree: drawn as it is, able to cross a process boundary, and helpful."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from etude import errors
from etude.errors import DeadlineError, EtudeError, InfraError, IntegrityError, MissingExtra, UserError, nearest

ALL = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, EtudeError)]


def make(cls: type[EtudeError]) -> EtudeError:
    arguments = {DeadlineError: ("a slot", 3.0), MissingExtra: ("vllm", "vllm", "the vLLM backend")}
    return cls(*arguments.get(cls, ("what, value, what to do",)))


def drawn_tree() -> dict[str, str]:
    """class -> parent, read from the drawing in the module docstring (four columns a level)."""
    parents, trail = {}, []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"^    ([| `-]*)(\w+Error|MissingExtra)\b", line):
            depth = len(match[1]) // 4
            trail = [*trail[:depth], match[2]]
            parents[match[2]] = trail[depth - 1] if depth else ""
    return parents


def test_the_tree_in_the_docstring_is_the_tree():
    real = {c.__name__: c.__bases__[0].__name__ if c is not EtudeError else "" for c in ALL}
    assert drawn_tree() == real


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_an_error_crosses_a_process_boundary(cls):
    error = make(cls)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert str(back) == str(error)


def test_user_errors_are_value_errors_and_infrastructure_errors_are_not():
    assert issubclass(UserError, ValueError)
    assert not issubclass(InfraError, ValueError)
    assert not issubclass(IntegrityError, (UserError, InfraError))


def test_messages_name_the_remedy():
    assert "pip install 'etude[vllm]'" in str(make(MissingExtra))
    deadline = DeadlineError("a free sandbox", 2.5)
    assert str(deadline).startswith("waited 2.5 s for a free sandbox")
    assert (deadline.waited_for, deadline.timeout_s) == ("a free sandbox", 2.5)


def test_nearest_gives_the_closest_word_or_the_list():
    assert nearest("temprature", ["top_p", "temperature"]) == "did you mean 'temperature'?"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
