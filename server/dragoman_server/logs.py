"""The log on stderr: text or JSON, each line with the call that it belongs to. Texts of callers never stand in it."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

from dragoman_server.call import Call, current_call

_FACTS = "facts"
"""Attribute of a record with fields for JSON beside the message."""


def configure(log_format: Literal["text", "json"], level: str) -> None:
    """Send the log to stderr in one of the formats."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_call(log: logging.Logger, call: Call, code: str, seconds: float) -> None:
    """A line for a finished call: who, what, how long; never what was said."""
    facts = {
        "method": call.method,
        "code": code,
        "seconds": round(seconds, 6),
        "caller": call.caller,
        "model": call.model,
        "version": call.version,
        "priority": call.priority,
    }
    log.info("%s %s in %.4f s", call.method, code, seconds, extra={_FACTS: facts})


class TextFormatter(logging.Formatter):
    """For people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the request id if there is one."""
        line = super().format(record)
        call = current_call.get(None)
        return line if call is None else f"{line} [{call.request_id}]"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time (RFC 3339, UTC), level, logger, message, request_id, error, and what the line knows besides."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (call := current_call.get(None)) is not None:
            fields["request_id"] = call.request_id
        fields |= getattr(record, _FACTS, {})
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(fields, ensure_ascii=False)
