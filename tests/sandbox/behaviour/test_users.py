"""The behaviour suite once more, as a user without any privilege."""

from __future__ import annotations

import re

import pytest


@pytest.mark.slow
def test_the_same_as_an_ordinary_user(as_ordinary_user) -> None:
    """Client, sandboxd and sandboxes belong to that user; the namespace backend then does without control groups."""
    said = as_ordinary_user("tests/sandbox/behaviour", "-m", "not slow", "-k", "namespace or landlock")
    passed = re.search(r"(\d+) passed", said) or re.search(r"^(\.+)", said, re.MULTILINE)
    assert passed, said
    assert "failed" not in said
