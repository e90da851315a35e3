"""Long text in pieces, and in one piece again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_server.segmentation import join, split, whole

ANY = st.text(st.sampled_from("ab c.!?。！？，,;\n\r\t 你好“”…1\u2028"), min_size=1, max_size=80).filter(str.strip)


def pieces(text: str, language: str, longest: int = 1000) -> list[str]:
    return [text[slice(*segment.span)] for segment in split(text, language, lambda part: len(part) <= longest)]


def test_english_sentences() -> None:
    text = 'Dr. Smith paid $3.50 on Jan. 5th. "Really?" she asked. Yes!\nA new line'
    assert pieces(text, "en") == ["Dr. Smith paid $3.50 on Jan. 5th.", '"Really?" she asked.', "Yes!", "A new line"]


def test_chinese_sentences() -> None:
    assert pieces("我爱你。你好吗？今天是3.5度。\n第二行", "zh-Hans") == [
        "我爱你。",
        "你好吗？",
        "今天是3.5度。",
        "第二行",
    ]


def test_a_long_sentence_is_divided_at_clauses_then_words_then_anywhere() -> None:
    text = "one two, three four five; sixseveneight"
    segments = split(text, "en", lambda part: len(part) <= 9)
    assert [text[slice(*s.span)] for s in segments] == ["one two,", "three", "four", "five;", "sixsevene", "ight"]
    assert all(segment.divided for segment in segments)


@given(ANY, st.sampled_from(["en", "zh"]), st.integers(1, 30))
def test_nothing_but_white_space_lies_between_segments(text: str, language: str, longest: int) -> None:
    segments = split(text, language, lambda part: len(part) <= longest)
    end = 0
    for segment in segments:
        assert not text[end : segment.span.start].strip()
        part = text[slice(*segment.span)]
        assert part == part.strip()
        assert 1 <= len(part) <= longest
        end = segment.span.end
    assert not text[end:].strip()


@given(ANY, st.sampled_from(["en", "zh"]))
def test_translating_into_the_same_changes_at_most_spaces_between_sentences(text: str, language: str) -> None:
    segments = split(text, language, lambda part: len(part) <= 20)
    parts = [text[slice(*segment.span)] for segment in segments]
    joined, spans = join(text, segments, parts, language)
    assert joined.replace(" ", "") == text.replace(" ", "")
    assert [joined[slice(*span)] for span in spans] == parts
    assert joined.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("text", "source", "target", "expected"),
    [
        ("你好。再见。", "zh", "en", "A B"),
        ("Hello. Bye.", "en", "zh", "AB"),
        ("Hello.  Bye.\n\n", "en", "de", "A  B\n\n"),
        ("  Hello.\n\tBye.", "en", "zh", "  A\n\tB"),
    ],
)
def test_the_gap_is_what_the_target_language_has_there(text: str, source: str, target: str, expected: str) -> None:
    segments = split(text, source, lambda _: True)
    assert join(text, segments, ["A", "B"], target)[0] == expected


def test_whole_leaves_the_white_space_around_it_out() -> None:
    [segment] = whole(" a b\n")
    assert segment.span == (1, 4)
