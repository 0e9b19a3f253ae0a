"""Every TOML we ship parses, names the config class it fills, and fills it.

The name stands in a comment near the top of the file, so that the file itself holds nothing but config keys:

    # config: etude.parts:RunConfig
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from etude import config
from etude.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"^# config: ([\w.]+):(\w+)$", re.MULTILINE)


def shipped(root: Path = ROOT) -> list[Path]:
    return sorted((root / "recipes").rglob("*.toml"))


def problem(path: Path) -> str:
    """What is wrong with a shipped TOML, or nothing."""
    try:
        config.read_toml(path)
        named = NAMED.search(path.read_text())
        if named is None:
            return f"{path} does not say which config class it fills; add a line like `# config: etude.parts:RunConfig`"
        config.load(getattr(importlib.import_module(named[1]), named[2]), path)
    except (ConfigError, ImportError, AttributeError) as error:
        return f"{path}: {error}"
    return ""


def test_every_shipped_toml_fills_its_config_class():
    assert [text for path in shipped() if (text := problem(path))] == []


def test_every_recipe_folder_has_a_readme_and_a_run():
    folders = {path.parent for path in shipped()}
    assert [str(f) for f in sorted(folders) if not (f / "README.md").is_file()] == []


@pytest.mark.parametrize(
    "text, says",
    [
        ("a = \n", "is not TOML"),
        ("a = 1\n", "does not say which config class"),
        ("# config: etude.no_such_module:Config\na = 1\n", "No module named"),
        ("# config: etude.config:NoSuchClass\na = 1\n", "no attribute"),
        ("# config: etude.records:Version\nlineag = 1\n", "did you mean 'lineage'?"),
    ],
)
def test_a_toml_that_cannot_be_used_is_found(tmp_path, text, says):
    path = tmp_path / "recipes" / "x" / "run.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert shipped(tmp_path) == [path]
    assert says in problem(path)
