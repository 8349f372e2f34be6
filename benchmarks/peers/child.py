"""The process of one engine under measurement: obeys one line of JSON at a time, sleeps in between.

python -m benchmarks.peers.child ours '{"bits": 8, "threads": 2}'
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from benchmarks.peers.base import Subject, resident_mb


def build(family: str, options: dict[str, Any]) -> Subject:
    """Load the engine called `family`. Imports nothing of the others."""
    match family:
        case "ours":
            from benchmarks.peers.ours import Ours  # noqa: PLC0415

            return Ours(**options)
        case "llama.cpp":
            from benchmarks.peers.llamacpp import LlamaCpp  # noqa: PLC0415

            return LlamaCpp(**options)
        case "transformers":
            from benchmarks.peers.huggingface import Transformers  # noqa: PLC0415

            return Transformers(**options)
    raise ValueError(f"no engine {family!r}")


def main() -> None:
    """Obey until standard input ends. What libraries print goes to standard error."""
    family, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    subject = build(family, json.loads(options))
    print(json.dumps({"value": None}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "resident_mb":
                value: Any = resident_mb()
            else:
                value = getattr(subject, asked["do"])(**asked["with"])
            answer = {"value": value}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
