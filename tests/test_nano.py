"""The shipped checkpoint: small, loadable by others, what its card says it is, and able to work in the harness."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from etude.agent.chat import EngineChat
from etude.agent.loop import AgentConfig, run_agent
from etude.fakes import memory_sandbox
from etude.inference.config import EngineConfig
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.shelf import PACKAGED
from etude.model.weights import load_model
from etude.parts import make_engine
from etude.records import Sampling
from etude.sync.chain import weights_hash
from etude.tasks.source import make_task
from etude.text.renderer import EtudeRenderer, choose_renderer
from etude.text.tokenizer import load_tokenizer

NANO = PACKAGED["nano"]


def test_it_is_at_most_8_megabytes_and_its_card_names_its_weights() -> None:
    assert sum(p.stat().st_size for p in NANO.iterdir() if p.suffix == ".safetensors") <= 8 * 2**20
    model = load_model(NANO)
    found = weights_hash({n: p.detach().to(torch.bfloat16) for n, p in model.named_parameters()})
    card = (NANO / "README.md").read_text()
    stated = re.search(r"weights hash: `([0-9a-f]+)`", card)
    assert stated is not None
    assert stated[1] == found
    for fact in ("seed", "licence", "pass@1", "recipes/nano/pretrain.toml"):
        assert fact in card


def test_transformers_computes_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32, attn_implementation="eager").eval()
    ours = load_model(NANO).eval()
    tokenizer = load_tokenizer(NANO)
    ids = torch.tensor([*EtudeRenderer(tokenizer).render(next_user_message()), tokenizer.token_id("<|assistant|>")])
    with torch.inference_mode():
        out = ours(ids, Plan.packed([len(ids)]), PagedCache(ours.config, blocks_for([len(ids)])))
        difference = (ours.logits(out.hidden_ND) - theirs(ids[None]).logits[0]).abs().max().item()
    assert difference < 1e-3


def next_user_message():  # type: ignore[no-untyped-def]
    from etude.records import Message

    return Message(role="user", text=make_task(5).prompt)


def test_it_reads_before_it_edits() -> None:
    """On most tasks its first call reads the file it was asked about, names it never saw included."""

    async def first_calls() -> list[bool]:
        tokenizer = load_tokenizer(NANO)
        renderer = choose_renderer(NANO, tokenizer)
        engine = make_engine(folder=str(NANO), engine=EngineConfig(cache_bytes=2**26), numerics="fast", version=None)
        agent = AgentConfig(prompt="none", instructions=False, max_turns=1, max_turn_tokens=96)
        right = []
        for seed in range(12):
            task = make_task(seed, "heldout")
            sandbox = await memory_sandbox(dict(task.files))
            chat = EngineChat(engine, renderer, tokenizer, Sampling(temperature=0.0), seed=seed)
            run = await run_agent(task.prompt, chat, sandbox, agent)
            path = task.solution[0][0]
            right.append(any(c.name == "read_file" and c.arguments.get("path") == path for m in run.messages for c in m.calls))
        await engine.close()
        return right

    right = asyncio.run(first_calls())
    assert sum(right) >= 8, right
