"""What a boundary can keep a sandbox from: the aspects that every boundary record speaks of. Standard library only.

`Boundary.separates` names for each aspect what keeps the sandbox from it, or "nothing". Every attempt in the corpus of
escapes (tests/sandbox/escapes) belongs to one aspect; a backend that claims an aspect must stop all of them, and the
table in docs/sandboxes.md is checked against the same records.
"""

from __future__ import annotations

ASPECTS = {
    "read": "contents of files of the host",
    "write": "files and folders of the host: creating, changing, deleting",
    "metadata": "modes, times and attributes of files of the host",
    "processes": "processes of the host: seeing, signalling, tracing, slowing",
    "network": "hosts, local services and sockets outside",
    "neighbours": "other sandboxes of the same user",
    "kernel": "mounts, namespaces, kernel settings and rarely used system calls",
    "privileges": "capabilities, set-user-id, devices",
    "server": "the tool server, and what it can be talked into",
}
"""name -> what it is about."""
