"""The training text of the nano policy: generated code, and expert traces played in real sandboxes.

    corpus/  tokenizer/  functions/*.npz  mixed/*.npz  sft/*.npz  habits/*.npz  heldout/*.npz  corpus.json

`functions` holds single functions, half of them as the edit that fills in the body; `mixed` whole modules, test files and traces
(loss on every token in both); `sft` the traces with loss on what the policy itself says; `habits` likewise, of further experts
whose ways are those the policy shall have. Most texts have made-up names, and most of
those made-up arguments and constants as well. All families occur, the unseen ones too: "unseen" means never met in reinforcement.
Constants and names of evaluation tasks occur nowhere.

Made in parts, each committed by rename, so that an interrupted build goes on where it stopped; the same config gives
the same bytes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from etude.agent.loop import AgentConfig
from etude.config import config, resolved
from etude.factory.experts import ExpertConfig, Trace, expert_traces, stub_of
from etude.factory.renaming import renaming
from etude.protocols import SandboxHost
from etude.records import Message, ToolError, ToolResult, content_hash, seed_for
from etude.tasks.deletion import DeleteLevel
from etude.tasks.katas.package import FAMILIES, VERSION, Kata, make_package
from etude.tasks.prompt import make_prompt
from etude.tasks.source import kata_of, make_task
from etude.text.calls import format_call
from etude.text.renderer import EtudeRenderer, message_text
from etude.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer


@config
class CorpusConfig:
    seed: int = 0
    tasks: int = 1750
    """Distinct katas the experts play."""
    traces_per_task: int = 8
    part_tasks: int = 250
    """Katas in one part; the grain of resuming."""
    function_packages: int = 20000
    """Packages whose functions are read one by one: the densest text there is for learning bodies."""
    function_wrong: float = 0.35
    """Share of those functions that carry a wrong body."""
    function_mended: float = 0.4
    """Share of the edits among them that replace a wrong body. To mend, a policy must copy what it wrote: where the corpus seldom
    asked for that, one wrote the stub as the old text of 259 second edits in 267."""
    packages: int = 6000
    """Packages whose modules are read as plain code."""
    code_wrong: float = 0.3
    """Share of their functions that carry a wrong body."""
    test_share: float = 0.25
    """Share of their test files that is read too."""
    vocab_size: int = 1024
    heldout_tasks: int = 100
    """Katas whose traces are never trained on, for the held-out loss."""
    renamed: float = 0.9
    """Share of traces and packages that get made-up names (see renaming.py)."""
    unknown: float = 0.7
    """Share of the renamed texts whose arguments are made up too; the same for numbers, and for classes with text constants."""
    concurrency: int = 4
    expert: ExpertConfig = ExpertConfig()
    habit_tasks: int = 0
    """Katas that the experts of the last phase play, the same number of traces each."""
    habits: ExpertConfig = ExpertConfig()
    """Those experts."""
    agent: AgentConfig = AgentConfig(prompt="none", instructions=False, max_turns=12)
    """The agent the experts play in; the policy is later run with the same prompt settings."""


Progress = Callable[[str, int, int], None]


async def build_corpus(config: CorpusConfig, out: Path, host: SandboxHost, progress: Progress = lambda what, done, total: None) -> Path:
    """Build what is missing under `out`; returns it. The folder's name should carry `corpus_hash(config)`."""
    out.mkdir(parents=True, exist_ok=True)
    traces = out / "traces"
    traces.mkdir(exist_ok=True)
    parts = [("heldout", 0, config.heldout_tasks)]
    for split, tasks in (("train", config.tasks), ("habits", config.habit_tasks)):
        parts += [(split, i, min(config.part_tasks, tasks - i)) for i in range(0, tasks, config.part_tasks)]
    for done, (split, first, count) in enumerate(parts):
        path = traces / f"{split}-{first:06d}.jsonl"
        if not path.exists():
            played = await _play(config, split, range(first, first + count), host)
            _commit(path, "".join(json.dumps(d, separators=(",", ":")) + "\n" for d in played))
        progress("playing expert traces", done + 1, len(parts))
    _write_shards(config, out, progress)
    return out


def corpus_hash(config: CorpusConfig) -> str:
    return content_hash("corpus", VERSION, resolved(config), sorted(FAMILIES))


async def _play(config: CorpusConfig, split: str, numbers: range, host: SandboxHost) -> list[dict[str, Any]]:
    """Traces of some katas as plain data, in order."""
    room = asyncio.Semaphore(config.concurrency)
    expert = config.habits if split == "habits" else config.expert

    async def one(number: int) -> list[Trace]:
        seed = seed_for("corpus", config.seed, split, number)
        family = sorted(FAMILIES)[random.Random(seed).randrange(len(FAMILIES))]
        task = make_task(seed, "pretrain", family=family)
        kata = kata_of(task)[1]
        async with room:
            return await expert_traces(task, kata, host, count=config.traces_per_task, seed=seed, config=expert, agent=config.agent)

    async with asyncio.TaskGroup() as crew:
        playing = [crew.create_task(one(n)) for n in numbers]
    return [_plain(trace) for done in playing for trace in done.result()]


def _plain(trace: Trace) -> dict[str, Any]:
    """Role and text as the policy sees it; enough to render the trace with any tokenizer."""
    said = [[m.role, [[r.text, r.error] for r in m.results] if m.role == "tool" else message_text(m)] for m in trace.messages]
    return {"task": trace.task.id, "right": trace.solved_by_expert, "messages": said}


def _message(role: str, said: Any) -> Message:
    """The message `_plain` came from, as far as its tokens go."""
    if role != "tool":
        return Message(role=role, text=said)
    results = (ToolResult(call_id="", name="", text=text, error=error and ToolError(error)) for text, error in said)
    return Message(role=role, results=tuple(results))


# ---------------------------------------------------------------------------------------------------
# Text to tokens


PART = 1000
"""Packages in one shard."""


def _write_shards(config: CorpusConfig, out: Path, progress: Progress) -> None:
    """Render every part to tokens, on all cores."""
    _tokenizer(config, out)
    jobs: list[tuple[str, int | str]] = [("traces", path.stem) for path in sorted((out / "traces").glob("*.jsonl"))]
    jobs += [("functions", first) for first in range(0, config.function_packages, PART)]
    jobs += [("code", first) for first in range(0, config.packages, PART)]
    stats: Counter[str] = Counter()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for done, counts in enumerate(pool.map(functools.partial(_write_part, config, out), jobs)):
            stats.update(counts)
            progress("writing tokens", done + 1, len(jobs))
    _commit(out / "corpus.json", json.dumps({"config": resolved(config), "hash": corpus_hash(config), **stats}, indent=2))


def _write_part(config: CorpusConfig, out: Path, job: tuple[str, int | str]) -> dict[str, int]:
    """Write the shards of one part; returns what was counted."""
    from etude.trainer.documents import write_documents

    tokenizer = load_tokenizer(out / "tokenizer")
    renderer = EtudeRenderer(tokenizer)

    def every_token(documents: Iterable[list[int]]) -> list[tuple[list[int], list[bool]]]:
        return [(ids, [True] * len(ids)) for ids in documents if ids]

    what, part = job
    if what == "traces":
        traces = [json.loads(line) for line in (out / "traces" / f"{part}.jsonl").read_text().splitlines()]
        documents = [trace_document(renderer, _renamed(config, trace, f"{part} {i}")) for i, trace in enumerate(traces)]
        split = str(part).partition("-")[0]
        if split in ("heldout", "habits"):
            write_documents(out / split / f"{part}.npz", documents)
        else:
            write_documents(out / "mixed" / f"traces-{part}.npz", every_token(ids for ids, _ in documents))
            write_documents(out / "sft" / f"{part}.npz", documents)
        return {"traces": len(traces), "right": sum(t["right"] for t in traces), "trace_tokens": sum(len(ids) for ids, _ in documents)}
    assert isinstance(part, int)
    if what == "functions":
        numbers = range(part, min(part + PART, config.function_packages))
        documents = every_token(function_documents(config, numbers, tokenizer, renderer))
        return {"function_tokens": write_documents(out / "functions" / f"{part:06d}.npz", documents)}
    texts = code_texts(config, range(part, min(part + PART, config.packages)))
    return {"code_tokens": write_documents(out / "mixed" / f"code-{part:06d}.npz", every_token(map(tokenizer.encode, texts)))}


def _renamed(config: CorpusConfig, trace: dict[str, Any], key: str) -> list[tuple[str, Any]]:
    """The messages of a stored trace, most with made-up names."""
    rng = random.Random(seed_for("corpus-rename", config.seed, key))
    if rng.random() >= config.renamed:
        return trace["messages"]
    rename = renaming(kata_of(trace["task"])[0], rng, inside=config.unknown)
    return [(role, [[rename(text), error] for text, error in said] if role == "tool" else rename(said)) for role, said in trace["messages"]]


def trace_document(renderer: EtudeRenderer, messages: Iterable[tuple[str, Any]]) -> tuple[list[int], list[bool]]:
    """Token ids of a trace, and True where the policy speaks (its closing mark included)."""
    ids: list[int] = []
    mask: list[bool] = []
    opening = len(renderer.open_assistant())
    for role, said in messages:
        whole = renderer.render(_message(role, said))
        spoken = len(whole) - opening if role == "assistant" else 0
        ids += whole
        mask += [False] * (len(whole) - spoken) + [True] * spoken
    return ids, mask


def function_documents(config: CorpusConfig, numbers: range, tokenizer: Tokenizer, renderer: EtudeRenderer) -> Iterable[list[int]]:
    """Token ids of functions, right or wrong: half of them as plain code, half as the shortest trace there is, in a file that
    holds nothing else."""
    for number in numbers:
        rng = random.Random(seed_for("corpus-function", config.seed, number))
        package = make_package(seed_for("corpus-function-package", config.seed, number), sorted(FAMILIES), split="pretrain")
        rename = renaming(package, rng, inside=config.unknown) if rng.random() < config.renamed else str
        for kata in package.functions:
            body = rng.choice(kata.wrong_bodies) if rng.random() < config.function_wrong else kata.correct_body
            if rng.random() < 0.5:
                yield tokenizer.encode(rename(kata.with_body(body)))
            else:
                others = [b for b in kata.wrong_bodies if b != body]
                present = rng.choice(others) if others and rng.random() < config.function_mended else stub_of(kata)
                yield trace_document(renderer, _one_edit(kata, present, body, rename, rng))[0]


def _one_edit(kata: Kata, present: str, body: str, rename: Callable[[str], str], rng: random.Random) -> list[tuple[str, Any]]:
    """Asked for a body, the policy reads the file and puts `body` in place of `present`."""
    tests = (f"tests/test_{kata.module}.py",)
    asked = make_prompt(path=kata.path, qualname=kata.qualname, tests=tests, level=DeleteLevel.BODY, rng=rng)
    edit = format_call("edit_file", {"path": kata.path, "old": present, "new": body})
    return [
        ("user", rename(asked)),
        ("assistant", rename(format_call("read_file", {"path": kata.path}))),
        ("tool", [[rename(kata.with_body(present)) + "\n", None]]),
        ("assistant", rename(edit)),
    ]


def code_texts(config: CorpusConfig, numbers: range) -> Iterable[str]:
    """Modules and tests of generated packages, with some wrong bodies in place of right ones."""
    for number in numbers:
        rng = random.Random(seed_for("corpus-code", config.seed, number))
        package = make_package(seed_for("corpus-package", config.seed, number), sorted(FAMILIES), split="pretrain")
        rename = renaming(package, rng, inside=config.unknown) if rng.random() < config.renamed else str
        for path, text in package.files.items():
            if path.startswith("tests/") and rng.random() >= config.test_share:
                continue
            if path.endswith(".py") and not path.endswith("__init__.py"):
                for kata in package.functions:
                    if kata.path == path and rng.random() < config.code_wrong:
                        text = text.replace(kata.source, kata.with_body(rng.choice(kata.wrong_bodies)))
                yield rename(text)


def _tokenizer(config: CorpusConfig, out: Path) -> Tokenizer:
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        texts = list(code_texts(config, range(min(400, config.packages))))
        for path in sorted((out / "traces").glob("train-*.jsonl"))[:4]:
            for line in path.read_text().splitlines()[::4]:
                trace = json.loads(line)
                texts += [message_text(_message(role, said)) for role, said in _renamed(config, trace, line[:60])]
        train_tokenizer(texts, config.vocab_size).save(folder)
    return load_tokenizer(folder)


def _commit(path: Path, text: str) -> None:
    tmp = path.with_suffix(path.suffix + ".tmp")
    tmp.write_text(text)
    os.rename(tmp, path)
