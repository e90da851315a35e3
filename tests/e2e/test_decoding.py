"""What can be asked of decoding, over the wire, from a model whose right answers are known."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import grpc
import pytest

from dragoman_client import (
    Alternatives,
    AsyncClient,
    BeamSearch,
    Client,
    DeadlineExceededError,
    DecodingOptions,
    InvalidRequestError,
    Sampling,
    Translation,
)
from dragoman_protos.v1 import translation_pb2 as pb
from dragoman_protos.v1 import translation_pb2_grpc as pb_grpc
from tests.e2e.server_process import ServerProcess
from tests.reversal import reverse, sentences

PAIR: dict[str, Any] = {"source": "fwd", "target": "rev"}
TEXT = "ba be bi bo"


def test_beam_search_returns_its_hypotheses_best_first(server: ServerProcess) -> None:
    with Client(server.address) as client:
        options = DecodingOptions(search=BeamSearch(width=4), num_hypotheses=3, return_tokens=True)
        translation = client.translate(TEXT, options=options, **PAIR)
    assert translation.text == reverse(TEXT)
    scores = [hypothesis.score for hypothesis in translation.hypotheses]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert len({hypothesis.text for hypothesis in translation.hypotheses}) == 3
    best = translation.hypotheses[0]
    assert best.text == translation.text
    log_probs = [token.log_prob for token in best.tokens if token.log_prob is not None]
    assert len(log_probs) == best.target_tokens + 1
    assert best.log_prob == pytest.approx(sum(log_probs))
    assert best.score == pytest.approx(sum(log_probs) / len(log_probs))
    assert best.tokens[-1].piece == "</s>"


def test_what_is_not_asked_for_is_not_sent(server: ServerProcess) -> None:
    with Client(server.address) as client:
        translation = client.translate(TEXT, **PAIR)
        scored = client.translate(TEXT, options=DecodingOptions(return_scores=True), **PAIR)
    assert translation.hypotheses == ()
    assert translation.seed is None
    [hypothesis] = scored.hypotheses
    assert hypothesis.tokens == ()
    assert -1 < hypothesis.score <= 0


def test_a_seed_repeats_a_sample_in_any_company(server: ServerProcess) -> None:
    options = DecodingOptions(search=Sampling(temperature=8.0), num_hypotheses=3)
    with Client(server.address) as client:
        first = client.translate(TEXT, options=options, **PAIR)
        assert first.seed is not None
        again = DecodingOptions(search=Sampling(temperature=8.0, seed=first.seed), num_hypotheses=3)
        others = sentences(30, seed=9)
        results = client.translate_batch([*others, TEXT], options=again, **PAIR)
    texts = [hypothesis.text for hypothesis in first.hypotheses]
    assert [hypothesis.text for hypothesis in results[-1].hypotheses] == texts
    assert len(set(texts)) == 3


def test_alternatives_differ_in_the_token_after_the_prefix(server: ServerProcess) -> None:
    with Client(server.address) as client:
        options = DecodingOptions(search=Alternatives(count=4), return_tokens=True)
        translation = client.translate(TEXT, target_prefix="bo", options=options, **PAIR)
    hypotheses = translation.hypotheses
    assert len(hypotheses) == 4
    assert all(hypothesis.text.startswith("bo") for hypothesis in hypotheses)
    chosen = [next(token for token in h.tokens if token.log_prob is not None) for h in hypotheses]
    assert len({token.piece for token in chosen}) == 4
    log_probs = [token.log_prob or 0.0 for token in chosen]
    assert log_probs == sorted(log_probs, reverse=True)
    assert translation.text == reverse(TEXT)


def test_a_prefix_is_kept_and_not_scored(server: ServerProcess) -> None:
    with Client(server.address) as client:
        options = DecodingOptions(return_tokens=True)
        translation = client.translate(TEXT, target_prefix="da de", options=options, **PAIR)
    assert translation.text.startswith("da de")
    [hypothesis] = translation.hypotheses
    given = [token for token in hypothesis.tokens if token.log_prob is None]
    assert "".join(token.piece for token in given) == "▁da▁de"


def test_suppressed_texts_and_end_pieces(server: ServerProcess) -> None:
    with Client(server.address) as client:
        without = client.translate(TEXT, options=DecodingOptions(suppressed_texts=["bi"]), **PAIR)
        stopped = client.translate(TEXT, options=DecodingOptions(end_pieces=["▁bi"]), **PAIR)
    assert "bi" not in without.text.split()
    assert (stopped.text, stopped.finish_reason) == ("bo", "stop")


def test_lengths_absolute_and_relative(server: ServerProcess) -> None:
    with Client(server.address) as client:

        def tokens(**options: Any) -> int:
            return client.translate(TEXT, options=DecodingOptions(**options), **PAIR).target_tokens

        source_tokens = client.translate(TEXT, **PAIR).source_tokens
        assert tokens(max_target_tokens=2) == 2
        assert tokens(min_target_tokens=12) >= 12
        assert tokens(max_target_ratio=0.5) == math.ceil(0.5 * source_tokens)
        assert tokens(min_target_ratio=3.0) >= 3 * source_tokens
        assert tokens(max_target_tokens=3, max_target_ratio=9.0) == 3
        assert tokens(min_target_tokens=50) >= 50  # more than the model's default limit for so short a text
        with pytest.raises(InvalidRequestError, match=r"texts\[0\]: .* at least 20 target tokens and allow"):
            tokens(min_target_tokens=20, max_target_ratio=0.5)


def test_repetition_is_prevented(server: ServerProcess) -> None:
    with Client(server.address) as client:
        options = DecodingOptions(no_repeat_ngram_size=1, return_tokens=True)
        [hypothesis] = client.translate("ba ba ba ba", options=options, **PAIR).hypotheses
    pieces = [token.piece for token in hypothesis.tokens]
    assert len(set(pieces)) == len(pieces)


def test_alignment_points_into_the_text(server: ServerProcess) -> None:
    text = "  ba be bi"
    with Client(server.address) as client:
        [segment] = client.translate(text, options=DecodingOptions(return_alignment=True), **PAIR).segments
    [hypothesis] = segment.hypotheses
    assert text[segment.source_start : segment.source_end] == "ba be bi"
    *tokens, end = hypothesis.tokens
    assert end.alignment is None
    for token in tokens:
        assert token.alignment is not None
        assert 0 < token.alignment.weight <= 1
        assert text[token.alignment.start : token.alignment.end] in {"ba", "be", "bi", "b", "a", "e", "i", ""}


def test_scoring_agrees_with_decoding(server: ServerProcess) -> None:
    with Client(server.address) as client:
        options = DecodingOptions(return_tokens=True)
        [said] = client.translate(TEXT, options=options, **PAIR).hypotheses
        right, wrong = client.score([TEXT, TEXT], [reverse(TEXT), "da da"], **PAIR)
    assert right.log_prob == said.log_prob
    assert [token.log_prob for token in right.tokens] == [token.log_prob for token in said.tokens]
    assert wrong.log_prob < right.log_prob - 5
    assert right.score == pytest.approx(right.log_prob / len(right.tokens))


def test_bad_scoring_requests_are_explained(server: ServerProcess) -> None:
    with Client(server.address) as client:
        with pytest.raises(InvalidRequestError, match="there are 2 sources and 1 targets"):
            client.score([TEXT, TEXT], ["ba"], **PAIR)
        with pytest.raises(InvalidRequestError, match=r"sources\[0\] is too long.*targets\[0\] is too long"):
            client.score(["ba " * 99], ["ba " * 99], **PAIR)


def test_long_text_is_split_and_put_together_again(server: ServerProcess) -> None:
    lines = ["ba be. bi bo!  da", "", "  de di", "do"]
    text = "\n" + "\r\n".join(lines) + " \n"
    with Client(server.address) as client:
        translation = client.translate(text, **PAIR)
        parts = [text[s.source_start : s.source_end] for s in translation.segments]
        alone = [client.translate(part, split=False, **PAIR).text for part in parts]
    assert parts == ["ba be.", "bi bo!", "da", "de di", "do"]
    assert [translation.text[s.target_start : s.target_end] for s in translation.segments] == alone
    a, b, c, d, e = alone
    assert translation.text == f"\n{a} {b}  {c}\r\n\r\n  {d}\r\n{e} \n"
    assert not any(segment.divided for segment in translation.segments)


def test_what_is_invisible_comes_back_as_it_was(server: ServerProcess) -> None:
    with Client(server.address) as client:
        translation = client.translate("ba be\n\u200b\nbe bi bo", **PAIR)
    assert translation.text == "be ba\n\u200b\nbo bi be"
    assert len(translation.segments) == 2


def test_a_sentence_too_long_for_the_model_is_divided_and_says_so(server: ServerProcess) -> None:
    words = "ba be bi bo bu da de di do du " * 20
    with Client(server.address) as client:
        translation = client.translate(words, **PAIR)
    assert len(translation.segments) > 3
    assert all(segment.divided for segment in translation.segments)
    covered = " ".join(words[s.source_start : s.source_end] for s in translation.segments)
    assert covered == words.strip()


@pytest.mark.parametrize("search", [None, BeamSearch(width=4), Sampling(temperature=3.0, seed=1)])
async def test_a_stream_adds_up_to_the_translation(server: ServerProcess, search: Any) -> None:
    text = "ba be bi bo bu da. de di\ndo du"
    async with AsyncClient(server.address) as client:
        options = DecodingOptions(search=search)
        whole = await client.translate(text, options=options, **PAIR)
        events = [event async for event in client.stream(text, options=options, **PAIR)]
    *deltas, last = events
    assert isinstance(last, Translation)
    assert "".join(str(delta) for delta in deltas) == last.text == whole.text
    assert len(deltas) > (3 if search is None else 0)  # hypotheses may have little in common before the end
    assert 0 < last.timings.first_token <= last.timings.total


def test_streams_of_several_texts_are_told_apart(server: ServerProcess) -> None:
    texts = sentences(8, seed=3, shortest=5)
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = pb_grpc.TranslationServiceStub(channel)
        request = pb.TranslateRequest(texts=texts, source_language="fwd", target_language="rev")
        events = list(stub.TranslateStream(request, timeout=30))
        expected = stub.Translate(request, timeout=30)
    sent = dict.fromkeys(range(8), "")
    completed = []
    for event in events[:-1]:
        if event.HasField("delta"):
            sent[event.delta.text_index] += event.delta.text
        else:
            completed.append(event.completion.text_index)
            assert sent[event.completion.text_index] == event.completion.translation.text
    assert sorted(completed) == list(range(8))
    assert [sent[i] for i in range(8)] == [translation.text for translation in expected.translations]
    assert events[-1].summary.model == "reversal"


def test_the_model_says_that_it_is_batch_invariant(server: ServerProcess) -> None:
    with Client(server.address) as client:
        [model] = client.models()
    assert model.batch_invariant
    assert model.max_hypotheses == 16
    assert "dragoman_batch_invariant{" in server.metrics()
    assert 'dragoman_batch_invariant{model="reversal",version="1"} 1.0' in server.metrics()


async def test_every_mixture_gives_what_each_request_gives_alone(server: ServerProcess) -> None:
    searches = [None, BeamSearch(width=3), BeamSearch(width=5, length_penalty=0.5), Sampling(seed=7, temperature=4.0)]
    texts = sentences(12, seed=21)
    cases = list(itertools.product(texts, searches))
    async with AsyncClient(server.address, timeout=60) as client:

        async def ask(text: str, search: Any) -> tuple[str, float]:
            options = DecodingOptions(search=search, return_scores=True)
            [hypothesis] = (await client.translate(text, options=options, **PAIR)).hypotheses
            return hypothesis.text, hypothesis.score

        alone = [await ask(*case) for case in cases]
        together = await asyncio.gather(*(ask(*case) for case in cases))
    assert together == alone


def test_a_deadline_that_cannot_be_met_is_refused_before_anything_is_begun(server: ServerProcess) -> None:
    with Client(server.address) as client:
        client.translate_batch(sentences(50, seed=5), **PAIR)  # so that the server knows its pace
        with pytest.raises(DeadlineExceededError):
            client.translate_batch(["ba " * 40] * 30, timeout=0.0005, **PAIR)
