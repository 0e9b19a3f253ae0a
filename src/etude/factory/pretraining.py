"""A pretraining recipe: build the corpus it describes, then run its phases.

The corpus is cached under `.cache/corpus-<hash of its config>`, so that recipes which differ in the model share it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from etude.config import config, write_resolved
from etude.factory.corpus import CorpusConfig, build_corpus, corpus_hash
from etude.trainer.config import PretrainConfig

if TYPE_CHECKING:
    from etude.trainer.pretrain import PretrainResult


@config
class RecipeConfig:
    recipe: str
    pretrain: PretrainConfig
    """Its data paths are folders of the corpus (functions, mixed, sft, heldout) where the recipe has one."""
    corpus: CorpusConfig | None = None
    cache: str = ".cache"
    threads: int = 1
    """CPU threads of each process of `pretrain.processes`."""


def run_recipe(config: RecipeConfig, folder: Path, console: Console) -> PretrainResult:
    """The corpus, then every phase. Interrupted, it goes on from the last part and the last checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    write_resolved(config, folder / "config.json")
    pretrain_config = config.pretrain
    if config.corpus is not None:
        corpus = asyncio.run(_corpus(config.corpus, Path(config.cache), console))
        pretrain_config = _located(pretrain_config, corpus)
    return _train(pretrain_config, folder, config.threads, console)


async def _corpus(config: CorpusConfig, cache: Path, console: Console) -> Path:
    from etude.sandbox.open import open_host

    out = cache / f"corpus-{corpus_hash(config)[:12]}"
    if (out / "corpus.json").exists():
        return out
    host = open_host()
    try:
        return await build_corpus(config, out, host, lambda what, done, total: console.print(f"{what}: {done}/{total}", highlight=False))
    finally:
        await host.close()


def _located(config: PretrainConfig, corpus: Path) -> PretrainConfig:
    """The config with data paths inside the corpus."""
    phases = tuple(dataclasses.replace(p, data=str(corpus / p.data), probe=str(corpus / p.probe) if p.probe else "") for p in config.phases)
    return dataclasses.replace(config, phases=phases, held_out=str(corpus / "heldout"), tokenizer=str(corpus / "tokenizer"))


def _train(config: PretrainConfig, folder: Path, threads: int, console: Console) -> PretrainResult:
    import torch

    from etude.trainer.pretrain import pretrain

    torch.set_num_threads(threads)

    def line(at: dict[str, Any]) -> None:
        if at["step"] % 20 == 0 or "held_out" in at:
            console.print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in at.items()), highlight=False)

    return pretrain(config, folder, progress=line)
