"""How a client keeps its connection: which calls are tried again, where they go, how a dead server is noticed."""

from __future__ import annotations

import json
from typing import Any

_SERVICE = "dragoman.v1.TranslationService"

MAX_MESSAGE_BYTES = 64 * 2**20

# https://github.com/grpc/grpc/blob/master/doc/service_config.md
SERVICE_CONFIG: dict[str, Any] = {
    # A name with several addresses, such as a headless Kubernetes service: calls go to all servers that are healthy.
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": _SERVICE},
    "methodConfig": [
        {
            "name": [{"service": _SERVICE}],
            # Translating changes nothing at the server, so it is safe to try again; but only where no server has taken
            # the call: an overloaded server would get more of what it has too much of.
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    # A budget for all calls together: no more tries once half of the tokens are gone; ten answers earn one back.
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A server that has vanished without a word is noticed in half a minute, and not when TCP gives up.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Of every channel."""
