import json
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from etude.errors import CheckpointError, UserError
from etude.text.template import ETUDE_SPECIALS, ETUDE_TEMPLATE
from etude.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer

TEXT = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(ETUDE_SPECIALS), st.sampled_from([" ", "\n", "\t", "    ", "7"]))).map(
    "".join
)
BYTES = ByteTokenizer()


@given(text=TEXT)
@example(text="<|end|>")
@example(text="a\u0301 \u212b \ufdfa")
@example(text="\ufeff\r\n\t\x00 x  ")
@example(text="\ud800 lone")
def test_every_text_survives_and_never_becomes_a_special_token(tokenizer, text):
    for tok in (tokenizer, BYTES):
        ids = tok.encode(text)
        whole = "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)
        assert tok.decode(ids) == whole
        assert not set(ids) & set(tok.specials.values())


@given(ids=st.lists(st.integers(-3, 600)))
def test_decoding_is_total(tokenizer, ids):
    for tok in (tokenizer, BYTES):
        assert isinstance(tok.decode(ids), str)
        assert b"".join(tok.pieces(ids)) == tok.decode_bytes(ids)


def test_a_character_split_over_tokens_decodes_as_replacement_but_keeps_its_bytes():
    ids = BYTES.encode("\u00e9")
    assert BYTES.decode(ids[:1]) == "\ufffd"
    assert BYTES.decode_bytes(ids[:1]) == b"\xc3"


def test_markup_recognises_special_tokens(tokenizer):
    end, user = tokenizer.token_id("<|end|>"), tokenizer.token_id("<|user|>")
    assert tokenizer.encode_markup("<|user|>hi<|end|>") == [user, *tokenizer.encode("hi"), end]
    assert tokenizer.token_id("hi") is None
    assert [tokenizer.token_id(s) for s in ETUDE_SPECIALS] == list(range(len(ETUDE_SPECIALS)))


def test_pieces_of_code(tokenizer):
    def spelled(text):
        return [p.decode() for p in tokenizer.pieces(tokenizer.encode(text))]

    assert spelled('<call name="read_file">\n<path>') == ['<call name="read_file">', "\n", "<path>"]
    assert "1" in spelled("1234")
    assert len(spelled("1234")) == 4
    assert spelled("\n        total") == ["\n", "       ", " total"]
    assert spelled(">    return")[-2:] == spelled("\n    return")[-2:]


def test_training_is_the_same_in_every_process():
    program = (
        "from etude.text.tokenizer import train_tokenizer\n"
        "texts = [f'def f{i}(x): return x + {i % 7} # {\"ab\" * (i % 5)}' for i in range(300)]\n"
        "print(train_tokenizer(texts, 500).hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout.strip()
        for seed in "12"
    }
    assert len(hashes) == 1
    assert hashes.pop()


def test_save_and_load_keep_everything(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.hash == tokenizer.hash
    assert again.vocab_size == tokenizer.vocab_size == 394
    assert again.encode("def mean(values):") == tokenizer.encode("def mean(values):")
    assert again.config["chat_template"] == ETUDE_TEMPLATE
    again.save(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").config == again.config


def _foreign(**changes):
    """A checkpoint's pipeline with every feature that breaks exactness."""
    library = Library(models.BPE(ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
    )
    library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    spec = json.loads(library.to_str())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spec["model"]["vocab"] = {"<|end|>": 0} | {c: i for i, c in enumerate(alphabet, start=1)}
    spec["added_tokens"] = [
        {"id": 0, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": True},
        {"id": 300, "content": "<think>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False},
    ]
    return spec | changes


@given(text=TEXT)
def test_a_foreign_checkpoint_is_exact_too(text):
    tok = Tokenizer(_foreign())
    text = text.encode("utf-8", "replace").decode() + "<|end|> <think> e\u0301"
    assert tok.decode(tok.encode(text)) == text
    assert not {0, 300} & set(tok.encode(text))


def test_foreign_details():
    tok = Tokenizer(_foreign())
    assert tok.vocab_size == 301
    assert tok.encode_markup("<think>\n<|end|>  x") == [300, *tok.encode("\n"), 0, *tok.encode("x")]  # rstrip is honoured
    library = Library.from_str(json.dumps(_foreign(post_processor=json.loads(processors.ByteLevel().__getstate__()))))
    assert library.encode("<|end|>", add_special_tokens=False).ids == [0]  # what `encode` must not do


def test_missing_byte_tokens_are_replaced_visibly():
    spec = _foreign()
    del spec["model"]["vocab"]["\u0100"]  # the byte 0
    tok = Tokenizer(spec)
    assert tok.decode(tok.encode("a\x00b")) == "a\ufffdb"


def test_refusals(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(CheckpointError, match="Unigram"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="ByteLevel"):
        Tokenizer(_foreign(pre_tokenizer=None))
    with pytest.raises(UserError, match="at least 264"):
        train_tokenizer([], 100)


def test_hash_is_of_the_content(tokenizer):
    assert train_tokenizer(["abc"], 300).hash != tokenizer.hash
    assert ByteTokenizer(["<|x|>"]).hash != BYTES.hash
