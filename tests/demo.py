"""`make demo`: start the server with the bundled model, translate over gRPC, stop it."""

from __future__ import annotations

import sys
from pathlib import Path

from dragoman_client import Client
from tests.e2e.server_process import running_server

MODELS = Path(__file__).parent.parent / "deploy" / "models"
SENTENCES = {
    ("zh", "en"): ["我爱你。", "你今天怎么样？", "一个男人骑着自行车在街上。", "他昨天没有来学校。"],
    ("en", "zh"): ["The cat sat on the mat.", "I don't know what to do.", "Two dogs are playing in the snow."],
}


def main() -> int:
    """Print translations obtained over gRPC."""
    with running_server(MODELS) as server, Client(server.address) as client:
        print(server.log(), file=sys.stderr)
        for (source, target), texts in SENTENCES.items():
            for text, translation in zip(
                texts, client.translate_batch(texts, source=source, target=target), strict=True
            ):
                print(f"{source}→{target}  {text}  →  {translation.text}")
        return server.stop()


if __name__ == "__main__":
    sys.exit(main())
