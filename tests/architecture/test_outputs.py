"""Whatever etude writes for others has a schema in docs/schemas: records, events, and every `--json` output."""

from __future__ import annotations

import json
from pathlib import Path

from etude import cli, events, schemas

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"


def commands_with_json(commands: dict[str, cli.Command]) -> list[str]:
    return [name for name in commands if any("--json" in a.option_strings for a in cli.parser_for(name)._actions)]


def missing_schemas(commands: dict[str, cli.Command], folder: Path) -> list[str]:
    """Commands whose `--json` output, records and events whose form, has no file in a folder."""
    missing = [name for name in commands_with_json(commands) if not (folder / f"{commands[name].schema or '-'}.json").is_file()]
    missing += [cls.__name__ for cls in schemas.record_classes() if not (folder / f"{cls.__name__}.json").is_file()]
    described = set()
    if (folder / "event.json").is_file():
        described = {kind["title"] for kind in json.loads((folder / "event.json").read_text())["oneOf"]}
    missing += sorted(set(events.KINDS) - described)
    missing += [name for name in ("bench", "report") if not (folder / f"{name}.json").is_file()]
    return missing


def test_every_output_has_a_schema_file():
    assert "doctor" in commands_with_json(cli.COMMANDS)
    assert missing_schemas(cli.COMMANDS, FOLDER) == []


def test_a_missing_schema_is_found(tmp_path):
    schemas.write(tmp_path)
    assert missing_schemas(cli.COMMANDS, tmp_path) == []
    (tmp_path / "Version.json").unlink()
    (tmp_path / "eval.json").unlink()
    assert missing_schemas(cli.COMMANDS, tmp_path) == ["eval", "Version"]
    nameless = {**cli.COMMANDS, "doctor": cli.COMMANDS["doctor"]._replace(schema="")}
    assert "doctor" in missing_schemas(nameless, FOLDER)
