"""Patches, changes and graded runs, over every backend."""

from __future__ import annotations

import pytest

from etude.errors import PatchError
from etude.protocols import Change, GradeBundle, Limits

PATCH = """\
diff --git a/shop/stats.py b/shop/stats.py
--- a/shop/stats.py
+++ b/shop/stats.py
@@ -5,2 +5,2 @@
 def double(x):
-    return 2 * x
+    return x + x
diff --git a/README.md b/docs/README.md
similarity index 100%
rename from README.md
rename to docs/README.md
diff --git a/run.sh b/run.sh
new file mode 100755
--- /dev/null
+++ b/run.sh
@@ -0,0 +1,2 @@
+#!/bin/sh
+echo ran
\\ No newline at end of file
"""


def test_a_patch_is_applied_whole_or_not_at_all(on, shop) -> None:
    async def scene(host) -> None:
        sandbox = await host.create(await host.add_image(shop), limits=Limits(disk_bytes=4 * 2**20))
        assert set(await sandbox.apply_patch(PATCH)) == {"shop/stats.py", "README.md", "docs/README.md", "run.sh"}
        assert b"return x + x" in await sandbox.read("shop/stats.py")
        assert await sandbox.stat("README.md") is None
        assert await sandbox.read("docs/README.md") == b"# shop\n"
        assert (await sandbox.exec(["./run.sh"])).output == b"ran\n"
        before = await sandbox.diff()
        with pytest.raises(PatchError, match=r"hunk 1 of shop/stats\.py does not fit"):
            await sandbox.apply_patch(PATCH)
        stale = "--- a/run.sh\n+++ b/run.sh\n@@ -2 +2 @@\n-echo gone\n+echo x\n--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+x\n"
        with pytest.raises(PatchError, match=r"hunk 1 of run\.sh does not fit; its line 'echo gone'"):
            await sandbox.apply_patch(stale)
        with pytest.raises(PatchError, match="relative"):
            await sandbox.apply_patch("--- /dev/null\n+++ b/../../out.txt\n@@ -0,0 +1 @@\n+x\n")
        await sandbox.exec(["ln", "-s", "run.sh", "link"])
        with pytest.raises(PatchError, match="link"):
            await sandbox.apply_patch("--- a/link\n+++ b/link\n@@ -1 +1 @@\n-#!/bin/sh\n+#!/bin/bash\n")
        await sandbox.exec(["rm", "link"])
        assert await sandbox.diff() == before

    on(scene)


def test_changes_are_the_inverse_of_a_diff(on, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image({**shop, "was/file.txt": b"f", "was_file": b"g"})
        worked, copy = await host.create(image), await host.create(image)
        script = (
            "rm -r was; echo now > was; rm was_file; mkdir was_file; echo in > was_file/in; chmod 755 README.md; rm tests/test_stats.py"
        )
        assert (await worked.exec(["sh", "-c", script])).code == 0
        changes = await worked.diff()
        await copy.exec(["sh", "-c", "ln -s /etc/hostname extra; ln -s ../README.md shop/link"])
        await copy.apply_changes([*changes, Change(path="shop/link/deep.txt", data=b"d"), Change(path="extra", data=b"plain")])
        await copy.apply_changes([])
        by_path = {change.path: change for change in await copy.diff()}
        assert by_path.pop("shop/link/deep.txt").data == b"d"
        assert by_path.pop("extra").data == b"plain"
        assert list(by_path.values()) == changes
        with pytest.raises(OSError):
            await copy.apply_changes([Change(path="x" * 300, data=b"")])

    on(scene)


def test_a_grade_stands_on_what_the_history_began_with(on, shop) -> None:
    async def scene(host) -> None:
        image = await host.add_image(shop)
        sandbox = await host.create(image)
        await sandbox.write("conftest.py", b"raise SystemExit('planted')")
        await sandbox.write("shop/stats.py", b"def mean(xs):\n    return 0\n\n\ndef double(x):\n    return 0\n")
        await sandbox.exec(["rm", "README.md"])
        (child,) = await sandbox.fork(1)
        hidden = {
            "tests/test_hidden.py": b"from shop.stats import double\n\ndef test_hidden(): assert double(3) == 6 and open('README.md')\n"
        }
        solution = (Change(path="shop/stats.py", data=b"def mean(xs):\n    return 2\n\n\ndef double(x):\n    return x + x\n"),)
        seen = set()
        for each in (sandbox, child):
            run = await each.grade(GradeBundle(changes=solution, files=hidden))
            assert {(test["id"].split("::")[1], test["outcome"]) for test in run.answer["tests"]} == {
                ("test_mean", "passed"),
                ("test_double", "passed"),
                ("test_hidden", "passed"),
            }
            assert (run.image, run.refused, run.answer["complete"]) == (image, "", True)
            seen.add(run.graded)
        assert len(seen) == 1
        without = await child.grade(GradeBundle(files=hidden, args=("-q", "tests/test_hidden.py")))
        assert without.graded not in seen
        broken = await child.grade(GradeBundle(changes=(Change(path="x" * 300, data=b"x"),)))
        assert "too long" in broken.refused
        assert broken.answer == {}
        assert await child.stat("tests/test_hidden.py") is None
        assert (await host.stats())["live"] == 2

    on(scene)
