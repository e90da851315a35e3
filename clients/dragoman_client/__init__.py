"""Client of a Dragoman server.

    from dragoman_client import Client

    with Client("localhost:50051") as client:
        print(client.translate("我爱你。", source="zh", target="en").text)

`AsyncClient` is the same for asyncio.
"""

from dragoman_client.aio import AsyncClient, ModelDescription, Translation
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

__all__ = [
    "AsyncClient",
    "Client",
    "DeadlineExceededError",
    "DragomanError",
    "InvalidRequestError",
    "ModelDescription",
    "NotFoundError",
    "OverloadedError",
    "ServerError",
    "Translation",
    "UnavailableError",
]
