"""Task folders: what is written is read back, and every way of being malformed names the file."""

from __future__ import annotations

import json

import pytest

from etude.errors import TaskError
from etude.records import to_json
from etude.tasks.formats import read_task, write_task
from etude.tasks.source import make_task


@pytest.fixture
def folder(tmp_path):
    return write_task(make_task(3), tmp_path / "task")


def head(folder, **changes):
    data = json.loads((folder / "task.json").read_text())
    for key, value in changes.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    (folder / "task.json").write_text(json.dumps(data))


@pytest.mark.parametrize("split", ["train", "heldout", "unseen"])
def test_round_trip(tmp_path, split):
    task = make_task(4, split)
    assert to_json(read_task(write_task(task, tmp_path / "a" / "b"))) == to_json(task)
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_the_folder_can_be_looked_at(folder):
    assert (folder / "workspace" / "pyproject.toml").is_file()
    assert list((folder / "hidden").rglob("*.py"))
    assert list((folder / "solution").rglob("*.py"))
    assert not list((folder / "workspace").rglob("*hidden*"))


def test_an_existing_folder_is_not_written_over(folder):
    with pytest.raises(TaskError, match="exists already"):
        write_task(make_task(4), folder)


def test_a_task_without_files_cannot_be_a_folder(tmp_path):
    with pytest.raises(TaskError, match="in a store"):
        write_task(make_task(4).replace(files=()), tmp_path / "x")


def test_a_bad_path_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(TaskError, match="plain relative path"):
        write_task(make_task(4).replace(files=(("../up.py", ""),)), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_half_written_folders_are_refused(folder, tmp_path):
    with pytest.raises(TaskError, match="no task folder"):
        read_task(tmp_path / "nothing")
    draft = folder.rename(tmp_path / ".task.tmp-1")
    with pytest.raises(TaskError, match="half-written"):
        read_task(draft)
    whole = draft.rename(folder)
    (whole / "task.json").unlink()
    with pytest.raises(TaskError, match=r"has no task\.json"):
        read_task(whole)


def test_changed_or_lost_files_are_noticed(folder):
    module = next((folder / "hidden").rglob("*.py"))
    text = module.read_text()
    module.write_text(text + "# more\n")
    with pytest.raises(TaskError, match="content hash"):
        read_task(folder)
    module.unlink()
    with pytest.raises(TaskError, match="content hash"):
        read_task(folder)
    module.write_text(text)
    assert read_task(folder).id


def test_without_a_hash_an_edit_is_taken(folder):
    head(folder, hash=None, prompt="Do it.")
    assert read_task(folder).prompt == "Do it."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "has no 'prompt'"),
        ({"grader": None}, "has no 'grader'"),
        ({"format": 9}, "format 9"),
        ({"prompt": 3}, "prompt should be a string"),
        ({"grader": []}, "grader should be an object"),
        ({"grader": {"fail_to_pass": ["a"], "pass_to_pas": []}}, "did you mean 'pass_to_pass'"),
        ({"grader": {"fail_to_pass": [], "pass_to_pass": []}}, "fail_to_pass is empty"),
        ({"grader": {"fail_to_pass": "a", "pass_to_pass": []}}, "should be a list"),
        ({"tools": {"max_result_chars": "many"}}, "tools"),
        ({"network": "all"}, "list of strings"),
        ({"promt": "x"}, "did you mean 'prompt'"),
    ],
)
def test_malformed_heads_name_the_file_and_the_key(folder, changes, message):
    head(folder, **changes)
    with pytest.raises(TaskError, match=message) as caught:
        read_task(folder)
    assert "task.json" in str(caught.value)


def test_a_head_that_is_no_object(folder):
    for text in ("{", "[]", "\xff"):
        (folder / "task.json").write_text(text, encoding="latin-1")
        with pytest.raises(TaskError, match=r"task\.json"):
            read_task(folder)


def test_links_binary_files_and_empty_workspaces_are_refused(folder):
    (folder / "workspace" / "link.py").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="is a link"):
        read_task(folder)
    (folder / "workspace" / "link.py").unlink()
    (folder / "workspace" / "x.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="not UTF-8"):
        read_task(folder)
    for path in sorted((folder / "workspace").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(TaskError, match="no files"):
        read_task(folder)
