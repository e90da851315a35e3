"""Client of a Dragoman server.

    from dragoman_client import Client

    with Client("localhost:50051") as client:
        print(client.translate("我爱你。", source="zh", target="en").text)

`AsyncClient` is the same for asyncio.
"""

from dragoman_client.aio import AsyncClient
from dragoman_client.errors import (
    DeadlineExceededError,
    DragomanError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
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
    "DeadlineExceededError",
    "DecodingOptions",
    "DragomanError",
    "Hypothesis",
    "InvalidRequestError",
    "ModelDescription",
    "NotFoundError",
    "OverloadedError",
    "Sampling",
    "Segment",
    "ServerError",
    "TargetScore",
    "Timings",
    "Token",
    "Translation",
    "UnavailableError",
]
