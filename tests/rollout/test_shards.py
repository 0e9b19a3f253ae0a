"""Shards: what goes in comes out equal by value, whatever a crash did to the last write."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import InfraError, IntegrityError, RecordError
from etude.records import (
    ABSENT_ROUTE,
    Drop,
    Dropped,
    Finding,
    Graded,
    Group,
    Message,
    Sampling,
    Segment,
    Span,
    StopReason,
    Task,
    TestReport,
    ToolCall,
    ToolError,
    ToolResult,
    Trajectory,
    Version,
    to_json,
)
from etude.rollout.shards import ShardReader, ShardWriter, decode_block, encode_block, read_groups, write_groups

VERSIONS = (Version(lineage=0, ordinal=3, hash="a" * 32), Version(lineage=0, ordinal=4, hash="b" * 32))


def segment(rng: np.random.Generator, tokens: int, experts: int = 16, layers: int = 4, choices: int = 2) -> Segment:
    sampled_T = rng.random(tokens) < 0.5
    logprob_T = np.where(sampled_T, -rng.exponential(size=tokens), 0).astype(np.float32)
    routes_TLK = rng.integers(0, experts, (tokens, layers, choices)).astype(np.uint8)
    routes_TLK[-1:] = ABSENT_ROUTE
    return Segment(
        ids_T=rng.integers(0, 772, tokens).astype(np.int32),
        sampled_T=sampled_T,
        logprob_T=logprob_T,
        logprob_t1_T=logprob_T.copy(),
        version_T=np.where(sampled_T, rng.integers(0, 2, tokens), -1).astype(np.int16),
        message_T=np.sort(rng.integers(0, 5, tokens)).astype(np.int32),
        thinking_T=sampled_T & (rng.random(tokens) < 0.2),
        versions=VERSIONS,
        routes_TLK=routes_TLK if experts else None,
        sampling=Sampling(seed=7),
    )


def trajectory(number: int, tokens: int = 200, segments: int = 1) -> Trajectory:
    rng = np.random.default_rng(number)
    call = ToolCall(id="c1", name="edit_file", arguments={"path": "a.py", "$array": "[0, 1, [2]]"}, error=ToolError.BAD_ARGUMENTS)
    messages = (
        Message(role="user", text="do it \u00e9 \ud800", span=Span(segment=0, start=0, end=9)),
        Message(role="assistant", text="", reasoning="hm", calls=(call,)),
        Message(role="tool", results=(ToolResult(call_id="c1", name="edit_file", text="no such file", error=ToolError.FAILED),)),
    )
    return Trajectory(
        id=f"t{number}",
        task_id="kata-1",
        task_hash="ff",
        group=number // 8,
        member=number % 8,
        seed=number,
        segments=tuple(segment(rng, tokens) for _ in range(segments)),
        messages=messages,
        stop=StopReason.DONE,
        timings={"tools": 0.25},
    )


def graded(number: int, **options) -> Graded:
    return Graded(
        trajectory=trajectory(number, **options),
        parts={"tests": 1.0},
        report=TestReport(passed=("a",), solved=True),
        findings=(Finding(rule="r", evidence="e"),),
    )


def group(admission: int, members: int = 3) -> Group:
    return Group(
        admission=admission,
        task_id="kata-1",
        admitted_at=VERSIONS[0],
        members=tuple(graded(admission * 8 + i, tokens=20 + i) for i in range(members)),
        dropped=(Dropped(member=members, reason=Drop.INFRA, detail="died"),),
    )


@pytest.mark.parametrize("block_records", [1, 3, 100])
def test_round_trip_by_position_id_and_iteration(tmp_path, block_records):
    records = [graded(i, tokens=10 + 13 * i, segments=1 + i % 3) for i in range(10)]
    with ShardWriter(tmp_path, block_records=block_records) as writer:
        for record in records:
            writer.add(record)
    reader = ShardReader(tmp_path)
    expected = [to_json(r) for r in records]
    assert [to_json(r) for r in reader] == expected
    assert [to_json(reader[i]) for i in reversed(range(10))] == expected[::-1]
    assert to_json(reader.get("t4")) == expected[4]
    assert len(reader) == 10
    assert reader.ids == [f"t{i}" for i in range(10)]
    assert "t9" in reader
    assert "t10" not in reader
    with pytest.raises(RecordError, match="'t10'"):
        reader.get("t10")


def test_arrays_come_back_with_type_and_shape_and_read_only(tmp_path):
    before = trajectory(1)
    with ShardWriter(tmp_path) as writer:
        writer.add(before)
    after = ShardReader(tmp_path)[0]
    for name in ("ids_T", "sampled_T", "logprob_T", "version_T", "routes_TLK"):
        a, b = getattr(before.segments[0], name), getattr(after.segments[0], name)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert not b.flags.writeable
        np.testing.assert_array_equal(a, b)


ARRAYS = st.sampled_from(["|b1", "|u1", "|i1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", ">i4"])
SHAPES = st.sampled_from([(), (0,), (1,), (9,), (5, 2), (3, 0, 2), (4, 3, 2)])


@given(types=st.lists(st.tuples(ARRAYS, SHAPES), min_size=1, max_size=6), seed=st.integers(0, 2**32 - 1), small=st.booleans())
@settings(deadline=None, max_examples=200)
def test_any_array_keeps_its_bits(types, seed, small):
    rng = np.random.default_rng(seed)
    base = segment(rng, 3)
    records = []
    for number, (dtype, shape) in enumerate(types):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = rng.integers(0, 2 if dtype == "|b1" or small else 256, size, dtype=np.uint8).tobytes()
        array = np.frombuffer(raw, dtype).reshape(shape)
        records.append(trajectory(number, tokens=2).replace(segments=(base.replace(ids_T=array, routes_TLK=None), base)))
    got = decode_block(encode_block(records), "here")
    for a, b in zip(records, got, strict=True):
        x, y = a.segments[0].ids_T, b.segments[0].ids_T
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()
        assert to_json(a) == to_json(b)


def test_shards_roll_over(tmp_path):
    with ShardWriter(tmp_path, shard_bytes=20_000) as writer:
        for i in range(20):
            writer.add(graded(i))
    shards = sorted(tmp_path.glob("shard-*.bin"))
    assert len(shards) > 3
    assert all(p.stat().st_size <= 20_000 for p in shards)
    with ShardWriter(tmp_path, shard_bytes=20_000) as writer:
        writer.add(graded(20))
    assert ShardReader(tmp_path).ids == [f"t{i}" for i in range(21)]


def test_an_id_written_again_is_found_in_its_newer_form(tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.add(trajectory(1))
        writer.add(trajectory(1).replace(stop=StopReason.OUT_OF_TURNS))
    reader = ShardReader(tmp_path)
    assert len(reader) == 2
    assert reader.get("t1").stop is StopReason.OUT_OF_TURNS


def _cut(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


def test_a_crash_at_any_byte_loses_only_the_last_block_and_writing_goes_on(tmp_path):
    """Replays the two writes of the third block up to every 97th byte of them, the last bytes included."""
    with ShardWriter(tmp_path / "whole") as writer:
        writer.add(trajectory(0, tokens=30))
        writer.add(trajectory(1, tokens=30))
        sizes = {n: (tmp_path / "whole" / n).stat().st_size for n in ("shard-00000.bin", "index.jsonl")}
        writer.add(trajectory(2, tokens=30))
    shard, index = ((tmp_path / "whole" / n).read_bytes() for n in sizes)
    block, line = len(shard) - sizes["shard-00000.bin"], len(index) - sizes["index.jsonl"]
    cuts = [(b, 0) for b in [*range(0, block, 97), block - 1, block]] + [(block, i) for i in [*range(1, line, 7), line - 1, line]]
    for number, (in_block, in_line) in enumerate(cuts):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "shard-00000.bin").write_bytes(shard[: sizes["shard-00000.bin"] + in_block])
        (folder / "index.jsonl").write_bytes(index[: sizes["index.jsonl"] + in_line])
        kept = 3 if in_line == line else 2
        assert ShardReader(folder).ids == ["t0", "t1", "t2"][:kept]
        with ShardWriter(folder) as writer:
            writer.add(trajectory(7, tokens=5))
        reader = ShardReader(folder)
        assert reader.ids == [*["t0", "t1", "t2"][:kept], "t7"]
        assert not reader.torn
        assert [r.id for r in reader] == reader.ids


def test_an_index_line_that_reached_the_disk_before_its_block_is_left_out(tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.add(trajectory(0))
        writer.add(trajectory(1))
    size = (tmp_path / "shard-00000.bin").stat().st_size
    _cut(tmp_path / "shard-00000.bin", size - 1)
    reader = ShardReader(tmp_path)
    assert reader.ids == ["t0"]
    assert reader.torn
    data = bytearray((tmp_path / "shard-00000.bin").read_bytes()) + b"\0"
    (tmp_path / "shard-00000.bin").write_bytes(data)
    assert ShardReader(tmp_path).ids == ["t0"]
    with ShardWriter(tmp_path) as writer:
        writer.add(trajectory(2))
    assert [r.id for r in ShardReader(tmp_path)] == ["t0", "t2"]


def test_damage_in_the_middle_is_named_when_it_is_read(tmp_path):
    with ShardWriter(tmp_path) as writer:
        for i in range(3):
            writer.add(trajectory(i))
    path = tmp_path / "shard-00000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    reader = ShardReader(tmp_path)
    assert reader[0].id == "t0"
    with pytest.raises(IntegrityError, match=r"shard-00000\.bin: crc"):
        reader[1]
    lines = (tmp_path / "index.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "index.jsonl").write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(IntegrityError, match="line 2"):
        ShardReader(tmp_path)


def test_a_killed_writer_leaves_what_it_had_added(tmp_path):
    """A process that adds records until it is killed: everything it reported is readable."""
    code = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2])\n"
        "from etude.records import *\n"
        "from etude.rollout.shards import ShardWriter\n"
        "w = ShardWriter(sys.argv[1])\n"
        "for i in range(10**6):\n"
        "    w.add(Trajectory(id=f't{i}', task_id='', task_hash='', group=0, member=0, seed=i, segments=(), messages=(),\n"
        "                     stop=StopReason.DONE))\n"
        "    print(i, flush=True)\n"
    )
    src = os.path.join(os.path.dirname(__file__), "..", "..", "src")
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), src], stdout=subprocess.PIPE)
    for _ in range(50):
        reported = int(child.stdout.readline())
    child.kill()
    rest = child.stdout.read().split()
    child.stdout.close()
    child.wait()
    reported = int(rest[-1]) if rest else reported
    reader = ShardReader(tmp_path)
    assert len(reader) in (reported + 1, reported + 2)
    assert [r.seed for r in reader] == list(range(len(reader)))


def test_routes_and_log_probs_are_small_on_disk(tmp_path):
    """Uniform routes cannot be beaten below log2(experts) bits a choice; skewed ones compress; equal log-probs are stored once."""
    rng = np.random.default_rng(0)
    uniform = trajectory(0, tokens=4000)
    popular = np.minimum(rng.geometric(0.4, (4000, 4, 2)) - 1, 15).astype(np.uint8)
    skewed = uniform.replace(id="s", segments=(uniform.segments[0].replace(routes_TLK=popular),))
    sizes = {}
    for record in (uniform, skewed):
        with ShardWriter(tmp_path / record.id) as writer:
            writer.add(record)
        sizes[record.id] = ShardReader(tmp_path / record.id).column_bytes()
    raw, entropy = 4 * 2, 4 * 2 * 4 / 8
    assert sizes["t0"]["routes_TLK"] / 4000 < 1.1 * entropy
    assert sizes["s"]["routes_TLK"] / 4000 < 0.4 * raw
    assert sizes["t0"]["logprob_t1_T"] == 0
    assert sizes["t0"]["sampled_T"] <= 4000 / 8
    assert sizes["t0"]["ids_T"] / 4000 < 2


def test_large_expert_counts_use_their_bits(tmp_path):
    rng = np.random.default_rng(0)
    routes_TLK = rng.integers(0, 384, (500, 61, 8)).astype(np.uint16)
    one = trajectory(0, tokens=500)
    one = one.replace(segments=(one.segments[0].replace(routes_TLK=routes_TLK),))
    with ShardWriter(tmp_path) as writer:
        writer.add(one)
    reader = ShardReader(tmp_path)
    np.testing.assert_array_equal(reader[0].segments[0].routes_TLK, routes_TLK)
    assert reader.column_bytes()["routes_TLK"] / 500 < 0.62 * 976


def test_groups_of_a_checkpoint(tmp_path):
    groups = [group(4), group(2, members=1), group(9)]
    write_groups(tmp_path / "groups", groups)
    assert [to_json(g) for g in read_groups(tmp_path / "groups")] == [to_json(g) for g in groups]
    write_groups(tmp_path / "none", [])
    assert read_groups(tmp_path / "none") == []
    assert sorted(os.listdir(tmp_path)) == ["groups", "none"]
    with pytest.raises(RecordError, match="already holds"):
        write_groups(tmp_path / "groups", groups)
    with pytest.raises(RecordError, match="no trajectories"):
        read_groups(tmp_path / "missing")


def test_groups_that_lost_a_byte_are_refused(tmp_path):
    write_groups(tmp_path / "groups", [group(0), group(1)])
    for name in ("index.jsonl", "shard-00000.bin"):
        data = (tmp_path / "groups" / name).read_bytes()
        (tmp_path / "groups" / name).write_bytes(data[:-1])
        with pytest.raises(IntegrityError, match="lost part"):
            read_groups(tmp_path / "groups")
        (tmp_path / "groups" / name).write_bytes(data)
    (tmp_path / "groups" / "index.jsonl").unlink()
    with pytest.raises(IntegrityError, match="lost part"):
        read_groups(tmp_path / "groups")


def test_a_half_written_folder_of_groups_does_not_count(tmp_path):
    (tmp_path / "groups.tmp").mkdir()
    (tmp_path / "groups.tmp" / "index.jsonl").write_text("half")
    write_groups(tmp_path / "groups", [group(0)])
    assert len(read_groups(tmp_path / "groups")) == 1
    assert os.listdir(tmp_path) == ["groups"]


def test_only_records_with_an_id_and_only_this_format(tmp_path):
    with ShardWriter(tmp_path) as writer, pytest.raises(RecordError, match="not Version"):
        writer.add(VERSIONS[0])
    block = bytearray(encode_block([trajectory(0)]))
    block[4] = 9
    with pytest.raises(RecordError, match="format 9"):
        decode_block(bytes(block), "here")
    assert not issubclass(Task, Trajectory)


def test_a_full_disk_leaves_whole_blocks(tmp_path):
    resource = pytest.importorskip("resource")
    import signal

    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    writer = ShardWriter(tmp_path)
    try:
        writer.add(trajectory(0))
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "shard-00000.bin").stat().st_size + 100, old[1]))
        with pytest.raises(InfraError, match="cannot append"):
            writer.add(trajectory(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert ShardReader(tmp_path).ids == ["t0"]
    writer.close()
    assert ShardReader(tmp_path).ids == ["t0", "t1"]


def test_reading_needs_no_torch(tmp_path):
    with ShardWriter(tmp_path) as writer:
        writer.add(graded(0))
    code = (
        "import json, sys; from etude.rollout.shards import ShardReader\n"
        "r = ShardReader(sys.argv[1])[0]; print(json.dumps([r.trajectory.id, 'torch' in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == ["t0", False]
