"""The start of a model process. Imports nothing heavy, so that it can be the first thing a server does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.settings import EngineSettings

#: Compute threads that spin while they wait starve whoever shares their cores, and are starved in turn:
#: beside a process that takes half a core, two spinning threads decode 12 times slower than two that sleep.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


class EngineStartError(RuntimeError):
    """The model process did not become ready; the message ends with what it wrote last."""


@dataclass(frozen=True)
class Spawned:
    """A model process that loads, to which nobody listens yet. Its owner has it adopted, or kills it."""

    folder: Path
    address: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End the process and remove every trace."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def spawn(settings: EngineSettings | None, hook: str | None) -> Spawned:
    """Start a model process, to talk through a socket in a folder that only this user can enter.

    Without `settings` it reads them from the environment, as its owner may still be about to do. Nothing
    is awaited: the caller goes on with its own start while the model loads. Raises EngineStartError.
    """
    folder = Path(tempfile.mkdtemp(prefix="quaver-"))
    address = f"ipc://{folder}/model"
    command = ["--socket", address, "--parent", str(os.getpid()), "--began", str(time.monotonic())]
    if settings is not None:
        from engine.settings import EngineSettings  # noqa: PLC0415  a caller that has some has it loaded

        fields = set(EngineSettings.model_fields)
        command += ["--settings", settings.model_dump_json(include=fields)]
    if hook is not None:
        command += ["--hook", hook]
    try:
        # A session of its own: a Ctrl-C in the terminal reaches the front alone.
        process = subprocess.Popen(  # noqa: S603  our own interpreter and module
            [sys.executable, "-m", "engine.process", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_ENVIRONMENT | os.environ,
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise EngineStartError(f"the model process cannot be started: {error}") from error
    return Spawned(folder, address, process)
