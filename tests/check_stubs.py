"""Fails if the committed stubs are not what the .proto files generate."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).parent.parent / "protos"


def main() -> int:
    """Generate into a temporary directory and compare."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
        outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        subprocess.run([*command, *outputs, *sources], check=True)
        generated = [path for path in Path(out).rglob("*") if path.is_file()]
        stale = [path for path in generated if not _same(path, PROTOS / path.relative_to(out))]
        for path in stale:
            print(
                f"{PROTOS / path.relative_to(out)} is not what its .proto generates; run `make protos`", file=sys.stderr
            )
    return 1 if stale or not generated else 0


def _same(generated: Path, committed: Path) -> bool:
    return committed.is_file() and committed.read_bytes() == generated.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
