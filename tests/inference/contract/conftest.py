"""The engines that the contract suite runs over. Each `World` is one engine with what a test must know about it and its weights."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.fakes import ScriptedEngine
from etude.inference import naive
from etude.inference.config import EngineConfig
from etude.inference.engine import NativeEngine
from etude.inference.http import HttpEngine
from etude.model.config import ModelConfig
from etude.model.transformer import Decoder
from etude.protocols import Engine
from etude.records import Manifest, Version
from etude.serve.app import App
from etude.sync.publish import Publisher
from etude.text.tokenizer import ByteTokenizer

WINDOW = 1024
SHAPE = ModelConfig(vocab_size=67, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=48, max_positions=WINDOW)
MOE = {"experts": 5, "experts_per_token": 2, "expert_intermediate": 24, "shared_intermediate": 16, "family": "qwen2_moe"}
ROUTED = ModelConfig(**{**{f: getattr(SHAPE, f) for f in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim")},
                        "max_positions": WINDOW, "qkv_bias": True, **MOE})  # fmt: skip


@dataclass(kw_only=True)
class World:
    engine: Engine
    vocab: int
    publish: Callable[[int], tuple[Manifest, str]]
    """The next version, whose ordinal is given, as a trainer publishes it."""
    spoil: Callable[[], tuple[Manifest, str]]
    """Weights that must be refused."""
    routed: bool = False
    queues: bool = True
    """Requests beyond `max_running` = 4 wait, `max_waiting` = 6 of them; a fake has no queue and refuses at once."""
    prefixes: bool = True
    """It has a prefix cache."""


def trained(shape: ModelConfig, seed: int) -> Decoder:
    """Weights of the version with this ordinal: so large that the distribution is far from uniform."""
    model = Decoder(shape, numerics="invariant").eval()
    model.init_weights(seed)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(8)
    return model


def native(folder: Path, shape: ModelConfig, **config: Any) -> World:
    publisher, trainer = Publisher(folder, lineage=0), trained(shape, 0)
    first = publisher.publish(trainer.state_dict(), Version(lineage=0, ordinal=0, hash=""))
    publisher.commit(first.version)
    settings = {"num_blocks": 160, "max_running": 4, "token_budget": 64, "max_waiting": 6} | config
    engine = NativeEngine(trained(shape, 0), version=first.version, config=EngineConfig(**settings))

    def publish(ordinal: int, canary: tuple[Any, Any] | None = None) -> tuple[Manifest, str]:
        trainer.load_state_dict(trained(shape, ordinal).state_dict())
        said = naive.score(trainer, range(20), first.version).logprob_T
        manifest = publisher.publish(trainer.state_dict(), Version(lineage=0, ordinal=ordinal, hash=""), canary or (range(20), said))
        if canary is None:
            publisher.commit(manifest.version)
        return manifest, str(folder)

    return World(
        engine=engine,
        vocab=shape.vocab_size,
        publish=publish,
        spoil=lambda: publish(99, (range(20), [-1.0] * 20)),
        routed=shape.moe,
    )


def scripted() -> World:
    tokenizer = ByteTokenizer()
    engine = ScriptedEngine(
        tokenizer,
        lambda context: "etude " * 400,
        window=WINDOW,
        limit=10,
        routes_LK=(2, 2),
        version=Version(lineage=0, ordinal=0, hash="0"),
    )

    def made(ordinal: int, base: Version | None) -> tuple[Manifest, str]:
        return Manifest(lineage=0, base=base, version=Version(lineage=0, ordinal=ordinal, hash=f"{ordinal}"), tensors=()), ""

    return World(
        engine=engine,
        vocab=tokenizer.vocab_size,
        publish=lambda ordinal: made(ordinal, engine.current),
        spoil=lambda: made(99, Version(lineage=7, ordinal=7, hash="of another run")),
        routed=True,
        queues=False,
        prefixes=False,
    )


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[World]:
    if kind == "fake":
        world = scripted()
    elif kind == "http":
        world = native(folder, ROUTED)
        app, behind = App(world.engine, None, api_key="secret", contract=True), world.engine
        port = await app.server.start("127.0.0.1", 0)
        world.engine = HttpEngine(f"http://127.0.0.1:{port}", api_key_ref="env:CONTRACT_KEY")
        try:
            yield world
        finally:
            await world.engine.close()
            assert await app.server.drain(10.0) == 0, "a request outlived its client"
            await behind.close()
        return
    else:
        world = native(folder, ROUTED, speculation="ngram") if kind == "native moe, guessing" else native(folder, SHAPE)
    try:
        yield world
    finally:
        await world.engine.close()


KINDS = ["native", "native moe, guessing", "fake", "http", "vllm"]


@pytest.fixture(params=KINDS)
def play(request, tmp_path, monkeypatch) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """play(scene): run the coroutine function `scene` on a fresh world of this kind."""
    if request.param == "vllm":
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vllm is not installed")
        pytest.skip("etude has no vLLM engine yet; it joins this suite when it is written")

    monkeypatch.setenv("CONTRACT_KEY", "secret")

    def run(scene: Callable[[World], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(600), opened(request.param, tmp_path) as world:
                await scene(world)

        asyncio.run(main())

    return run
