from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Splitting(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPLITTING_UNSPECIFIED: _ClassVar[Splitting]
    SPLITTING_SENTENCES: _ClassVar[Splitting]
    SPLITTING_NONE: _ClassVar[Splitting]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_INTERACTIVE: _ClassVar[Priority]
    PRIORITY_BULK: _ClassVar[Priority]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
SPLITTING_UNSPECIFIED: Splitting
SPLITTING_SENTENCES: Splitting
SPLITTING_NONE: Splitting
PRIORITY_UNSPECIFIED: Priority
PRIORITY_INTERACTIVE: Priority
PRIORITY_BULK: Priority
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP: FinishReason

class TranslateRequest(_message.Message):
    __slots__ = ("texts", "source_language", "target_language", "model", "options", "splitting", "target_prefixes", "priority", "model_version")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SPLITTING_FIELD_NUMBER: _ClassVar[int]
    TARGET_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    source_language: str
    target_language: str
    model: str
    options: DecodingOptions
    splitting: Splitting
    target_prefixes: _containers.RepeatedScalarFieldContainer[str]
    priority: Priority
    model_version: str
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., model: _Optional[str] = ..., options: _Optional[_Union[DecodingOptions, _Mapping]] = ..., splitting: _Optional[_Union[Splitting, str]] = ..., target_prefixes: _Optional[_Iterable[str]] = ..., priority: _Optional[_Union[Priority, str]] = ..., model_version: _Optional[str] = ...) -> None: ...

class DecodingOptions(_message.Message):
    __slots__ = ("max_target_tokens", "min_target_tokens", "max_target_ratio", "min_target_ratio", "beam", "sampling", "alternatives", "num_hypotheses", "repetition_penalty", "no_repeat_ngram_size", "suppressed_texts", "suppress_unknown", "end_pieces", "return_scores", "return_tokens", "return_alignment")
    MAX_TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TARGET_RATIO_FIELD_NUMBER: _ClassVar[int]
    MIN_TARGET_RATIO_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    NUM_HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    NO_REPEAT_NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_TEXTS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESS_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    END_PIECES_FIELD_NUMBER: _ClassVar[int]
    RETURN_SCORES_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    max_target_tokens: int
    min_target_tokens: int
    max_target_ratio: float
    min_target_ratio: float
    beam: BeamSearch
    sampling: Sampling
    alternatives: Alternatives
    num_hypotheses: int
    repetition_penalty: float
    no_repeat_ngram_size: int
    suppressed_texts: _containers.RepeatedScalarFieldContainer[str]
    suppress_unknown: bool
    end_pieces: _containers.RepeatedScalarFieldContainer[str]
    return_scores: bool
    return_tokens: bool
    return_alignment: bool
    def __init__(self, max_target_tokens: _Optional[int] = ..., min_target_tokens: _Optional[int] = ..., max_target_ratio: _Optional[float] = ..., min_target_ratio: _Optional[float] = ..., beam: _Optional[_Union[BeamSearch, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., alternatives: _Optional[_Union[Alternatives, _Mapping]] = ..., num_hypotheses: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., no_repeat_ngram_size: _Optional[int] = ..., suppressed_texts: _Optional[_Iterable[str]] = ..., suppress_unknown: _Optional[bool] = ..., end_pieces: _Optional[_Iterable[str]] = ..., return_scores: _Optional[bool] = ..., return_tokens: _Optional[bool] = ..., return_alignment: _Optional[bool] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "coverage_penalty", "patience", "exhaustive")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTIVE_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    coverage_penalty: float
    patience: float
    exhaustive: bool
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., coverage_penalty: _Optional[float] = ..., patience: _Optional[float] = ..., exhaustive: _Optional[bool] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Alternatives(_message.Message):
    __slots__ = ("count", "min_probability")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MIN_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    count: int
    min_probability: float
    def __init__(self, count: _Optional[int] = ..., min_probability: _Optional[float] = ...) -> None: ...

class TranslateResponse(_message.Message):
    __slots__ = ("translations", "model", "model_version", "timings", "seed")
    TRANSLATIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    translations: _containers.RepeatedCompositeFieldContainer[Translation]
    model: str
    model_version: str
    timings: Timings
    seed: int
    def __init__(self, translations: _Optional[_Iterable[_Union[Translation, _Mapping]]] = ..., model: _Optional[str] = ..., model_version: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class TranslateStreamResponse(_message.Message):
    __slots__ = ("delta", "completion", "summary")
    class Delta(_message.Message):
        __slots__ = ("text_index", "text")
        TEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        text_index: int
        text: str
        def __init__(self, text_index: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
    class Completion(_message.Message):
        __slots__ = ("text_index", "translation")
        TEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
        TRANSLATION_FIELD_NUMBER: _ClassVar[int]
        text_index: int
        translation: Translation
        def __init__(self, text_index: _Optional[int] = ..., translation: _Optional[_Union[Translation, _Mapping]] = ...) -> None: ...
    class Summary(_message.Message):
        __slots__ = ("model", "model_version", "timings", "seed")
        MODEL_FIELD_NUMBER: _ClassVar[int]
        MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
        TIMINGS_FIELD_NUMBER: _ClassVar[int]
        SEED_FIELD_NUMBER: _ClassVar[int]
        model: str
        model_version: str
        timings: Timings
        seed: int
        def __init__(self, model: _Optional[str] = ..., model_version: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...
    DELTA_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    delta: TranslateStreamResponse.Delta
    completion: TranslateStreamResponse.Completion
    summary: TranslateStreamResponse.Summary
    def __init__(self, delta: _Optional[_Union[TranslateStreamResponse.Delta, _Mapping]] = ..., completion: _Optional[_Union[TranslateStreamResponse.Completion, _Mapping]] = ..., summary: _Optional[_Union[TranslateStreamResponse.Summary, _Mapping]] = ...) -> None: ...

class Translation(_message.Message):
    __slots__ = ("text", "finish_reason", "source_tokens", "target_tokens", "segments")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    finish_reason: FinishReason
    source_tokens: int
    target_tokens: int
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., source_tokens: _Optional[int] = ..., target_tokens: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("source_start", "source_end", "target_start", "target_end", "divided", "finish_reason", "hypotheses")
    SOURCE_START_FIELD_NUMBER: _ClassVar[int]
    SOURCE_END_FIELD_NUMBER: _ClassVar[int]
    TARGET_START_FIELD_NUMBER: _ClassVar[int]
    TARGET_END_FIELD_NUMBER: _ClassVar[int]
    DIVIDED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    source_start: int
    source_end: int
    target_start: int
    target_end: int
    divided: bool
    finish_reason: FinishReason
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    def __init__(self, source_start: _Optional[int] = ..., source_end: _Optional[int] = ..., target_start: _Optional[int] = ..., target_end: _Optional[int] = ..., divided: _Optional[bool] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("text", "finish_reason", "score", "log_prob", "tokens", "target_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    finish_reason: FinishReason
    score: float
    log_prob: float
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    target_tokens: int
    def __init__(self, text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., score: _Optional[float] = ..., log_prob: _Optional[float] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., target_tokens: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("piece", "log_prob", "alignment")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    piece: str
    log_prob: float
    alignment: Alignment
    def __init__(self, piece: _Optional[str] = ..., log_prob: _Optional[float] = ..., alignment: _Optional[_Union[Alignment, _Mapping]] = ...) -> None: ...

class Alignment(_message.Message):
    __slots__ = ("source_start", "source_end", "weight")
    SOURCE_START_FIELD_NUMBER: _ClassVar[int]
    SOURCE_END_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    source_start: int
    source_end: int
    weight: float
    def __init__(self, source_start: _Optional[int] = ..., source_end: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("sources", "targets", "source_language", "target_language", "model", "priority", "model_version")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[str]
    targets: _containers.RepeatedScalarFieldContainer[str]
    source_language: str
    target_language: str
    model: str
    priority: Priority
    model_version: str
    def __init__(self, sources: _Optional[_Iterable[str]] = ..., targets: _Optional[_Iterable[str]] = ..., source_language: _Optional[str] = ..., target_language: _Optional[str] = ..., model: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., model_version: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores", "model", "model_version", "timings")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[TargetScore]
    model: str
    model_version: str
    timings: Timings
    def __init__(self, scores: _Optional[_Iterable[_Union[TargetScore, _Mapping]]] = ..., model: _Optional[str] = ..., model_version: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class TargetScore(_message.Message):
    __slots__ = ("log_prob", "score", "tokens")
    LOG_PROB_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    log_prob: float
    score: float
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, log_prob: _Optional[float] = ..., score: _Optional[float] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "encode_seconds", "decode_seconds", "total_seconds", "first_token_seconds", "tokenize_seconds", "detokenize_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    encode_seconds: float
    decode_seconds: float
    total_seconds: float
    first_token_seconds: float
    tokenize_seconds: float
    detokenize_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., encode_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., tokenize_seconds: _Optional[float] = ..., detokenize_seconds: _Optional[float] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("name", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "version", "directions", "precision", "device", "max_source_tokens", "max_target_tokens", "batch_invariant", "max_hypotheses", "labels", "traffic_share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIRECTIONS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    MAX_HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    directions: _containers.RepeatedCompositeFieldContainer[Direction]
    precision: str
    device: str
    max_source_tokens: int
    max_target_tokens: int
    batch_invariant: bool
    max_hypotheses: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    traffic_share: float
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., directions: _Optional[_Iterable[_Union[Direction, _Mapping]]] = ..., precision: _Optional[str] = ..., device: _Optional[str] = ..., max_source_tokens: _Optional[int] = ..., max_target_tokens: _Optional[int] = ..., batch_invariant: _Optional[bool] = ..., max_hypotheses: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., traffic_share: _Optional[float] = ...) -> None: ...

class Direction(_message.Message):
    __slots__ = ("source_language", "target_language")
    SOURCE_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    source_language: str
    target_language: str
    def __init__(self, source_language: _Optional[str] = ..., target_language: _Optional[str] = ...) -> None: ...
