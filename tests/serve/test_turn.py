"""However a sampled turn is cut into pieces, what comes out is what the renderer's parser says of the whole."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.records import Message
from etude.serve.turn import Turn
from etude.text.renderer import ChatMLRenderer, EtudeRenderer, message_text
from etude.text.tokenizer import ByteTokenizer

ETUDE = ByteTokenizer()
CHATML = ByteTokenizer(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
RENDERERS = {"etude": EtudeRenderer(ETUDE), "chatml": ChatMLRenderer(CHATML)}
WORDS = st.sampled_from(
    ["a", "\n", "\n\n", "<", "<c", "<call", '<call name="grep">', "<x>", "</x>", "</call>", "<call\n", " ", "stop", "st", "\u00e9",
     "</think>", "<think>", '<call name="run">\n<x>ls</x>\n</call>']
)  # fmt: skip


def cut(ids, cuts):
    edges = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def play(renderer, tokenizer, pieces, **options):
    turn = Turn(renderer, tokenizer, **options)
    deltas = []
    for piece in pieces:
        deltas.append(turn.feed(piece))
        if turn.stopped is not None:
            break
    deltas.append(turn.finish())
    text, reasoning = "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas)
    return turn, text, reasoning, [c for d in deltas for c in d.calls]


@settings(max_examples=300)
@given(
    name=st.sampled_from(list(RENDERERS)),
    thought=st.sampled_from(["", "hm", "hm\n", "\nhm <call"]),
    words=st.lists(WORDS, max_size=12),
    ended=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_any_cut_gives_what_the_parser_says(name, thought, words, ended, cuts):
    renderer = RENDERERS[name]
    tokenizer = ETUDE if name == "etude" else CHATML
    if name == "etude":
        thinking = [tokenizer.token_id("<|think|>"), *tokenizer.encode(thought), tokenizer.token_id("<|/think|>")] if thought else []
    else:
        thinking = tokenizer.encode(f"<think>\n{thought}\n</think>\n\n") if thought else []
    ids = [*thinking, *tokenizer.encode("".join(words)), *(renderer.stop_ids[:1] if ended else ())]
    message, _ = renderer.parse(ids)
    _, text, reasoning, calls = play(renderer, tokenizer, cut(ids, cuts), calls=True)
    broken = [c.raw for c in message.calls if c.error]
    assert reasoning == message.reasoning
    assert text == "\n".join([message.text, *broken] if message.text else broken)
    assert [(c.id, c.name, c.arguments) for c in calls] == [(c.id, c.name, c.arguments) for c in message.calls if not c.error]
    _, raw, _, none = play(renderer, tokenizer, cut(ids, cuts), calls=False)
    assert not none
    if not message.calls and not broken:
        assert raw == message.text
    assert all(c.raw in raw for c in message.calls if c.error)


@settings(max_examples=200)
@given(
    words=st.lists(WORDS, max_size=10),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    stops=st.sampled_from([("stop",), ("a\n", "st"), ("\u00e9",)]),
)
def test_a_stop_string_ends_the_turn_where_it_first_stands(words, cuts, stops):
    renderer = RENDERERS["etude"]
    ids = ETUDE.encode("".join(words))
    whole = "".join(words)
    turn, text, _, _ = play(renderer, ETUDE, cut(ids, cuts), calls=False, stops=stops)
    places = [whole.find(s) for s in stops if s in whole]
    assert (turn.stopped is not None) == bool(places)
    assert text == (whole[: min(places)] if places else whole)


def test_text_comes_as_it_is_sampled_and_a_call_when_it_is_whole():
    renderer = RENDERERS["etude"]
    text = 'I look.\n<call name="grep">\n<x>1</x>\n</call>\n<call name="run">\n<x>2</x>\n</call>'
    turn = Turn(renderer, ETUDE, calls=True)
    seen = []
    for id in [*ETUDE.encode(text), *renderer.stop_ids]:
        delta = turn.feed([id])
        seen += [delta.text] if delta.text else []
        seen += [c.name for c in delta.calls]
    assert "".join(seen[:7]) == "I look."
    assert seen[7:] == ["grep", "run"]
    assert not turn.finish()
    assert turn.ids[-1] == renderer.stop_ids[0]


def test_a_call_that_is_broken_stays_text():
    renderer = RENDERERS["etude"]
    ids = ETUDE.encode('try\n<call name="grep">\n<x>1\n</call>')
    _, text, _, calls = play(renderer, ETUDE, [ids], calls=True)
    assert (text, calls) == ('try\n<call name="grep">\n<x>1\n</call>', [])


@pytest.mark.parametrize("text", ["", "plain", "two\nlines"])
def test_a_rendered_message_comes_back(text):
    renderer = RENDERERS["etude"]
    ids = renderer.render(Message(role="assistant", text=text))[1:]
    _, got, _, _ = play(renderer, ETUDE, [ids], calls=True)
    assert got == text == message_text(Message(role="assistant", text=text))
