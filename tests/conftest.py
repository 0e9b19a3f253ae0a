"""Shared by all tests: a clean environment, no clock in hypothesis, and instances of every record made from type hints."""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
import types
import typing
from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from etude.events import KINDS
from etude.records import Record
from etude.schemas import EVENT_FIELDS

# Threads that wait without spinning: on a busy machine two spinning ones took 530 s where these took 26. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; tests that interrupt a child would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is not a failing test; the same examples every time, so that a red run can be repeated.
SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile("etude", deadline=None, derandomize=True, suppress_health_check=SLOW_IS_FINE)
settings.load_profile("etude")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ETUDE_* variable of the person running the tests reaches them."""
    for name in [name for name in os.environ if name.startswith("ETUDE_")]:
        monkeypatch.delenv(name)


# ---------------------------------------------------------------------------------------------------
# Records from their type hints

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
DTYPES = ("<i4", "<f4", "|b1", "<i2", "|u1", "<u2", "<i8", "<f2")


def strategy_for(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint as a record field may hold them; floats are finite, since JSON has no others."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(strategy_for(a) for a in args))
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return st.lists(strategy_for(args[0]), max_size=2).map(tuple)
        return st.tuples(*(strategy_for(a) for a in args))
    if origin is dict:
        return st.dictionaries(st.text(max_size=6), strategy_for(args[1]), max_size=2)
    if hint is Any:
        return JSON_VALUES
    if hint is np.ndarray:
        shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
        return st.tuples(st.sampled_from(DTYPES), shapes).map(
            lambda kind: np.arange(np.prod(kind[1], dtype=int)).astype(kind[0]).reshape(kind[1])
        )
    if isinstance(hint, type) and issubclass(hint, Record):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: strategy_for(hints[f.name]) for f in dataclasses.fields(hint)})  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return {
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=8),
        bool: st.booleans(),
        type(None): st.none(),
    }[hint]


def smallest(hint: Any) -> Any:
    """One plain value of a type hint: required fields only, shortest collections."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return smallest(next(a for a in args if a is not type(None)))
    if origin is tuple:
        return () if len(args) == 2 and args[1] is Ellipsis else tuple(smallest(a) for a in args)
    if origin is dict:
        return {}
    if hint is np.ndarray:
        return np.zeros(2, dtype=np.int32)
    if isinstance(hint, type) and issubclass(hint, Record):
        hints = typing.get_type_hints(hint)
        missing = dataclasses.MISSING
        needed = [f for f in dataclasses.fields(hint) if f.default is missing and f.default_factory is missing]  # type: ignore[arg-type]
        return hint(**{f.name: smallest(hints[f.name]) for f in needed})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint))
    return {int: 1, float: 0.5, str: "x", bool: True}[hint]


@pytest.fixture(scope="session")
def record_strategy() -> Callable[[type[Record]], st.SearchStrategy[Any]]:
    """record class -> hypothesis strategy over its instances, every field drawn."""
    return strategy_for


@pytest.fixture(scope="session")
def smallest_record() -> Callable[[type[Record]], Any]:
    """record class -> one instance with required fields only."""
    return smallest


@pytest.fixture(scope="session")
def event_fields() -> Callable[[str], dict[str, Any]]:
    """event kind -> the fields it requires, with values of the types that the schema gives them."""
    values = {"integer": 1, "number": 0.5, "string": "x", "boolean": True, "object": {}}

    def fields(kind: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name in KINDS[kind]:
            schema = EVENT_FIELDS[name]
            allowed = schema.get("type", "integer")
            out[name] = schema["enum"][0] if "enum" in schema else values[allowed if isinstance(allowed, str) else allowed[0]]
        return out

    return fields
