"""Shared by the tests of agent: a workspace, a scripted engine's chat, and one way to run a coroutine."""

import asyncio

import pytest

from etude.agent.chat import EngineChat
from etude.fakes import ScriptedEngine, memory_sandbox
from etude.records import Sampling
from etude.text.renderer import EtudeRenderer
from etude.text.tokenizer import ByteTokenizer

FILES = {
    "shop/stats.py": "def mean(values):\n    raise NotImplementedError\n\n\ndef total(values):\n    return sum(values)\n",
    "tests/test_stats.py": "from shop.stats import mean\n\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n",
    "README.md": "# shop\n",
}


def run_tests(files):
    if b"NotImplementedError" in files["shop/stats.py"]:
        return 1, "E   NotImplementedError\n1 failed in 0.03s\n"
    return "1 passed in 0.02s\n"


@pytest.fixture
def workspace():
    """Makes a sandbox with a small package; more files and commands may be given."""

    def make(files=None, commands=None):
        return memory_sandbox({**FILES, **(files or {})}, {"pytest": run_tests, **(commands or {})})

    return make


@pytest.fixture
def engine_chat():
    """Makes a chat over a scripted engine with a byte tokenizer; the engine is at `.engine`."""

    def make(replies, *, seed=1, **options):
        tokenizer = ByteTokenizer()
        engine = ScriptedEngine(tokenizer, replies, **options)
        chat = EngineChat(engine, EtudeRenderer(tokenizer), tokenizer, Sampling(temperature=1.0), seed=seed)
        chat.engine, chat.tokenizer = engine, tokenizer
        return chat

    return make


@pytest.fixture
def run():
    return asyncio.run
