"""llama.cpp through `llama_decode`, without the Python layer above it. Needs the `bench` extra."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api

from benchmarks.peers.base import Prompt

_BATCH = 2048  # tokens that one call may hold
_silent = api.llama_log_callback(lambda _level, _text, _user: None)


@dataclass(frozen=True)
class Choice:
    """What of llama.cpp's configuration changes its speed on CPUs."""

    flash: bool
    ubatch: int = 512


#: What can win. A cache that all sequences share (`kv_unified`) and larger micro-batches never did.
_PREFILL = (Choice(True, 512), Choice(True, 256), Choice(False, 256))
_DECODE = (Choice(False), Choice(True))


class LlamaCpp:
    """One model and a context at a time. `path` is a GGUF file."""

    def __init__(self, path: str, threads: int) -> None:
        api.llama_log_set(_silent, None)
        api.llama_backend_init()
        self._threads = threads
        self._model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._format = Path(path).suffixes[-2].removeprefix(".")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(_BATCH, 0, 1)
        self._context: Any = None
        self._opened: tuple[int, int, Choice] | None = None  # the context's length, sequences, configuration
        self._length = 0
        self._next: list[int] = []
        self._prefills = _PREFILL[0]
        self._decodes = {1: _DECODE[0]}  # from so many sequences on

    def describe(self) -> dict[str, Any]:
        """Return format, weight bytes, the chosen configuration and what the build can do."""
        return {
            "format": self._format,
            "weight_bytes": api.llama_model_size(self._model),
            "version": version("llama-cpp-python"),
            "configuration": {
                "prefill": asdict(self._prefills),
                **{f"decode from {batch}": asdict(choice) for batch, choice in self._decodes.items()},
            },
            "system": api.llama_print_system_info().decode().strip(),
        }

    def tune(self, prompts: list[Prompt], batches: list[int]) -> None:
        """Find the configuration in which this machine prefills, and decodes each of `batches`, fastest."""
        spent = {choice: min(self._prefill(prompts[0], choice) for _ in range(2)) for choice in _PREFILL}
        self._prefills = min(spent, key=spent.__getitem__)
        for batch in batches:
            spent = {}
            for choice in _DECODE:
                self._prepare([prompt[:96] for prompt in prompts[:batch]], 64, choice)
                spent[choice] = min(self.decode(8) for _ in range(3))
            self._decodes[batch] = min(spent, key=spent.__getitem__)

    def prefill(self, prompt: Prompt) -> float:
        """Seconds from a prompt to the choice of its first token, in one call."""
        return self._prefill(prompt, self._prefills)

    def prepare(self, prompts: list[Prompt], steps: int) -> None:
        """Fill the context with `prompts`, all of one length."""
        tuned = max(batch for batch in self._decodes if batch <= len(prompts))
        self._prepare(prompts, steps, self._decodes[tuned])

    def decode(self, steps: int) -> float:
        """Seconds that `steps` greedy tokens of every sequence took, the choice of tokens included."""
        count = len(self._next)
        began = time.perf_counter()
        for _ in range(steps):
            self._fill((token, self._length, sequence, True) for sequence, token in enumerate(self._next))
            self._run()
            self._next = self._logits(count).argmax(1).tolist()
            self._length += 1
        return time.perf_counter() - began

    def score(self, windows: list[Prompt]) -> dict[str, list[float] | list[int]]:
        """Probabilities and likeliest tokens of whole windows, each in one call."""
        logprobs: list[float] = []
        top: list[int] = []
        for window in windows:
            self._open(len(window), 1, self._prefills)
            self._fill((token, i, 0, True) for i, token in enumerate(window))
            self._run()
            logits = self._logits(len(window))[:-1].astype(np.float32)
            logits -= logits.max(1, keepdims=True)
            totals = np.log(np.exp(logits).sum(1))
            wanted = np.asarray(window[1:])
            logprobs += (logits[np.arange(len(wanted)), wanted] - totals).tolist()
            top += logits.argmax(1).tolist()
        return {"logprobs": logprobs, "top1": top}

    def _prefill(self, prompt: Prompt, choice: Choice) -> float:
        self._open(len(prompt), 1, choice)
        self._fill((token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt))
        began = time.perf_counter()
        self._run()
        self._logits(1).argmax()
        return time.perf_counter() - began

    def _prepare(self, prompts: list[Prompt], steps: int, choice: Choice) -> None:
        length = len(prompts[0])
        self._open(length + steps, len(prompts), choice)
        self._next = []
        for sequence, prompt in enumerate(prompts):
            self._fill((token, i, sequence, i == length - 1) for i, token in enumerate(prompt))
            self._run()
            self._next.append(int(self._logits(1).argmax()))
        self._length = length

    def _open(self, length: int, sequences: int, choice: Choice) -> None:
        """Have an empty context for `sequences` of `length` tokens each, the last one if it is alike."""
        wanted = -(-length // 256) * 256
        if self._opened == (wanted, sequences, choice):
            api.llama_memory_clear(api.llama_get_memory(self._context), False)
            return
        if self._opened is not None:
            api.llama_free(self._context)
            self._opened = None
        params = api.llama_context_default_params()
        params.n_ctx = wanted * sequences
        params.n_batch = _BATCH
        params.n_ubatch = choice.ubatch
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        params.flash_attn_type = int(choice.flash)
        params.no_perf = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp has no context for {sequences} × {wanted} tokens with {choice}")
        self._opened = wanted, sequences, choice

    def _fill(self, rows: Iterable[tuple[int, int, int, bool]]) -> None:
        """Lay (token, position, sequence, whether its logits are wanted) out as the next call."""
        batch = self._batch
        count = 0
        for token, position, sequence, wanted in rows:
            batch.token[count] = token
            batch.pos[count] = position
            batch.n_seq_id[count] = 1
            batch.seq_id[count][0] = sequence
            batch.logits[count] = wanted
            count += 1
        batch.n_tokens = count

    def _run(self) -> None:
        status = api.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {self._batch.n_tokens} tokens")

    def _logits(self, rows: int) -> np.ndarray:
        """Logits [rows, vocabulary] of the last call, a view that the next call overwrites."""
        return np.ctypeslib.as_array(api.llama_get_logits(self._context), shape=(rows, self._vocab))
