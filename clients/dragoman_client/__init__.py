"""Client of a Dragoman server.

    from dragoman_client import Client

    with Client("localhost:50051") as client:
        print(client.translate("我爱你。", source="zh", target="en").text)

`AsyncClient` is the same for asyncio.
"""

from dragoman_client.aio import AsyncClient
from dragoman_client.credentials import CredentialsError
from dragoman_client.errors import (
    DeadlineExceededError,
    DeadlineUnreachableError,
    DragomanError,
    ErrorFacts,
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
)
from dragoman_client.sync import Client
from dragoman_client.types import (
    Alternatives,
    BeamSearch,
    DecodingOptions,
    Hypothesis,
    ModelDescription,
    Sampling,
    Segment,
    TargetScore,
    Timings,
    Token,
    Translation,
)

__all__ = [
    "Alternatives",
    "AsyncClient",
    "BeamSearch",
    "Client",
    "CredentialsError",
    "DeadlineExceededError",
    "DeadlineUnreachableError",
    "DecodingOptions",
    "DragomanError",
    "ErrorFacts",
    "FailedPreconditionError",
    "Hypothesis",
    "InvalidRequestError",
    "ModelDescription",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "RateLimitedError",
    "Sampling",
    "Segment",
    "ServerError",
    "TargetScore",
    "Timings",
    "Token",
    "Translation",
    "UnauthenticatedError",
    "UnavailableError",
]
