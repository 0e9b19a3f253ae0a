import asyncio
import subprocess
import sys

import numpy as np
import pytest

from etude.errors import SandboxError, UserError
from etude.fakes import MemoryHost, ScriptedChat, ScriptedEngine, memory_sandbox
from etude.protocols import Change, Engine, GenerateRequest, Sandbox
from etude.records import Finish, Level, Manifest, Message, Sampling, Version
from etude.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def request(id="r", text="hi", **sampling):
    return GenerateRequest(id=id, ids=TOKENIZER.encode(text), sampling=Sampling(stop_ids=(TOKENIZER.token_id("<|end|>"),), **sampling))


def test_they_have_the_methods_of_their_protocols(run):
    assert isinstance(ScriptedEngine(TOKENIZER, []), Engine)
    assert isinstance(run(memory_sandbox({})), Sandbox)


def test_a_memory_sandbox_is_isolated_and_diffs(run):
    async def main():
        host = MemoryHost()
        image = await host.add_image({"a/b.py": b"x\n", "c": b"c"})
        assert image == await host.add_image({"c": b"c", "a/b.py": b"x\n"})
        one, two = await host.create(image), await host.create(image)
        await one.write("new.txt", b"n")
        await one.call("edit", {"path": "a/b.py", "old": "x", "new": "y"})
        del one.files["c"]
        assert await one.diff() == [Change(path="a/b.py", data=b"y\n"), Change(path="c", data=None), Change(path="new.txt", data=b"n")]
        assert await two.diff() == []
        (fork,) = await one.fork(1)
        assert fork.files == one.files
        again = await host.create(await one.snapshot())
        assert again.files == one.files
        assert [(s.path, s.kind) for s in await one.list()] == [("a", "dir"), ("new.txt", "file")]
        assert (await one.stat("a/b.py")).size == 2
        assert await one.stat("absent") is None
        assert await one.read("/workspace/new.txt") == b"n"
        assert (await host.stats())["live"] == 4
        await host.close()
        assert (await host.stats())["live"] == 0

    run(main())


def test_refusals_are_answers_and_trouble_is_an_error(run):
    async def main():
        host = MemoryHost()
        sandbox = await host.create(await host.add_image({"a": b"\xff", "d/e": b""}), create_id="x")
        assert await host.create(await host.add_image({}), create_id="x") is sandbox
        refusals = [
            ("read", {"path": "../etc"}, "forbidden"),
            ("read", {"path": "a"}, "failed"),
            ("read", {"path": "d"}, "failed"),
            ("read", {"path": "d/e", "start": 3}, "failed"),
            ("read", {}, "bad_arguments"),
            ("list", {"path": "a"}, "failed"),
            ("grep", {"pattern": "(", "path": ".", "glob": ""}, "bad_arguments"),
            ("job_poll", {"job": "1"}, "bad_arguments"),
            ("levitate", {}, "bad_arguments"),
        ]
        for op, arguments, kind in refusals:
            assert (await sandbox.call(op, arguments))["error"] == kind, op
        with pytest.raises(SandboxError, match="outside of the workspace"):
            await sandbox.read("../etc")
        with pytest.raises(SandboxError, match="files only"):
            await sandbox.snapshot(Level.PROCESSES)
        assert await sandbox.snapshot(Level.PROCESSES, require=False)
        with pytest.raises(SandboxError, match="no image"):
            await host.create("nothing")
        await sandbox.destroy()
        await sandbox.destroy()
        with pytest.raises(SandboxError, match="destroyed"):
            await sandbox.call("read", {"path": "d/e"})

    run(main())


def test_commands_are_scripts(run):
    async def main():
        def touch(files):
            files["t"] = b"1"
            return "touched"

        sandbox = await memory_sandbox({}, {"touch": touch, "touch twice": lambda files: (3, "no")})
        assert (await sandbox.exec(["touch", "t"])).output == b"touched"
        assert (await sandbox.exec(["touch", "twice"])).code == 3
        assert (await sandbox.exec(["other"])).code == 127
        answer = await sandbox.call("pytest", {"args": ["-q"], "timeout_s": 1, "report": True})
        assert (answer["code"], answer["tests"]) == (127, [])
        assert sandbox.files == {"t": b"1"}

    run(main())


def test_a_scripted_engine_streams_what_it_generates(run):
    async def main():
        whole = await ScriptedEngine(TOKENIZER, ["abc"], routes_LK=(2, 3)).generate(request(seed=5))
        pieces = [p async for p in ScriptedEngine(TOKENIZER, ["abc"], routes_LK=(2, 3)).generate_stream(request(seed=5))]
        assert TOKENIZER.decode(whole.ids) == "abc<|end|>"
        assert whole.finish is Finish.STOP
        assert whole.ids == tuple(i for p in pieces for i in p.ids)
        assert np.array_equal(whole.logprob_T, np.concatenate([p.logprob_T for p in pieces]))
        assert whole.routes_PTLK.shape == (2 + 4, 2, 3)
        assert whole.routes_PTLK[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 255]  # the last token has not been fed
        assert np.array_equal(whole.routes_PTLK, np.concatenate([p.routes_PTLK for p in pieces]))
        scored = await ScriptedEngine(TOKENIZER, []).score([*TOKENIZER.encode("hi"), *whole.ids])
        assert np.array_equal(scored.logprob_T[2:], whole.logprob_t1_T)
        assert (whole.logprob_T < 0).all()

    run(main())


def test_a_scripted_engine_keeps_limits_and_cancels(run):
    async def main():
        engine = ScriptedEngine(TOKENIZER, lambda context: context + "!" * 20)
        short = await engine.generate(request(max_tokens=4))
        assert (TOKENIZER.decode(short.ids), short.finish) == ("hi!!", Finish.LENGTH)
        engine.hold = asyncio.Event()
        running = asyncio.create_task(engine.generate(request("slow")))
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0)
        with pytest.raises(UserError, match="in flight"):
            await engine.generate(request("slow"))
        await engine.cancel("slow")
        assert (await running).finish is Finish.CANCELLED
        await engine.cancel("unknown")
        with pytest.raises(UserError, match="no reply left"):
            await ScriptedEngine(TOKENIZER, []).generate(request())
        assert (await engine.stats())["running"] == 0

    run(main())


def test_loading_weights_changes_the_version(run):
    async def main():
        engine = ScriptedEngine(TOKENIZER, ["a"])
        version = Version(lineage=0, ordinal=1, hash="1" * 32)
        assert await engine.load(Manifest(lineage=0, base=None, version=version, tensors=()), "") == version
        assert (await engine.generate(request())).versions == (version,)

    run(main())


def test_a_scripted_chat(run):
    async def main():
        chat = ScriptedChat(["a", Message(role="assistant", text="b"), ValueError("c")])
        user = Message(role="user", text="u")
        assert [(await chat.reply([user], max_tokens=1)).message.text for _ in range(2)] == ["a", "b"]
        with pytest.raises(ValueError, match="c"):
            await chat.reply([user], max_tokens=1)
        with pytest.raises(UserError, match="no reply left"):
            await chat.reply([user], max_tokens=1)
        assert (chat.segments(), chat.recorded([user])) == ((), (user,))

    run(main())


@pytest.mark.parametrize("module", ["etude.text.conversation", "etude.text.renderer", "etude.agent.loop", "etude.fakes"])
def test_no_torch(module):
    program = f"import sys, {module}; print({{'torch', 'ray', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
