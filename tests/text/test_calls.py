import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.records import ToolCall, ToolError, ToolResult
from etude.text.calls import (
    escape,
    format_assistant,
    format_call,
    format_results,
    parse_calls,
    parse_results,
    unescape,
    why_broken,
)

NAMES = st.sampled_from(["path", "old", "new", "call", "result", "a.b", "x-1", "_"])
MARKUP = st.sampled_from(
    ["</path>", "<\\/path>", "<\\\\/old>", "<call name=", '<call name="x">', "</call>", "<path>", "</", "\\", "\n", "<result>", "</result>"]
)
VALUES = st.lists(st.one_of(st.text(max_size=8), MARKUP), max_size=6).map("".join)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


@given(name=NAMES, arguments=ARGUMENTS)
@example(name="edit_file", arguments={"path": "</path>", "old": "<\\/old></old>", "new": "\n </call>\n"})
def test_parse_of_format_is_the_call(name, arguments):
    parsed = parse_calls(format_call(name, arguments))
    assert parsed.text == ""
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.error) == (name, arguments, None)
    assert list(call.arguments) == list(arguments)


@given(
    text=st.text().filter(lambda t: "<call" not in t),
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=4),
)
def test_parse_of_format_is_the_message(text, calls):
    records = [ToolCall(id="", name=n, arguments=a) for n, a in calls]
    parsed = parse_calls(format_assistant(text, records))
    assert parsed.text == text
    assert [(c.name, c.arguments) for c in parsed.calls] == calls
    assert [c.id for c in parsed.calls] == [f"c{i}" for i in range(len(calls))]


@given(
    text=st.lists(st.one_of(st.text(max_size=5), MARKUP, st.sampled_from(["<path>v</path>", "<call>", "<call", " "])), max_size=30).map(
        "".join
    )
)
def test_the_parser_is_total_and_loses_no_broken_call(text):
    parsed = parse_calls(text)
    for call in parsed.calls:
        assert (call.error is None) == (call.raw == "")
        if call.error:
            assert call.raw in text
            assert why_broken(call.raw)
    if "<call" not in text:
        assert (parsed.text, parsed.calls) == (text, ())


@given(value=VALUES, mark=NAMES)
def test_escape_hides_the_mark_and_comes_back(value, mark):
    assert f"</{mark}>" not in escape(value, mark)
    assert unescape(escape(value, mark), mark) == value


def test_the_documented_form():
    text = 'I fix it.\n<call name="edit_file">\n<path>shop/stats.py</path>\n<old>    raise</old>\n<new>x = "<\\/new>"</new>\n</call>'
    parsed = parse_calls(text)
    assert parsed.text == "I fix it."
    assert parsed.calls[0].arguments == {"path": "shop/stats.py", "old": "    raise", "new": 'x = "</new>"'}
    assert format_assistant(parsed.text, parsed.calls) == text


def test_several_calls_with_text_around_and_between():
    text = 'a\n<call name="x"></call>\nb\n<call name="y">\n</call>\n\nc '
    parsed = parse_calls(text)
    assert parsed.text == "a\nb\nc "
    assert [c.name for c in parsed.calls] == ["x", "y"]


GOOD = '<call name="ok">\n<a>1</a>\n</call>'


@pytest.mark.parametrize(
    "broken, why",
    [
        ("<call>", "begins with"),
        ("<call name=read>\n</call>", "begins with"),
        ("<call name='x'>\n</call>", "begins with"),
        ('<call name="">\n</call>', "begins with"),
        ("<call", "begins with"),
        ('<call name="x">', "never closed with </call>"),
        ('<call name="x">\n<a>1</a>\n', "never closed with </call>"),
        ('<call name="x">\n<b>1\n</call>', "<b> is never closed"),
        ('<call name="x">\njunk\n</call>', "found 'junk"),
        ('<call name="x">\n<a>1</a>junk</call>', "found 'junk"),
        ('<call name="x">\n<b>1</b>\n<b>2</b>\n</call>', "'b' is given twice"),
        ('<call name="x">\n<1>2</1>\n</call>', "found '<1>"),
    ],
)
def test_a_broken_call_is_reported_and_the_others_are_kept(broken, why):
    for text in (broken, f"{GOOD}\n{broken}", f"{broken}\n{GOOD}"):
        calls = parse_calls(text).calls
        bad = [c for c in calls if c.error]
        assert [c.error for c in bad] == [ToolError.BAD_CALL]
        assert bad[0].raw.strip() == broken.strip()
        assert why in why_broken(bad[0].raw)
        assert [c.arguments for c in calls if not c.error] == [{"a": "1"}] * (text != broken)


def test_words_that_only_look_like_calls_are_text():
    assert parse_calls("<caller> and <calls> </call>").calls == ()


def test_format_refuses_names_that_cannot_be_written():
    with pytest.raises(UserError, match="cannot name"):
        format_call("a b", {})
    with pytest.raises(UserError, match="cannot name"):
        format_call("a", {"x>": "1"})


@given(results=st.lists(st.tuples(VALUES, st.sampled_from([None, *ToolError])), max_size=4))
def test_results_come_back_whatever_they_hold(results):
    records = [ToolResult(call_id="", name="", text=t, error=e) for t, e in results]
    assert parse_results(format_results(records)) == [(t, e.value if e else "") for t, e in results]


def test_deeply_broken_text_takes_linear_time():
    assert len(parse_calls('<call name="x"><a>' * 3000).calls) == 3000
