"""The parent's side of an engine under measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_ROOT = Path(__file__).parents[2]
#: Settings that say where things are, not how an engine works.
_KEPT = {"QUAVER_MODEL_CACHE"}


class PeerError(RuntimeError):
    """The engine under measurement failed; the message ends with its last words."""


def clean_environment(**more: str) -> dict[str, str]:
    """Return this environment without the user's Quaver settings, which would change what is measured."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("QUAVER_") or k in _KEPT}
    path = os.pathsep.join(filter(None, (str(_ROOT), kept.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path} | more


class Peer:
    """A child process with one engine. A context manager: leaving it ends the process."""

    def __init__(self, family: str, **options: Any) -> None:
        """Start it and wait until the model is loaded. Raises PeerError."""
        self.family = family
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.child", family, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=_ROOT,
            env=clean_environment(OMP_NUM_THREADS=str(options["threads"])),
        )
        try:
            self._answer()
        except PeerError:
            self.close()
            raise

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have the engine do something (a method of Subject) and return what it answers."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, "with": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.family} is gone:\n{self._last_words()}") from None
        return self._answer()

    def close(self) -> None:
        """End the process. Harmless twice."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None and not stream.closed:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            cause = f"status {status}" if status >= 0 else signal.Signals(-status).name
            raise PeerError(f"{self.family} ended with {cause}:\n{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.family}: {answer['error']}")
        return answer["value"]

    def _last_words(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - 3000))
        return self._said.read().decode(errors="replace")
