"""Document shards on disk, and the rows pretraining reads from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import RecordError, UserError
from etude.trainer.documents import Documents, Rows, rows_of, write_documents

DOCUMENTS = [([5, 6, 7], None), ([5, 8], [0, 1]), ([], None), (list(range(20)), [0] * 5 + [1] * 15)]


@pytest.mark.parametrize("name", ["a.npz", "a.bin"])
@pytest.mark.parametrize("offset", [0, 70_000])
def test_round_trip(tmp_path, name, offset):
    documents = [([t + offset for t in ids], mask) for ids, mask in DOCUMENTS]
    assert write_documents(tmp_path / name, documents) == 25
    read = Documents(tmp_path / name)
    assert (len(read), read.tokens, read.largest_id) == (4, 25, 19 + offset)
    for (ids, mask), (got, got_mask) in zip(documents, read, strict=True):
        assert got.tolist() == ids
        assert got_mask.tolist() == (mask or [1] * len(ids))
    assert read.shards[0].ids_N.dtype == (np.uint16 if offset == 0 else np.uint32)


def test_a_folder_is_all_its_shards_in_order(tmp_path):
    write_documents(tmp_path / "b.bin", [([2, 3], None)])
    write_documents(tmp_path / "a.npz", [([1, 2], None)])
    (tmp_path / "readme.txt").write_text("not a shard")
    assert [ids.tolist() for ids, _ in Documents(tmp_path)] == [[1, 2], [2, 3]]


def test_bin_is_memory_mapped(tmp_path):
    write_documents(tmp_path / "a.bin", DOCUMENTS)
    assert isinstance(Documents(tmp_path).shards[0].ids_N, np.memmap)


def test_bad_shards_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="no document shards"):
        Documents(tmp_path)
    with pytest.raises(UserError, match="mask of 1"):
        write_documents(tmp_path / "x.npz", [([1, 2], [1])])
    with pytest.raises(UserError, match=r"\.npz or \.bin"):
        write_documents(tmp_path / "x.txt", [])
    write_documents(tmp_path / "cut.bin", DOCUMENTS)
    data = (tmp_path / "cut.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(data[:-3])
    with pytest.raises(RecordError, match=r"cut\.bin is not a document shard"):
        Documents(tmp_path / "cut.bin")
    (tmp_path / "noise.npz").write_bytes(b"noise")
    with pytest.raises(RecordError, match=r"noise\.npz is not a document shard"):
        Documents(tmp_path / "noise.npz")


def test_pieces_cut_long_documents_and_leave_out_what_predicts_nothing(tmp_path):
    write_documents(tmp_path / "a.npz", [*DOCUMENTS, ([1, 2, 3], [1, 0, 0])])
    pieces = Documents(tmp_path).pieces(8)
    assert [(a, b) for _, a, b in pieces.tolist()] == [(0, 3), (3, 5), (5, 13), (13, 21), (21, 25)]


def test_rows_hold_whole_pieces_and_their_weights_sum_to_one(tmp_path):
    write_documents(tmp_path / "a.npz", DOCUMENTS * 10)
    documents = Documents(tmp_path)
    rows = rows_of(documents, documents.pieces(8), 16)
    assert sum(float(r.ce_weight_N.sum()) for r in rows) == pytest.approx(1.0)
    assert all(len(r.ids_N) <= 16 for r in rows)
    assert all(r.positions_N[a] == 0 and r.ce_weight_N[a] == 0 for r in rows for a, _ in r.bounds)
    weights = {w for r in rows for w in r.ce_weight_N.tolist() if w}
    assert len(weights) == 1, "every predicted token weighs the same"


@given(st.integers(1, 60), st.integers(0, 30))
def test_position_is_all_the_state(tmp_path_factory, tokens, skip):
    path = tmp_path_factory.mktemp("docs") / "a.npz"
    write_documents(path, DOCUMENTS * 3)
    one = Rows(Documents(path), length=8, row_tokens=16, seed=1)
    for _ in range(skip):
        one.take(tokens)
    two = Rows(Documents(path), length=8, row_tokens=16, seed=1)
    two.restore(one.state)
    for _ in range(3):
        assert [r.ids_N.tolist() for r in one.take(tokens)] == [r.ids_N.tolist() for r in two.take(tokens)]


def test_an_epoch_shows_every_piece_once_in_an_order_of_its_own(tmp_path):
    write_documents(tmp_path / "a.npz", [([i, i + 1], None) for i in range(50)])
    rows = Rows(Documents(tmp_path), length=8, row_tokens=16, seed=0)

    def epoch():
        return [int(r.ids_N[a]) for _ in range(10) for r in rows.take(10) for a, _ in r.bounds]

    first, second = epoch(), epoch()
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))


def test_data_that_predicts_nothing_is_an_error(tmp_path):
    write_documents(tmp_path / "a.npz", [([1, 2], [0, 0])])
    with pytest.raises(UserError, match="no token to predict"):
        Rows(Documents(tmp_path), length=8, row_tokens=16, seed=0)
