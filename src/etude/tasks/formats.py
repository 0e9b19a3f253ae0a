"""A task as a folder, so that tasks can be looked at, edited, shared and checked.

    <task>/
        task.json       prompt, grader, tools, provenance ...; written last, so a folder without it is half-written
        workspace/      the files the agent starts from
        hidden/         test files it never sees
        solution/       the changed files as they were before the deletion

A folder is made beside its place as `.<name>.tmp-*` and renamed. The recorded hash covers everything that decides an
outcome; remove `"hash"` from task.json after an edit by hand, and it is computed again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from etude.errors import RecordError, TaskError, nearest
from etude.records import Difficulty, Grader, Provenance, Record, Task, ToolPolicy, from_dict, to_dict
from etude.tasks.grade import workspace_path
from etude.tasks.source import build_task

FORMAT = 1
_KEYS = ("format", "id", "hash", "prompt", "start", "split", "network", "grader", "tools", "provenance", "difficulty")
_REQUIRED = ("format", "id", "prompt", "grader", "provenance")
R = TypeVar("R", bound=Record)


def write_task(task: Task, folder: str | Path) -> Path:
    """Write the task as `folder`, which must not exist yet. Only tasks whose files travel in the record."""
    folder = Path(folder)
    if not task.files:
        raise TaskError(f"task {task.id} keeps its workspace in a store; a folder needs its files")
    if folder.exists():
        raise TaskError(f"{folder} exists already; choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        for part, files in (("workspace", task.files), ("hidden", task.grader.hidden), ("solution", task.solution)):
            _write_tree(draft / part, files, task.id)
        (draft / "task.json").write_text(json.dumps(_head(task), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.chmod(0o755)
        os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def read_task(folder: str | Path) -> Task:
    """The task of a folder. Anything missing, unknown or changed is a TaskError that names the file."""
    folder = Path(folder)
    head_path = folder / "task.json"
    if folder.name.startswith(".") and ".tmp-" in folder.name:
        raise TaskError(f"{folder} is half-written; make the task again")
    if not folder.is_dir():
        raise TaskError(f"no task folder at {folder}")
    if not head_path.is_file():
        raise TaskError(f"{folder} has no task.json, so it is half-written or no task folder")
    head = _read_head(head_path)
    files = _read_tree(folder / "workspace")
    if not files:
        raise TaskError(f"{folder / 'workspace'} has no files; the agent needs something to start from")
    grader = _record(head["grader"], Grader, head_path, "grader")
    grader = grader.replace(hidden=tuple(_read_tree(folder / "hidden").items()))
    task = build_task(
        id=_text(head, "id", head_path),
        prompt=_text(head, "prompt", head_path),
        files=files,
        solution=_read_tree(folder / "solution"),
        grader=grader,
        provenance=_record(head["provenance"], Provenance, head_path, "provenance"),
        split=_text(head, "split", head_path, "train"),
        tools=_record(head.get("tools", {}), ToolPolicy, head_path, "tools"),
        start=_text(head, "start", head_path, ""),
        network=tuple(_texts(head.get("network", []), "network", head_path)),
        difficulty=_record(head.get("difficulty", {}), Difficulty, head_path, "difficulty"),
    )
    if not task.grader.fail_to_pass:
        raise TaskError(f"{head_path}: grader.fail_to_pass is empty, so nothing can decide the task")
    recorded = _text(head, "hash", head_path, task.hash)
    if recorded != task.hash:
        raise TaskError(
            f"{folder}: content hash is {task.hash}, task.json says {recorded}: files were changed or lost; "
            'remove "hash" from task.json if you changed them on purpose'
        )
    return task


def _head(task: Task) -> dict[str, Any]:
    grader = _plain(task.grader)
    del grader["hidden"]
    return {
        "format": FORMAT,
        "id": task.id,
        "hash": task.hash,
        "prompt": task.prompt,
        "start": task.start,
        "split": task.split,
        "network": list(task.network),
        "grader": grader,
        "tools": _plain(task.tools),
        "provenance": _plain(task.provenance),
        "difficulty": _plain(task.difficulty),
    }


def _plain(record: Record) -> dict[str, Any]:
    data = to_dict(record)
    del data["record"], data["schema"]
    return data


def _write_tree(root: Path, files: tuple[tuple[str, str], ...], task_id: str) -> None:
    for path, text in files:
        if workspace_path(path) != path:
            raise TaskError(f"task {task_id} has a file at {path!r}, which is not a plain relative path")
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode())


# ---------------------------------------------------------------------------------------------------
# Reading


def _read_head(path: Path) -> dict[str, Any]:
    try:
        head = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise TaskError(f"{path} should hold an object, found a {type(head).__name__}")
    for key in head:
        if key not in _KEYS:
            raise TaskError(f"{path} has an unknown key {key!r}; {nearest(key, _KEYS)}")
    for key in _REQUIRED:
        if key not in head:
            raise TaskError(f"{path} has no {key!r}")
    if head["format"] != FORMAT:
        raise TaskError(f"{path} has format {head['format']!r}, this etude reads format {FORMAT}")
    return head


def _read_tree(root: Path) -> dict[str, str]:
    """{path: text} of a folder; links and files that are no text are refused."""
    out: dict[str, str] = {}
    if not root.exists():
        return out
    for current, folders, names in os.walk(root):
        for name in [*folders, *names]:
            if (Path(current) / name).is_symlink():
                raise TaskError(f"{Path(current) / name} is a link; a task holds plain files only")
        folders.sort()
        for name in sorted(names):
            path = Path(current) / name
            try:
                out[path.relative_to(root).as_posix()] = path.read_bytes().decode()
            except UnicodeDecodeError as error:
                raise TaskError(f"{path} is not UTF-8 text: {error}") from error
    return dict(sorted(out.items()))


def _record(data: Any, cls: type[R], path: Path, key: str) -> R:
    if not isinstance(data, Mapping):
        raise TaskError(f"{path}: {key} should be an object, found a {type(data).__name__}")
    try:
        return from_dict({"record": cls.__name__, "schema": cls.SCHEMA, **data}, cls)
    except RecordError as error:
        raise TaskError(f"{path}: {key}: {error}") from error


def _text(head: Mapping[str, Any], key: str, path: Path, default: str | None = None) -> str:
    value = head.get(key, default)
    if not isinstance(value, str):
        raise TaskError(f"{path}: {key} should be a string, found {value!r}")
    return value


def _texts(value: Any, key: str, path: Path) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TaskError(f"{path}: {key} should be a list of strings, found {value!r}")
    return value
