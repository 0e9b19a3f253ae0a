"""Publisher and receiver over one store: bit-exact chains, and every way a chain can be damaged."""

import random

import pytest
import torch

from etude.errors import CheckpointError, IntegrityError, UserError
from etude.records import Version
from etude.sync.chain import HEAD, manifest_key, published, read_manifest, verify_chain, write_manifest
from etude.sync.codec import hash_tensor, to_bytes
from etude.sync.publish import Publisher, weights_hash
from etude.sync.receive import CanaryRefused, Receiver, apply
from etude.sync.store import FolderStore, MemoryStore


def same(a, b) -> bool:
    return all(to_bytes(a[n]).tobytes() == to_bytes(b[n]).tobytes() for n in a) and a.keys() == b.keys()


def publish(publisher, model, commit=True, **options):
    manifest = publisher.publish(model.state, model.version(publisher.lineage), **options)
    if commit:
        publisher.commit(manifest.version)
    return manifest


def chain(model, steps, anchor_every=25, store=None):
    """A store with versions 0..steps committed; returns (store, publisher, states by ordinal)."""
    store = store or MemoryStore()
    publisher = Publisher(store, 0, anchor_every=anchor_every)
    states = {}
    for ordinal in range(steps + 1):
        if ordinal:
            model.step()
        publish(publisher, model)
        states[ordinal] = {n: t.clone() for n, t in model.state.items()}
    return store, publisher, states


def damage(store, ordinal):
    """Flip one byte in the middle of a version's payload."""
    (key,) = [k for k in store.names("payloads/") if k.startswith(f"payloads/000000-{ordinal:09d}")]
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    store.write(key, bytes(data))
    return key


def test_sixty_links_arrive_bit_exact_on_disk(model, tmp_path):
    store = FolderStore(tmp_path / "weights", durable=False)
    publisher = Publisher(store, 0, anchor_every=25)
    state = model.blank()
    receiver = Receiver(state, str(tmp_path / "weights"))
    anchors = []
    for ordinal in range(61):
        if ordinal:
            model.step()
        manifest = publish(publisher, model)
        assert receiver.advance(manifest).key == manifest.version.key == receiver.version.key
        assert same(state, model.state)
        assert weights_hash(state) == manifest.version.hash
        if manifest.base is None:
            anchors.append(ordinal)
    assert anchors == [0, 25, 50]
    assert receiver.healed == []
    assert len(verify_chain(store)) == 61
    assert len(store.names()) == 61 * 2 + 1


def test_a_delta_is_small_and_says_what_changed(model):
    store, publisher, _ = chain(model, 0)
    model.step()
    manifest = publish(publisher, model)
    entries = {e.name: e for e in manifest.tensors}
    assert entries["layers.0.w"].encoding == "values"
    assert entries["layers.0.w"].changed == 4 or entries["layers.0.w"].changed == 5
    assert entries["embed.weight"].changed == 0
    assert entries["embed.weight"].payload == ""
    assert entries["embed.weight"].hash == hash_tensor(model.state["embed.weight"])
    assert manifest.bytes == len(store.read(entries["steps"].payload))
    assert manifest.bytes < 500


def test_nothing_changed_writes_a_manifest_and_no_payload(model):
    store, publisher, _ = chain(model, 0)
    payloads = store.names("payloads/")
    manifest = publisher.publish(model.state, Version(lineage=0, ordinal=1, hash=""))
    assert manifest.bytes == 0
    assert store.names("payloads/") == payloads
    state = model.blank()
    assert Receiver(state, store).catch_up().ordinal == 1
    assert same(state, model.state)


def test_publishing_again_without_commit_starts_from_the_committed_base(model):
    store, publisher, states = chain(model, 1)
    state = {n: t.clone() for n, t in states[1].items()}
    receiver = Receiver(state, store, version=publisher.committed)
    model.step()
    lost = publish(publisher, model, commit=False)
    model.step()
    kept = publish(publisher, model)
    assert lost.base.ordinal == kept.base.ordinal == 1
    receiver.advance(kept)
    assert receiver.healed == []
    assert same(state, model.state)
    model.step()
    assert publish(publisher, model).base.ordinal == 3


def test_the_published_bytes_are_a_copy(model):
    store, publisher, _ = chain(model, 0)
    model.step()
    manifest = publish(publisher, model, commit=False)
    model.step()
    publisher.commit(manifest.version)
    following = publish(publisher, model)
    state = model.blank()
    receiver = Receiver(state, store)
    receiver.catch_up(manifest.version)
    receiver.advance(following)
    assert receiver.healed == []
    assert same(state, model.state)


def test_commit_of_something_else_is_refused(model):
    store, publisher, _ = chain(model, 1)
    with pytest.raises(UserError, match="not published"):
        publisher.commit(Version(lineage=0, ordinal=9, hash="ab"))
    with pytest.raises(UserError, match="only go up"):
        publisher.publish(model.state, model.version())
    with pytest.raises(UserError, match="not of lineage 0"):
        publisher.publish(model.state, model.version(lineage=3))
    model.step()
    with pytest.raises(IntegrityError, match="weights_hash"):
        publisher.publish(model.state, Version(lineage=0, ordinal=2, hash="0" * 32))
    assert store.has(HEAD)


def test_resume_is_a_new_lineage_that_begins_with_an_anchor(model, tmp_path):
    store, _, _ = chain(model, 3, store=FolderStore(tmp_path, durable=False))
    with pytest.raises(CheckpointError, match="lineage above 0"):
        Publisher(tmp_path, 0)
    publisher = Publisher.resume(tmp_path)
    assert publisher.lineage == 1
    model.step()
    manifest = publish(publisher, model)
    assert manifest.base is None
    assert manifest.lineage == 1
    state = model.blank()
    assert Receiver(state, tmp_path).catch_up().key == manifest.version.key
    assert same(state, model.state)
    assert [m.version.lineage for m in verify_chain(store)] == [0, 0, 0, 0, 1]
    assert Publisher.resume(tmp_path, 7).lineage == 7


def test_a_late_joiner_catches_up_to_any_version_and_goes_back(model):
    store, _, states = chain(model, 8, anchor_every=4)
    state = model.blank()
    receiver = Receiver(state, store)
    for ordinal in (3, 8, 2, 7, 5, 0):
        receiver.catch_up(read_manifest(store, 0, ordinal).version)
        assert same(state, states[ordinal])
    assert receiver.catch_up().ordinal == 8
    assert same(state, states[8])


def test_a_gap_is_healed(model):
    store, _, states = chain(model, 5)
    state = model.blank()
    receiver = Receiver(state, store)
    receiver.advance(read_manifest(store, 0, 0))
    receiver.advance(read_manifest(store, 0, 4))
    assert same(state, states[4])
    assert "wrong base" in receiver.healed[0]


def test_an_older_link_is_refused_and_a_repeated_one_is_nothing_new(model):
    store, _, states = chain(model, 3)
    state = model.blank()
    receiver = Receiver(state, store)
    receiver.catch_up()
    assert receiver.advance(read_manifest(store, 0, 3)).ordinal == 3
    with pytest.raises(IntegrityError, match="out of order"):
        receiver.advance(read_manifest(store, 0, 2))
    assert same(state, states[3])
    assert receiver.version.ordinal == 3


def test_a_damaged_payload_changes_nothing_and_is_healed_by_the_next_anchor(model):
    store, publisher, states = chain(model, 5)
    state = model.blank()
    receiver = Receiver(state, store)
    receiver.catch_up(read_manifest(store, 0, 2).version)
    key = damage(store, 3)
    for ordinal in (3, 5):
        with pytest.raises(IntegrityError, match=key):
            receiver.advance(read_manifest(store, 0, ordinal))
        assert same(state, states[2])
        assert receiver.version.ordinal == 2
    assert Receiver(model.blank(), store).catch_up().ordinal == 2
    model.step()
    anchor = publish(publisher, model, anchor=True)
    assert receiver.advance(anchor).ordinal == 6
    assert same(state, model.state)


def test_a_missing_payload_or_manifest_is_named(model):
    store, _, states = chain(model, 5)
    state = model.blank()
    receiver = Receiver(state, store)
    receiver.catch_up(read_manifest(store, 0, 1).version)
    store.remove(read_manifest(store, 0, 3).tensors[1].payload)
    with pytest.raises(IntegrityError, match="no object 'payloads/000000-000000003"):
        receiver.advance(read_manifest(store, 0, 4))
    store.remove(manifest_key(0, 2))
    with pytest.raises(IntegrityError, match="no object 'manifests/000000-000000002"):
        receiver.advance(read_manifest(store, 0, 4))
    assert same(state, states[1])


def test_drifted_memory_is_detected_by_name_and_hash_and_rebuilt(model):
    store, publisher, _ = chain(model, 3)
    state = model.blank()
    receiver = Receiver(state, store)
    receiver.catch_up()
    state["layers.0.w"][3, 3] += 1
    model.step()
    receiver.advance(publish(publisher, model))
    assert same(state, model.state)
    assert "'layers.0.w'" in receiver.healed[0]
    assert hash_tensor(model.state["layers.0.w"]) in receiver.healed[0]
    state["embed.weight"][0, 0] += 1
    model.step()
    receiver.advance(publish(publisher, model))
    assert same(state, model.state)
    assert "'embed.weight'" in receiver.healed[1]


def test_drifted_memory_without_an_anchor_is_not_half_applied(model):
    store, publisher, states = chain(model, 1)
    state = {n: t.clone() for n, t in states[1].items()}
    state["embed.weight"][1, 1] += 7
    drifted = {n: t.clone() for n, t in state.items()}
    model.step()
    manifest = publish(publisher, model)
    damage(store, 0)
    receiver = Receiver(state, store, version=manifest.base)
    with pytest.raises(IntegrityError, match=r"'embed.weight'.*failed too.*payload"):
        receiver.advance(manifest)
    assert same(state, drifted)
    assert receiver.version is None


def test_an_altered_manifest_is_refused_and_the_stored_one_used(model):
    store, publisher, _ = chain(model, 2)
    state = model.blank()
    receiver = Receiver(state, store)
    receiver.catch_up()
    model.step()
    manifest = publish(publisher, model)
    receiver.advance(manifest.replace(config_hash="other"))
    assert "altered" in receiver.healed[0]
    assert same(state, model.state)
    fresh = Receiver(state, store, version=publisher.committed)
    model.step()
    fresh.advance(publish(publisher, model).replace(config_hash="other"))
    assert "altered" in fresh.healed[0]
    model.step()
    manifest = publish(publisher, model)
    entry = manifest.tensors[0]
    write_manifest(store, manifest.replace(tensors=(entry.replace(hash="0" * 32), *manifest.tensors[1:])))
    with pytest.raises(IntegrityError, match="tensors hash to"):
        Receiver(model.blank(), store).catch_up(manifest.version)
    store.write(manifest_key(0, 5), b"{not json")
    with pytest.raises(IntegrityError, match="not readable"):
        read_manifest(store, 0, 5)


def test_the_chain_shows_a_rewritten_past(model):
    store, _, _ = chain(model, 3)
    write_manifest(store, read_manifest(store, 0, 1).replace(config_hash="forged"))
    with pytest.raises(IntegrityError, match="does not continue the chain"):
        verify_chain(store)


def test_another_model_is_a_user_error(model):
    store, _, _ = chain(model, 0)
    manifest = read_manifest(store, 0, 0)
    state = model.blank()
    state["scale"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"'scale'.*float32 \(\)"):
        apply(state, manifest, store)
    del state["scale"]
    with pytest.raises(CheckpointError, match="the model lacks tensor 'scale'"):
        apply(state, manifest, store)


def test_apply_without_a_receiver(model):
    store, publisher, states = chain(model, 2)
    state = {n: t.clone() for n, t in states[2].items()}
    model.step()
    manifest = publish(publisher, model)
    assert apply(state, manifest, store).key == manifest.version.key
    assert same(state, model.state)
    other = model.blank()
    assert apply(other, manifest, store).key == manifest.version.key
    assert same(other, model.state)


def test_tied_tensors_and_live_parameters_are_followed_in_place(model):
    layer = torch.nn.Linear(3, 3, bias=False)
    source = torch.nn.Linear(3, 3, bias=False)
    state, other = ({"a": m.weight, "b": m.weight} for m in (layer, source))
    publisher = Publisher(MemoryStore(), 0)
    receiver = Receiver(state, publisher.store)
    for ordinal in range(3):
        with torch.no_grad():
            source.weight[ordinal] += 1
        receiver.advance(publisher.publish(other, Version(lineage=0, ordinal=ordinal, hash="")))
        publisher.commit(receiver.version)
    assert torch.equal(layer.weight, source.weight)
    assert receiver.healed == []


def test_a_new_shape_is_sent_whole(model):
    _, publisher, _ = chain(model, 1)
    model.step()
    model.state["scale"] = torch.ones(3)
    manifest = publish(publisher, model)
    entry = next(e for e in manifest.tensors if e.name == "scale")
    assert (entry.encoding, entry.shape) == ("full", (3,))


def test_a_canary_that_disagrees_is_refused_and_the_old_version_stays(model):
    store, publisher, states = chain(model, 1)
    state = {n: t.clone() for n, t in states[1].items()}
    asked = []

    def canary(ids):
        asked.append(ids)
        return [-1.0, -2.0]

    receiver = Receiver(state, store, version=publisher.committed, canary=canary)
    model.step()
    receiver.advance(publish(publisher, model, canary=([5, 6], [-1.01, -2.0])))
    for anchor in (False, True):
        before = {n: t.clone() for n, t in state.items()}
        model.step()
        bad = publish(publisher, model, canary=([5, 6], [-1.0, -2.2]), anchor=anchor)
        with pytest.raises(CanaryRefused, match=r"largest gap 0\.2"):
            receiver.advance(bad)
        assert receiver.version.ordinal == 2
        assert same(state, before)
    with pytest.raises(CanaryRefused, match="largest gap nan"):
        Receiver(model.blank(), store, canary=lambda ids: [float("nan"), 0.0]).advance(bad)
    assert asked[0] == (5, 6)


def test_signatures(model):
    store = MemoryStore()
    publisher = Publisher(store, 0, key=b"secret")
    manifest = publish(publisher, model)
    assert manifest.signature.startswith("hmac-sha256:")
    Receiver(model.blank(), store, key=b"secret").advance(manifest)
    with pytest.raises(IntegrityError, match="not signed"):
        Receiver(model.blank(), store, key=b"other").advance(manifest)


def test_weights_hash_sees_names_types_shapes_and_bytes_but_not_order():
    base = {"a": torch.zeros(2, 2), "b": torch.ones(1)}
    assert weights_hash(base) == weights_hash(dict(reversed(base.items())))
    others = [
        {"a": torch.zeros(2, 2), "c": torch.ones(1)},
        {"a": torch.zeros(4), "b": torch.ones(1)},
        {"a": torch.zeros(2, 2, dtype=torch.int32), "b": torch.ones(1)},
        {"a": -torch.zeros(2, 2), "b": torch.ones(1)},
    ]
    assert len({weights_hash(s) for s in [base, *others]}) == 5


@pytest.mark.parametrize("seed", range(8))
def test_random_faults_never_leave_wrong_weights(model, seed):
    """Drops, swaps, drift and damage in any order: after each link the receiver holds exactly the version it reports,
    and a link that fails leaves the bytes that were there."""
    rng = random.Random(seed)
    store = MemoryStore()
    publisher = Publisher(store, 0, anchor_every=5)
    state = model.blank()
    receiver = Receiver(state, store)
    states, queue, outcomes = {}, [], {"moved": 0, "refused": 0}
    for ordinal in range(60):
        if ordinal:
            model.step()
        manifest = publish(publisher, model, commit=rng.random() < 0.8)
        states[manifest.version.key] = {n: t.clone() for n, t in model.state.items()}
        queue.append(manifest)
        fault = rng.choice(["none", "none", "drop", "swap", "drift", "damage", "missing"])
        if fault == "drop":
            queue.pop()
        elif fault == "swap" and len(queue) > 1:
            queue[-1], queue[-2] = queue[-2], queue[-1]
        elif fault == "drift":
            state["embed.weight"][1, 1] += 1
        elif fault == "damage":
            damage(store, ordinal)
        elif fault == "missing":
            store.remove(next(e.payload for e in manifest.tensors if e.payload))
        while queue and rng.random() < 0.7:
            link, before, held = queue.pop(0), {n: t.clone() for n, t in state.items()}, receiver.version
            try:
                receiver.advance(link)
            except IntegrityError:
                outcomes["refused"] += 1
                assert same(state, before)
                assert receiver.version in (held, None)
            else:
                outcomes["moved"] += 1
                assert receiver.version.key == link.version.key
                assert same(state, states[link.version.key])
    assert outcomes["moved"] > 5
    model.step()
    final = publish(publisher, model, anchor=True)
    assert receiver.catch_up().key == final.version.key
    assert same(state, model.state)
    assert published(store)[-1] == (0, 60)
