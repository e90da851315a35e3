from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman_export.batching import Example, WeightedExamples, collate, epoch_batches
from dragoman_export.corpus import (
    CleaningLimits,
    CleaningReport,
    Corpus,
    Direction,
    Pair,
    Seen,
    check_columns,
    clean,
)
from dragoman_export.errors import CorpusError
from dragoman_export.text import harmonize_punctuation, normalize
from dragoman_export.tokenization import END_ID, PADDING_ID, START_ID, load_tokenizer, train_tokenizer


def test_cleaning_counts_what_it_drops(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("你好\thello\n你好\thello\n\tempty\nno second column\nＡ\u200b  ｂ　c\tx\n", encoding="utf-8")
    report = CleaningReport()
    assert list(clean(Corpus((path,)), report, set())) == [Pair("你好", "hello"), Pair("A b c", "x")]
    assert report.num_read == 5
    assert report.dropped == {"duplicate": 1, "empty": 1, "without a second column": 1}


def test_a_pair_may_come_twice_for_different_directions(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("一\tone\n", encoding="utf-8")
    there, back = Direction("zh", "en"), Direction("en", "zh")
    report = CleaningReport()
    seen: Seen = set()
    corpora = [Corpus((path,), only=there), Corpus((path,), only=back), Corpus((path,), only=there)]
    assert [len(list(clean(corpus, report, seen))) for corpus in corpora] == [1, 1, 0]


def test_two_files_must_be_line_aligned(tmp_path: Path) -> None:
    first, second = tmp_path / "a.zh", tmp_path / "a.en"
    first.write_text("一\n二\n", encoding="utf-8")
    second.write_text("one\ntwo\n", encoding="utf-8")
    corpus = Corpus.parse(f"{first},{second}@2")
    assert corpus.weight == 2.0
    assert list(corpus.lines()) == [Pair("一", "one"), Pair("二", "two")]
    second.write_text("one\n", encoding="utf-8")
    with pytest.raises(CorpusError, match="2 lines against 1; they must be line-aligned"):
        list(corpus.lines())


def test_a_corpus_may_serve_one_direction(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.touch()
    assert Corpus.parse(f"zh-en={path}").only == Direction("zh", "en")


def test_what_exists_is_a_path_whatever_signs_are_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a=b@home,c.tsv"
    path.touch()
    assert Corpus.parse(str(path)) == Corpus((path,))
    assert Corpus.parse(f"{path}@0.5") == Corpus((path,), 0.5)
    assert Corpus.parse(f"zh-en={path}@0.5") == Corpus((path,), 0.5, Direction("zh", "en"))


@pytest.mark.parametrize(
    ("text", "direction"),
    [
        ("zh-en", Direction("zh", "en")),
        ("zh-Hant:en", Direction("zh-Hant", "en")),
        ("en:pt-BR", Direction("en", "pt-BR")),
    ],
)
def test_a_direction_reads_as_it_is_written(text: str, direction: Direction) -> None:
    assert Direction.parse(text) == direction
    assert str(direction) == text


@pytest.mark.parametrize(("first", "column"), [(Direction("en", "zh"), 2), (Direction("ru", "zh-Hans"), 2)])
def test_swapped_columns_are_noticed(first: Direction, column: int) -> None:
    pairs = [Pair("你好", "hello"), Pair("世界 OK", "world")]
    with pytest.raises(
        CorpusError, match=rf"its columns look swapped: .* column {column} is .*0% .* 100% of the other"
    ):
        check_columns("a.tsv", pairs, first)


@pytest.mark.parametrize("first", [Direction("zh", "en"), Direction("zh", "ja"), Direction("de", "en")])
def test_columns_in_order_or_in_one_script_are_not(first: Direction) -> None:
    check_columns("a.tsv", [Pair("你好", "hello"), Pair("世界 OK", "world")], first)
    check_columns("a.tsv", [], first)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("missing.tsv", "there is no file missing.tsv"),
        ("{path}@x", "'x' is not a weight"),
        ("{path}@-1", "the weight must be above 0"),
        ("{path},{path},{path}", "names 3 files"),
        ("zh={path}", "'zh' is not a translation direction"),
        ("zh-zh={path}", "'zh-zh' is not a translation direction"),
        ("zh-Hant-en={path}", "write it as SOURCE-TARGET, such as zh-en, or as SOURCE:TARGET, such as zh-Hant:en"),
    ],
)
def test_a_wrong_corpus_argument_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.touch()
    with pytest.raises(CorpusError, match=message):
        Corpus.parse(text.format(path=path))


def test_text_that_is_not_utf8_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "latin.tsv"
    path.write_bytes(b"caf\xe9\tcoffee\n")
    with pytest.raises(CorpusError, match=r"latin\.tsv is not UTF-8"):
        list(Corpus((path,)).lines())


def test_limits_give_a_reason() -> None:
    limits = CleaningLimits(max_tokens=20, max_ratio=3.0, ratio_free_tokens=5)
    assert limits.problem(3, 20) == "length ratio above 3"
    assert limits.problem(21, 20) == "longer than 20 tokens"
    assert limits.problem(1, 5) is None
    assert limits.problem(7, 20) is None
    assert CleaningLimits(max_ratio=0).problem(1, 100) is None


def test_normalisation_keeps_chinese_punctuation() -> None:
    assert normalize("ＡＢＣ１２３，你好！\u200b  （ﬁ）") == "ABC123，你好！ （fi）"
    assert harmonize_punctuation("你好,世界!好.") == "你好，世界！好。"
    assert harmonize_punctuation("Hi, it is 3:30, ok.") == "Hi, it is 3:30, ok."


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=30))
@settings(deadline=None)
def test_normalisation_is_idempotent(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    words = ["hello", "world", "café", "你好", "世界", "，", "one", "two"]
    rng = random.Random(0)
    train_tokenizer((" ".join(rng.choices(words, k=6)) for _ in range(300)), path, 8000, "unigram", ["en", "zh"])
    return path


@pytest.mark.parametrize(
    "text", ["hello world", "你好，世界", "ＨＥＬＬＯ １２３", "cafe\u0301", "zero\u200bwidth", "🙂 €"]
)
def test_the_tokenizer_normalises_as_cleaning_does(text: str, tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", normalize(text))
    assert tokenizer.unk_id() not in ids


def test_a_tag_in_the_text_is_only_text(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    assert tokenizer.piece_to_id("<2en>") not in tokenizer.encode("<2en> hello")


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(4, 99, rng.integers(1, 30), np.int32), rng.integers(4, 99, rng.integers(1, 30), np.int32))
        for _ in range(count)
    ]


@given(st.integers(0, 60), st.sampled_from([0.4, 1.0, 2.5]), st.integers(8, 200), st.integers(0, 5), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_an_epoch_is_a_function_of_seed_and_epoch(
    count: int, weight: float, budget: int, seed: int, epoch: int
) -> None:
    corpus = WeightedExamples(examples(count), weight)
    batches = epoch_batches([corpus], budget, seed, epoch)
    assert sum(len(batch) for batch in batches) == count * int(weight) + round(count * (weight % 1))
    for batch in batches:
        longest = max(max(len(e.source), len(e.target) + 1) for e in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
    again = epoch_batches([corpus], budget, seed, epoch)
    assert all(a is b for x, y in zip(batches, again, strict=True) for a, b in zip(x, y, strict=True))
    shown: dict[int, int] = {}
    for example in (e for batch in batches for e in batch):
        shown[id(example)] = shown.get(id(example), 0) + 1
    assert all(int(weight) <= times <= int(weight) + 1 for times in shown.values())


def test_collate_shifts_targets_and_pads() -> None:
    batch = collate([Example(np.array([5, 6, 3], np.int32), np.array([7], np.int32)),
                     Example(np.array([5, 3], np.int32), np.array([8, 9], np.int32))])  # fmt: skip
    assert batch.source_ids.tolist() == [[5, 6, 3], [5, 3, PADDING_ID]]
    assert batch.source_lengths.tolist() == [3, 2]
    assert batch.target_inputs.tolist() == [[START_ID, 7, PADDING_ID], [START_ID, 8, 9]]
    assert batch.target_outputs.tolist() == [[7, END_ID, PADDING_ID], [8, 9, END_ID]]
    assert batch.num_target_tokens == 5
