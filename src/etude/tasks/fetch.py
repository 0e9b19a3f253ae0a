"""Where code comes from: a folder, an sdist or wheel file, or a package name on the index. Nothing of it is executed.

    source = read_source("inflection", cache)        # "inflection==0.5.1", "dist/x-1.0.tar.gz", "./my-project" work too

`pip download` runs a package's build backend to learn its metadata, so the index is read here: the simple page, the
newest source distribution that this Python may use, checked against the hash the index gives, kept in `cache`. What is
in the cache is not asked for again. PIP_INDEX_URL and PIP_CERT are honoured.

Archives are unpacked in memory: only plain files, only inside of their top folder, bounded in size and number.
"""

from __future__ import annotations

import email
import enum
import hashlib
import html.parser
import io
import os
import re
import ssl
import stat
import sys
import tarfile
import tomllib
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.errors import TaskError, UserError

INDEX = "https://pypi.org/simple"
MAX_ARCHIVE = 32 * 2**20
MAX_FILES = 4000
MAX_BYTES = 48 * 2**20
_TIMEOUT_S = 60.0
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[\w.!+-]+))?\Z")
_SKIPPED = {".git", ".hg", ".svn", "__pycache__", ".tox", ".nox", ".venv", "venv", "node_modules"}


class NoSource(TaskError):
    """There is no usable source; `reason` is a value of `packages.Skip`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Origin(enum.StrEnum):
    FOLDER = "folder"
    FILE = "file"
    INDEX = "index"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tree of files with what is known about it."""

    name: str
    version: str
    licence: str
    origin: Origin
    where: str
    """Path or URL."""
    digest: str
    """sha256 of the archive, or of the folder's files."""
    files: Mapping[str, bytes]
    requires: tuple[str, ...] = ()
    """Requires-Dist of its metadata, extras included."""


def read_source(spec: str, cache: Path) -> Source:
    path = Path(spec)
    if path.is_dir():
        files = _folder(path)
        return _described(files, Origin.FOLDER, str(path.resolve()), _tree_digest(files), path.resolve().name)
    if path.is_file():
        data = path.read_bytes()
        return _described(unpack(data, path.name), Origin.FILE, str(path.resolve()), hashlib.sha256(data).hexdigest(), path.name)
    match = _NAME.match(spec)
    if match is None:
        raise UserError(f"{spec!r} is no folder, no file and no package name; a version is asked for as name==1.0")
    name, data, where = _from_index(normal(match["name"]), match["version"] or "", cache)
    return _described(unpack(data, name), Origin.INDEX, where, hashlib.sha256(data).hexdigest(), name)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _tree_digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _folder(root: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    total = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and not Path(folder, f).is_symlink())
        for name in sorted(names):
            path = Path(folder, name)
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode):
                continue
            total += info.st_size
            if total > MAX_BYTES or len(files) >= MAX_FILES:
                raise NoSource("too_large", f"{root} has more than {MAX_FILES} files or {MAX_BYTES} bytes")
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


# ---------------------------------------------------------------------------------------------------
# Archives


def unpack(data: bytes, name: str) -> dict[str, bytes]:
    """{path: content} of an sdist or wheel, without its top folder where everything lies in one."""
    files: dict[str, bytes] = {}
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for member in archive.infolist():
                    if not member.is_dir() and stat.S_IFMT(member.external_attr >> 16) in (0, stat.S_IFREG):
                        with archive.open(member) as inside:
                            _add(files, member.filename, inside.read(MAX_BYTES + 1), name)
        else:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as archive:
                for info in archive:
                    file = archive.extractfile(info) if info.isfile() else None
                    if file is not None:
                        _add(files, info.name, file.read(MAX_BYTES + 1), name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        raise NoSource("unreadable", f"{name} is no archive that can be read: {error}") from error
    tops = {path.split("/")[0] for path in files}
    if len(tops) == 1 and all("/" in path for path in files):
        top = tops.pop()
        files = {path[len(top) + 1 :]: content for path, content in files.items()}
    return files


def _add(files: dict[str, bytes], path: str, content: bytes, archive: str) -> None:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or path.startswith("/") or "\0" in path or "\\" in path:
        raise NoSource("unreadable", f"{archive} has a member outside of its folder: {path!r}")
    files["/".join(parts)] = content
    if len(files) > MAX_FILES or sum(map(len, files.values())) > MAX_BYTES:
        raise NoSource("too_large", f"{archive} has more than {MAX_FILES} files or {MAX_BYTES} bytes")


def _described(files: Mapping[str, bytes], origin: Origin, where: str, digest: str, fallback: str) -> Source:
    """Name, version, licence and requirements, from PKG-INFO or METADATA, else from pyproject.toml."""
    if not any(path.endswith(".py") for path in files):
        raise NoSource("not_python", f"{where} has no Python file")
    found = [p for p in files if p == "PKG-INFO" or re.fullmatch(r"[^/]+\.dist-info/METADATA", p)]
    name = version = licence = ""
    requires: tuple[str, ...] = ()
    if found:
        head = email.message_from_bytes(files[found[0]])
        name, version = str(head["Name"] or ""), str(head["Version"] or "")
        stated_lines = str(head["License-Expression"] or head["License"] or "").strip().splitlines()
        licence = stated_lines[0] if stated_lines else ""
        trove = [str(c).split(" :: ")[-1] for c in head.get_all("Classifier", []) if str(c).startswith("License ::")]
        licence = licence if 0 < len(licence) <= 60 else ", ".join(trove)
        listed = next((files[p].decode("utf-8", "replace") for p in files if p.endswith(".egg-info/requires.txt")), "")
        requires = tuple(str(r) for r in head.get_all("Requires-Dist", [])) or _listed(listed)
    project = project_table(files)
    if not found:
        name, version = str(project.get("name", "")), str(project.get("version", ""))
        extras = project.get("optional-dependencies", {})
        requires = (*project.get("dependencies", ()), *(f'{r} ; extra == "{e}"' for e, rs in extras.items() for r in rs))
    stated = project.get("license", "")
    licence = licence or (str(stated.get("text", "")) if isinstance(stated, dict) else str(stated))
    guess = re.match(r"([A-Za-z0-9._-]+?)(?:-(\d[\w.]*?))?(?:\.tar\.\w+|\.zip|-py\S*\.whl)?\Z", fallback)
    name = name or (guess[1] if guess else fallback)
    version = version or ((guess[2] if guess else "") or "0")
    return Source(
        name=normal(name), version=version, licence=licence, origin=origin, where=where, digest=digest, files=files, requires=requires
    )


def _listed(text: str) -> tuple[str, ...]:
    """requires.txt of setuptools, which older sdists have instead of Requires-Dist: sections are `[extra:marker]`."""
    out, section = [], ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            extra, _, marker = line.strip("[]").partition(":")
            section = " and ".join(filter(None, [f'extra == "{extra}"' if extra else "", marker]))
        else:
            out.append(f"{line} ; {section}" if section else line)
    return tuple(out)


def project_table(files: Mapping[str, bytes]) -> dict:
    """[project] of pyproject.toml; empty where there is none or it cannot be read."""
    try:
        return dict(tomllib.loads(files.get("pyproject.toml", b"").decode()).get("project", {}))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


# ---------------------------------------------------------------------------------------------------
# The index


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links.append({key: value or "" for key, value in attrs})


def _from_index(name: str, version: str, cache: Path) -> tuple[str, bytes, str]:
    """File name, content and URL of the source distribution; from the cache where it is there."""
    folder = cache / "sdists" / name
    kept = sorted(folder.glob(f"*-{version}.*" if version else "*"), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
    if kept:
        return kept[-1].name, kept[-1].read_bytes(), (folder / ".where" / kept[-1].name).read_text()
    base = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    page = f"{base}/{name}/"
    links = _Links()
    links.feed(_get(page, 8 * 2**20).decode("utf-8", "replace"))
    file, url = _choose(links.links, page, name, version)
    plain, _, fragment = url.partition("#")
    data = _get(plain, MAX_ARCHIVE)
    if fragment.startswith("sha256=") and hashlib.sha256(data).hexdigest() != fragment[7:]:
        raise NoSource("unreadable", f"{plain} does not have the sha256 that the index gives")
    (folder / ".where").mkdir(parents=True, exist_ok=True)
    (folder / ".where" / file).write_text(plain)
    draft = folder / f".tmp-{os.getpid()}"
    draft.write_bytes(data)
    os.replace(draft, folder / file)
    return file, data, plain


def _choose(links: list[dict[str, str]], page: str, name: str, version: str) -> tuple[str, str]:
    """The newest final sdist (or the one of `version`) that is not withdrawn and accepts this Python."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.utils import InvalidSdistFilename, parse_sdist_filename
    from packaging.version import InvalidVersion

    python = ".".join(map(str, sys.version_info[:3]))
    best: tuple | None = None
    for link in links:
        url = urllib.parse.urljoin(page, link.get("href", ""))
        file = urllib.parse.unquote(url.partition("#")[0].rsplit("/", 1)[-1])
        try:
            found, number = parse_sdist_filename(file)
            fits = SpecifierSet(link.get("data-requires-python", "")).contains(python)
        except (InvalidSdistFilename, InvalidVersion, InvalidSpecifier):
            continue
        wanted = str(number) == version if version else fits and not number.is_prerelease and "data-yanked" not in link
        if found == name and wanted and (best is None or number > best[0]):
            best = (number, file, url)
    if best is None:
        raise NoSource("no_sdist", f"{page} has no source distribution of {name} {version or 'for this Python'}")
    return best[1], best[2]


def _get(url: str, most: int) -> bytes:
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None) if url.startswith("https") else None
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=context) as answer:
            data = answer.read(most + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise NoSource("not_fetched", f"{url} cannot be fetched: {error}") from error
    if len(data) > most:
        raise NoSource("too_large", f"{url} has more than {most} bytes")
    return data
