"""A test run in a pristine sandbox: the mechanism of grading. What may be graded, and what a result means, is decided by `tasks.grade`.

    run = await graded_run(host, GradeBundle(image=image, changes=changes, files=hidden, args=("-q",), timeout_s=60))

A new sandbox from the image, the changes, the hidden files over them, one `pytest` operation with a report, and the
sandbox is gone, whatever happened. Nothing of the sandbox in which an agent worked is used but the changes that were
read out of it by the host.
"""

from __future__ import annotations

import hashlib
import json

from etude.errors import UserError
from etude.protocols import Change, GradeBundle, GradedRun, Limits, SandboxHost

GRACE_S = 15.0
"""How long a sandbox may take to answer beyond the time limit of the tests."""


async def graded_run(host: SandboxHost, bundle: GradeBundle) -> GradedRun:
    """Waits for one sandbox and one test run."""
    if not bundle.image:
        raise UserError("a grade needs an image to stand on; Sandbox.grade fills in the one its history began with")
    name = graded_hash(bundle)
    sandbox = await host.create(bundle.image, limits=bundle.limits or Limits())
    try:
        try:
            await sandbox.apply_changes(bundle.changes)
            await sandbox.apply_changes([Change(path=path, data=data) for path, data in bundle.files.items()])
        except OSError as error:  # the agent's files do not fit, or cannot stand where it put them
            return GradedRun(answer={}, graded=name, image=bundle.image, refused=str(error))
        arguments = {"args": list(bundle.args), "timeout_s": bundle.timeout_s, "report": True}
        answer = await sandbox.call("pytest", arguments, timeout_s=bundle.timeout_s + GRACE_S)
    finally:
        await sandbox.destroy()
    return GradedRun(answer=answer, graded=name, image=bundle.image)


def graded_hash(bundle: GradeBundle) -> str:
    """Hash over the image and everything put on it: the same files have the same name, whoever grades them."""
    digest = hashlib.sha256(f"etude graded 1\0{bundle.image}\0".encode())
    hidden = [Change(path=path, data=data) for path, data in bundle.files.items()]
    for change in (*sorted(bundle.changes, key=lambda change: change.path), *sorted(hidden, key=lambda change: change.path)):
        contents = None if change.data is None else hashlib.sha256(change.data).hexdigest()
        digest.update(json.dumps([change.path, contents, change.mode]).encode())
    return digest.hexdigest()
