"""The delta codec against the definition of what it must do: apply(base, encode(base, new)) has new's exact bits.

Shape letters as in sync/codec.py: B bytes, E elements, W bytes per element.
"""

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import IntegrityError, UserError
from etude.sync import codec, compression
from etude.sync.codec import apply, decode, encode, hash_tensor, to_bytes, write

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 3, 2)]


def tensor_of(bits_B: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern as a tensor: NaNs with payloads, subnormals, both zeros."""
    if bits_B.size == 0:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        bits_B = bits_B % 2
    return torch.from_numpy(bits_B.copy()).view(dtype).reshape(shape).clone()


def encode_tensors(base: torch.Tensor | None, new: torch.Tensor, name: str = ""):
    return encode(None if base is None else to_bytes(base), to_bytes(new), new.element_size(), codec=name)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    name=st.sampled_from(["none", "zlib", ""]),
    whole=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_round_trip_is_bit_exact(dtype, shape, seed, share, name, whole):
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    old_B = rng.integers(0, 256, size, dtype=np.uint8)
    new_B = np.where(rng.random(size) < share, rng.integers(0, 256, size, dtype=np.uint8), old_B)
    base, new = tensor_of(old_B, dtype, shape), tensor_of(new_B, dtype, shape)
    encoded = encode_tensors(None if whole else base, new, name)
    got = base.clone()
    if encoded.data:
        undo = apply(got, encoded.data)
        assert to_bytes(got).tobytes() == to_bytes(new).tobytes()
        assert hash_tensor(got) == hash_tensor(new)
        write(got, undo)
        assert to_bytes(got).tobytes() == to_bytes(base).tobytes()
    else:
        assert not whole
        assert to_bytes(base).tobytes() == to_bytes(new).tobytes()
    expected = (to_bytes(base).reshape(-1, new.element_size()) != to_bytes(new).reshape(-1, new.element_size())).any(axis=1).sum()
    assert encoded.changed == (new.numel() if whole else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_chained_steps_do_not_drift(dtype):
    torch.manual_seed(0)
    master = torch.randn(64, 33)
    engine = master.to(dtype)
    for _ in range(60):
        before = master.to(dtype)
        master += torch.randn_like(master) * 1e-3 * (torch.rand_like(master) < 0.1)
        new = master.to(dtype)
        encoded = encode_tensors(before, new)
        if encoded.data:
            apply(engine, encoded.data)
        assert to_bytes(engine).tobytes() == to_bytes(new).tobytes()


def test_nan_equals_itself_and_zeros_have_signs():
    nan = torch.tensor([float("nan"), 1.0])
    assert encode_tensors(nan, nan.clone()).changed == 0
    other_nan = to_bytes(nan).copy()
    other_nan[0] ^= 1
    assert encode(to_bytes(nan), other_nan, 4).changed == 1
    assert encode_tensors(torch.tensor([0.0]), torch.tensor([-0.0])).changed == 1


def test_few_changes_cost_few_bytes_and_dense_ones_no_more_than_everything():
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 400_000, dtype=np.uint8)
    new = base.copy()
    new[rng.choice(200_000, 2_000, replace=False) * 2] ^= 1
    sparse = encode(base, new, 2)
    assert sparse.encoding == "values"
    assert len(sparse.data) < 2_000 * 5
    dense = encode(base, 255 - base, 2)
    assert dense.encoding == "full"
    assert len(dense.data) <= len(encode(None, 255 - base, 2).data)
    assert len(encode(base, np.zeros_like(base), 2).data) < 4_000


@pytest.mark.parametrize("gap", [1, 255, 256, 257, 65_536, 65_537, 70_000])
def test_gaps_at_the_edges_of_their_types(gap):
    base = torch.zeros(gap + 1, dtype=torch.uint8)
    new = base.clone()
    new[0] = 1
    new[gap] = 2
    got = base.clone()
    apply(got, encode_tensors(base, new).data)
    assert torch.equal(got, new)


def test_writes_in_place_into_parameters_views_and_strided_tensors():
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    new = torch.arange(24.0).reshape(4, 6)
    apply(parameter, encode_tensors(parameter, new).data)
    assert torch.equal(parameter.detach(), new)
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    storage = torch.zeros(6, 4)
    strided = storage.T
    apply(strided, encode_tensors(strided, new).data)
    assert torch.equal(storage, new.T)


def test_the_payload_names_its_codec_and_skips_what_does_not_compress():
    noise = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)
    assert noise.tobytes() in encode(None, noise, 1, codec="zlib").data
    zeros = np.zeros(200_000, np.uint8)
    data = encode(None, zeros, 1, codec="zlib").data
    code, raw, stored = codec.SECTION.unpack_from(data, codec.HEADER.size)
    assert (code, raw) == (compression.ZLIB, 200_000)
    assert zlib.decompress(data[codec.HEADER.size + codec.SECTION.size :][:stored]) == zeros.tobytes()


@given(position=st.integers(0, 10**6), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=200)
def test_a_damaged_blob_is_an_integrity_error_or_other_bytes_but_never_a_crash(position, flip):
    base = torch.zeros(300, dtype=torch.bfloat16)
    new = base.clone()
    new[::7] = 1.5
    data = bytearray(encode_tensors(base, new).data)
    data[position % len(data)] ^= flip
    got = base.clone()
    try:
        apply(got, bytes(data))
    except IntegrityError:
        assert torch.equal(got, base)
    else:
        assert got.numel() == new.numel()


@pytest.mark.parametrize("length", [0, 5, codec.HEADER.size, codec.HEADER.size + 3, -1])
def test_a_torn_blob_is_refused(length):
    data = encode_tensors(torch.zeros(300), torch.arange(300.0)).data
    with pytest.raises(IntegrityError, match="tensor w"):
        decode(data[:length], "tensor w")


def test_bytes_too_many_and_positions_outside_are_refused():
    data = encode_tensors(torch.zeros(3), torch.ones(3)).data
    with pytest.raises(IntegrityError, match="too many"):
        decode(data + b"x")
    outside = codec.HEADER.pack(codec.MAGIC, codec.VALUES, 1, 1, 4, 1)
    section = struct.pack("<BQQ", compression.RAW, 1, 1)
    with pytest.raises(IntegrityError, match="changes element 9 of 4"):
        decode(outside + section + b"\x09" + section + b"\x01")


def test_a_delta_for_another_shape_is_refused():
    data = encode_tensors(torch.zeros(3), torch.ones(3)).data
    with pytest.raises(IntegrityError, match="3 elements"):
        apply(torch.zeros(4), data)
    with pytest.raises(ValueError, match="another shape"):
        encode_tensors(torch.zeros(4), torch.zeros(3))


def test_unknown_codecs_and_sparse_tensors_are_user_errors():
    with pytest.raises(UserError, match="did you mean 'zstd'"):
        encode_tensors(None, torch.zeros(3), "zst")
    with pytest.raises(UserError, match="dense"):
        to_bytes(torch.eye(3).to_sparse())


def test_zstd_round_trip():
    pytest.importorskip("zstandard")
    base, new = torch.zeros(5000), torch.arange(5000.0)
    got = base.clone()
    apply(got, encode_tensors(base, new, "zstd").data)
    assert torch.equal(got, new)
