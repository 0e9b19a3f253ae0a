"""One TOML plus dotted overrides, read into frozen dataclasses.

A config class sits beside the code that reads it, marked `@config`; fields carry their doc string underneath and
their checks in `__post_init__`. A field that may change in a running job is `live(default)`; all others need a
restart. Secrets are written as `env:NAME` and resolved only where they are used.

    config = load(RunConfig, "recipes/nano/run.toml", ["trainer.lr=3e-4", "seed=1"])
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from etude.errors import ConfigError, nearest

C = TypeVar("C")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[C]) -> type[C]:
    """Class decorator: a frozen, keyword-only dataclass that `load` can fill."""
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


def live(default: Any) -> Any:
    """A field that may change while a run goes on, in a new config revision."""
    return dataclasses.field(default=default, metadata={"live": True})


def load(cls: type[C], path: str | Path | None = None, overrides: Iterable[str] = ()) -> C:
    """Read a TOML, apply `a.b=value` overrides, and build `cls`. Unknown keys name the nearest known one."""
    data: dict[str, Any] = {}
    if path is not None:
        data = read_toml(Path(path))
    return build(cls, apply_overrides(data, overrides))


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`data` with `a.b=value` applied in place, left to right."""
    for text in overrides:
        _override(data, text)
    return data


def read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no config file at {path}; give a path to a .toml file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _override(data: dict[str, Any], text: str) -> None:
    key, sep, raw = text.partition("=")
    if not sep or not key:
        raise ConfigError(f"override {text!r} should look like trainer.lr=3e-4")
    *parents, last = key.strip().split(".")
    for name in parents:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"override {text!r}: {name!r} is a value, not a table")
    data[last] = _value(raw.strip())


def _value(raw: str) -> Any:
    """An override's value as TOML would read it; a bare word is a string."""
    try:
        return tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        return raw


def build(cls: type[C], data: Mapping[str, Any], where: str = "") -> C:
    """Build a config class from plain data, checking names and types."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown config key {where + key!r}; {nearest(key, fields)}")
    values = {key: _coerce(value, hints[key], where + key) for key, value in data.items()}
    missing = [
        n for n, f in fields.items() if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"config needs {where + missing[0]!r} ({_name(hints[missing[0]])})")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where.rstrip('.') or 'config'}: {error}") from error


def _coerce(value: Any, hint: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}; {nearest(str(value), [str(a) for a in args])}")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None or (value == "none" and type(None) in args):
            return None
        return _coerce(value, next(a for a in args if a is not type(None)), where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where} should be a list, got {value!r}")
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else args
        if len(inner) != len(value):
            raise ConfigError(f"{where} should have {len(inner)} items, got {len(value)}")
        return tuple(_coerce(v, h, f"{where}[{i}]") for i, (v, h) in enumerate(zip(value, inner, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} should be a table, got {value!r}")
        return {k: _coerce(v, args[1], f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} should be a table, got {value!r}")
        return build(hint, value, where + ".")  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            raise ConfigError(f"{where} is {value!r}; {nearest(str(value), [e.value for e in hint])}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is not hint:
        raise ConfigError(f"{where} should be {hint.__name__}, got {value!r}")
    return value


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def resolved(value: Any) -> dict[str, Any]:
    """The whole config as plain data, for the run folder. Secrets stay references."""

    def plain(v: Any) -> Any:
        if dataclasses.is_dataclass(v) and not isinstance(v, type):
            return {f.name: plain(getattr(v, f.name)) for f in dataclasses.fields(v)}
        if isinstance(v, enum.Enum):
            return v.value
        if isinstance(v, Mapping):
            return {k: plain(x) for k, x in v.items()}
        if isinstance(v, (list, tuple)):
            return [plain(x) for x in v]
        return v

    return plain(value)


def write_resolved(value: Any, path: Path) -> None:
    """Write the resolved config beside a run, as JSON (machine-written)."""
    path.write_text(json.dumps(resolved(value), indent=2, sort_keys=True) + "\n")


def flat(data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Nested plain data as dotted names, as overrides write them."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= flat(value, f"{where}{key}.") if isinstance(value, Mapping) else {where + key: value}
    return out


def changed_fields(old: Any, new: Any, where: str = "") -> dict[str, bool]:
    """Dotted names that differ between two configs -> whether the field may change in a running job."""
    out: dict[str, bool] = {}
    for f in dataclasses.fields(old):
        a, b = getattr(old, f.name), getattr(new, f.name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            out |= changed_fields(a, b, f"{where}{f.name}.")
        elif a != b:
            out[where + f.name] = bool(f.metadata.get("live"))
    return out


def secret(reference: str) -> str:
    """The value behind `env:NAME`. Secrets are never written in a config."""
    scheme, _, name = reference.partition(":")
    if scheme != "env" or not name:
        raise ConfigError("a secret is written as env:NAME, never as its value")
    value = os.environ.get(name)
    if value is None:
        raise ConfigError(f"the environment variable {name} is not set; export it before the run")
    return value
