import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EngineError
from etude.protocols import Generation
from etude.records import ABSENT_ROUTE, Finish, Message, Sampling, ToolCall, ToolResult, Version, from_json, to_json
from etude.text.calls import format_call
from etude.text.conversation import Conversation
from etude.text.renderer import ChatMLRenderer, EtudeRenderer, JinjaRenderer, message_text
from etude.text.template import ETUDE_SPECIALS
from etude.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer((*ETUDE_SPECIALS, "<|im_start|>", "<|im_end|>"))
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERERS = {"etude": EtudeRenderer(TOKENIZER), "chatml": ChatMLRenderer(TOKENIZER), "jinja": JinjaRenderer(TOKENIZER, PLAIN)}
VERSIONS = [Version(lineage=0, ordinal=i, hash=f"{i:032x}") for i in range(3)]


def generation(ids, *, versions=(VERSIONS[0],), index=None, routes=None, start=0.5):
    n = len(ids)
    return Generation(
        id="r",
        ids=tuple(ids),
        logprob_T=-np.arange(start, start + n, dtype=np.float32)[:n],
        logprob_t1_T=-2 * np.arange(start, start + n, dtype=np.float32)[:n],
        version_T=np.array([0] * n if index is None else index, np.int16),
        versions=tuple(versions),
        routes_PTLK=routes,
        finish=Finish.STOP,
    )


TEXTS = st.text(max_size=12).filter(lambda t: "<call" not in t and t.isprintable())
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["system", "user"]), TEXTS),
        st.tuples(st.just("tool"), TEXTS),
        st.tuples(st.just("sample"), TEXTS, TEXTS, st.booleans(), st.booleans(), st.sampled_from([(0,), (1,), (0, 1), (2, 0)])),
        st.tuples(st.just("junk"), st.lists(st.integers(0, TOKENIZER.vocab_size), max_size=20)),
        st.tuples(st.just("restart")),
    ),
    max_size=10,
)


def play(conversation, renderer, step):
    """Apply one step; returns the sampled ids, if any."""
    kind = step[0]
    if kind == "restart":
        conversation.restart([i for i, m in enumerate(conversation.messages) if m.role in ("system", "user")][:2])
    elif kind == "tool":
        conversation.add(Message(role="tool", results=(ToolResult(call_id="x", name="x", text=step[1]),)))
    elif kind in ("system", "user"):
        conversation.add(Message(role=kind, text=step[1]))
    elif kind == "junk":
        conversation.open_turn()
        conversation.accept(generation(step[1]))
        return step[1]
    else:
        _, text, reasoning, call, stopped, used = step
        calls = (ToolCall(id="", name="grep", arguments={"pattern": text}),) if call else ()
        message = Message(role="assistant", text=text, reasoning=reasoning, calls=calls)
        opened = len(renderer.open_assistant()) if renderer.name != "jinja" else len(RENDERERS["chatml"].open_assistant())
        whole = (RENDERERS["chatml"] if renderer.name == "jinja" else renderer).render(message)[opened:]
        ids = whole[: whole.index(renderer.stop_ids[0]) + (1 if stopped else 0)]
        conversation.open_turn()
        index = [i % len(used) for i in range(len(ids))]
        got = conversation.accept(generation(ids, versions=[VERSIONS[i] for i in used], index=index))
        assert (got.text, got.reasoning) == (text, reasoning)
        assert [(c.name, c.arguments) for c in got.calls] == [(c.name, c.arguments) for c in calls]
        return ids
    return []


@given(name=st.sampled_from(sorted(RENDERERS)), steps=STEPS)
def test_a_conversation_only_extends_and_accounts_for_every_token(name, steps):
    renderer = RENDERERS[name]
    conversation = Conversation(renderer)
    before, sampled, chain = [], [], 1
    for step in steps:
        ids = play(conversation, renderer, step)
        if step[0] == "restart":
            before, chain = [], chain + 1
        assert conversation.ids[: len(before)] == before
        assert conversation.open_turn()[: len(conversation)] == conversation.ids
        before = conversation.ids
        sampled += ids
    segments = conversation.segments()
    assert len(segments) == chain
    assert [s.parent for s in segments] == [None, *range(chain - 1)]
    assert [i for s in segments for i in s.ids_T[s.sampled_T]] == sampled
    for number, segment in enumerate(segments):
        check_segment(segment)
        assert from_json(to_json(segment)).ids_T.tolist() == segment.ids_T.tolist()
        check_spans(conversation, number, segment)


def check_segment(segment):
    off = ~segment.sampled_T
    assert not segment.logprob_T[off].any()
    assert not segment.logprob_t1_T[off].any()
    assert (segment.version_T[off] == -1).all()
    assert not segment.thinking_T[off].any()
    assert (segment.version_T[~off] >= 0).all()
    assert (segment.logprob_T[~off] < 0).all()
    assert (segment.logprob_t1_T == 2 * segment.logprob_T).all()
    assert (np.diff(segment.message_T) >= 0).all()
    used = segment.version_T[~off]
    order = list(dict.fromkeys(used.tolist()))
    assert order == sorted(order)  # versions are listed in order of first use
    assert len({v.key for v in segment.versions}) == len(segment.versions)


def check_spans(conversation, number, segment):
    """Spans tile what was added to the segment, and decode to their messages."""
    spans = [(m, m.span, i) for i, m in enumerate(conversation.messages) if m.span.segment == number]
    at = spans[0][1].start if spans else len(segment.ids_T)
    for message, span, index in spans:
        assert span.start == at
        at = span.end
        assert set(segment.message_T[span.start : span.end].tolist()) <= {index}
        text = TOKENIZER.decode(segment.ids_T[span.start : span.end].tolist())
        if message.role in ("system", "user"):
            assert message.text in text
        elif message.role == "tool":
            assert message.results[0].text in text
    assert at == len(segment.ids_T)


def test_the_example_of_a_turn():
    conversation = Conversation(RENDERERS["etude"], sampling=Sampling(seed=7), engine="native-0", numerics="invariant")
    conversation.add(Message(role="user", text="u"))
    sampled = TOKENIZER.encode_markup("<|think|>r<|/think|>" + format_call("grep", {"pattern": "x"}))
    assert TOKENIZER.decode(conversation.open_turn()) == "<|user|>u<|end|><|assistant|>"
    assert TOKENIZER.decode(conversation.segment().ids_T.tolist()) == "<|user|>u<|end|>"  # an open turn is not recorded
    message = conversation.accept(generation(sampled))
    segment = conversation.segment()
    assert message.calls[0].id == "m1c0"
    span = message.span
    assert (span.segment, span.start, span.end) == (0, 3, 3 + 1 + len(sampled) + 1)
    assert segment.sampled_T.sum() == len(sampled)
    assert segment.thinking_T.sum() == 3
    assert not segment.sampled_T[-1]  # the harness closed the turn
    assert (segment.sampling.seed, segment.engine, segment.numerics) == (7, "native-0", "invariant")
    assert message_text(message) == format_call("grep", {"pattern": "x"})


def test_routes_are_filled_when_a_token_is_fed_and_then_kept():
    conversation = Conversation(RENDERERS["etude"])
    conversation.add(Message(role="user", text="u"))
    prompt = len(conversation.open_turn())
    ids = TOKENIZER.encode("abc")
    first = np.ones((prompt + 2, 2, 1), np.uint8)
    conversation.accept(generation(ids, routes=first))
    rows = conversation.segment().routes_TLK
    assert rows.shape == (prompt + 4, 2, 1)
    assert (rows[: prompt + 2] == 1).all()
    assert (rows[prompt + 2 :] == ABSENT_ROUTE).all()
    conversation.add(Message(role="user", text="v"))
    prompt = len(conversation.open_turn())
    later = np.full((prompt + 1, 2, 1), 2, np.uint8)
    later[-1] = ABSENT_ROUTE
    conversation.accept(generation(ids[:1], routes=later))
    rows = conversation.segment().routes_TLK[:, 0, 0].tolist()
    assert rows == [1] * 6 + [2] * (prompt - 6) + [ABSENT_ROUTE] * 2


def test_a_compaction_chain():
    conversation = Conversation(RENDERERS["jinja"])
    for role, text in (("system", "s"), ("user", "task"), ("user", "long history")):
        conversation.add(Message(role=role, text=text))
    conversation.restart([0, 1])
    conversation.add(Message(role="user", text="summary"))
    first, second = conversation.segments()
    assert TOKENIZER.decode(second.ids_T.tolist()) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\ntask<|im_end|>\n<|im_start|>user\nsummary<|im_end|>\n"
    )
    assert (first.parent, second.parent) == (None, 0)
    assert sorted(set(second.message_T.tolist())) == [0, 1, 3]
    assert [m.span.segment for m in conversation.messages] == [0, 0, 0, 1]


def test_a_broken_engine_is_caught():
    conversation = Conversation(RENDERERS["etude"])
    conversation.open_turn()
    good = generation([1, 2])
    with pytest.raises(EngineError, match="2 ids but 1 values in version_T"):
        conversation.accept(
            Generation(
                id="r", ids=good.ids, logprob_T=good.logprob_T, logprob_t1_T=good.logprob_t1_T, version_T=np.zeros(1, np.int16),
                versions=good.versions, routes_PTLK=None, finish=Finish.STOP,
            )
        )  # fmt: skip
    with pytest.raises(EngineError, match="outside its 1 versions"):
        conversation.accept(generation([1, 2], index=[0, 1]))
    conversation.accept(good)
    assert len(conversation) == 4
