"""Package indexes in which what was published after a date does not exist.

An allow-listed index is an answer key: the next release of a project holds the function that a task deleted. PEP 700
says of each file when it was uploaded, so a page of the simple index is asked for as JSON, files without a date or with
a later one are left out, and the rest is given in the form the client asked for. The addresses of files that
were shown are remembered: hosts of files give those and no others.
"""

from __future__ import annotations

import datetime
import html
import json
import re
from typing import Any
from urllib.parse import urljoin, urlsplit

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "text/html; charset=utf-8"
PROJECT_PAGE = re.compile(r"/simple/([A-Za-z0-9._-]+)/?")


class NotAnIndex(ValueError):
    """The server answered something else than a dated page of files."""


class Shown:
    """Files that the pages of one sandbox have shown."""

    def __init__(self, before: datetime.datetime) -> None:
        self._before = before
        self._files: set[tuple[str, str]] = set()

    def has(self, host: str, path: str) -> bool:
        """Whether a path was shown; the metadata of a shown file (PEP 658) counts as shown."""
        return (host, path) in self._files or (host, path.removesuffix(".metadata")) in self._files

    def page(self, body: bytes, url: str, accepts: str) -> tuple[bytes, str, int]:
        """(page, its media type, files left out) from the JSON that `url` answered."""
        try:
            page = json.loads(body)
            files = page["files"]
            kept = [self._absolute(file, url) for file in files if self._is_old(file)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotAnIndex(f"{url} did not answer a page of files in JSON: {error}") from None
        for file in kept:
            parts = urlsplit(file["url"])
            self._files.add((parts.hostname or "", parts.path))
        versions = {name for file in kept for name in [_version(str(file["filename"]))] if name}
        page["files"] = kept
        if "versions" in page:
            page["versions"] = [version for version in page["versions"] if version in versions]
        dropped = len(files) - len(kept)
        if JSON in accepts or "application/vnd.pypi.simple.latest+json" in accepts:
            return json.dumps(page).encode(), JSON, dropped
        return _as_html(page), HTML, dropped

    def _is_old(self, file: dict[str, Any]) -> bool:
        moment = datetime.datetime.fromisoformat(str(file.get("upload-time", "")).replace("Z", "+00:00")) if "upload-time" in file else None
        if moment is None:
            return False
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)) < self._before

    @staticmethod
    def _absolute(file: dict[str, Any], url: str) -> dict[str, Any]:
        return {**file, "url": urljoin(url, str(file["url"]))}


def _version(filename: str) -> str:
    """The version in the name of a wheel or a source archive."""
    if filename.endswith(".whl"):
        return filename.split("-")[1] if filename.count("-") >= 4 else ""
    stem = re.sub(r"\.(tar\.gz|tar\.bz2|tgz|zip)$", "", filename)
    return stem.rpartition("-")[2]


def _as_html(page: dict[str, Any]) -> bytes:
    lines = ['<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"></head><body>']
    for file in page["files"]:
        digests = file.get("hashes") or {}
        fragment = f"#sha256={digests['sha256']}" if "sha256" in digests else ""
        needs = file.get("requires-python")
        attribute = f' data-requires-python="{html.escape(str(needs), quote=True)}"' if needs else ""
        yanked = ' data-yanked=""' if file.get("yanked") else ""
        target = html.escape(file["url"] + fragment, quote=True)
        lines.append(f'<a href="{target}"{attribute}{yanked}>{html.escape(str(file["filename"]))}</a><br>')
    return "\n".join([*lines, "</body></html>\n"]).encode()
