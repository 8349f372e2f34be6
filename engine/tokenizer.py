"""Text to token ids and back, and chat messages to prompts."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

#: Put before a special token's spelling inside a message: such text is never a control token.
#: A Unicode noncharacter: it has no meaning in interchanged text, and never reaches the model.
GUARD = "\ufdd0"
_PREFILL = "\ufdd1prefill\ufdd1"
_DROP_MARKS = str.maketrans("", "", "\ufdd0\ufdd1")

#: How Llama 3 and Qwen cut text into words; they differ in how many digits may stand together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: GGUF's names for ways to cut text into words before BPE.
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r"})
_PLAIN = frozenset({"gpt-2", "gpt2"})
_LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN_NAMES = frozenset({"qwen2"})


class ChatTemplateError(ValueError):
    """Messages cannot be rendered; the message says what the template refused."""


class Tokenizer:
    """A model's tokenizer and chat template. Safe to share between threads.

    `backend` decides how text is cut; `template` is the Jinja chat template or None. Raises
    `ChatTemplateError` for a template that is no Jinja.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        template: str | None,
        bos_id: int | None,
        eos_ids: Sequence[int],
        add_bos: bool,
    ) -> None:
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self.add_bos = add_bos and bos_id is not None
        self.vocab_size: int = backend.get_vocab_size()
        self._backend = backend
        self._plain = _without_specials(backend)
        self._added = backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in self._added.items() if token.special}
        self._special_ids = frozenset(self._special.values())
        spellings = "|".join(re.escape(s) for s in sorted(self._special, key=len, reverse=True)) or r"(?!)"
        self._starts = re.compile(f"(?={spellings})")
        self._unguarded = re.compile(f"(?<!{GUARD})({spellings})")
        self._byte_level = "ByteLevel" in repr(backend.decoder)
        self._pieces: dict[int, bytes] = {}  # those asked for so far
        self._adds_space = any(mark in repr(backend.decoder) for mark in ("Strip(", '"always"', '"first"'))
        self.template = template
        self._compiled = _compile(template or "")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of `text`, without BOS.

        With `special`, the spelling of a special token is that token, unless `GUARD` precedes it;
        without, everything is ordinary text.
        """
        if not special:
            return _cut(self._plain, text.replace(GUARD, ""))
        if GUARD not in text:
            return _cut(self._backend, text)
        ids: list[int] = []
        for i, piece in enumerate(self._unguarded.split(text)):
            ids += [self._special[piece]] if i % 2 else self.encode(piece, special=False)
        return ids

    def encode_prompt(self, rendered: str) -> list[int]:
        """Return the ids of a whole prompt: special tokens parsed, one BOS if the model wants it."""
        ids = self.encode(rendered)
        if not self.add_bos or self.bos_id is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return [self.bos_id, *ids[start:]]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        prefill: str | None = None,
        template: str | None = None,
    ) -> str:
        """Return messages rendered through the chat template, or `template`, for `encode_prompt`.

        A last message of role `assistant` is left open: generation continues it. `prefill` is the
        start of the answer, put after whatever the assistant has already said there. Spellings of
        special tokens inside messages come out behind `GUARD`, and are ordinary text to
        `encode_prompt`: nobody ends a turn or opens one from inside a message. Raises
        `ChatTemplateError`.
        """
        if self.template is None:
            raise ChatTemplateError("this model has no chat template; use the text completion endpoint")
        guarded: list[dict[str, Any]] = [self._guard(dict(message)) for message in messages]
        opening = None if prefill is None else self._guard(prefill)
        if guarded and guarded[-1].get("role") == "assistant":
            opening = _text_of(guarded.pop()) + (opening or "")
        if opening is not None:
            guarded.append({"role": "assistant", "content": _PREFILL})
        compiled = self._compiled if template is None else _compile(template)
        text = self._render(compiled, guarded, add_generation_prompt and opening is None)
        if opening is None:
            return text
        head, found, _ = text.rpartition(_PREFILL)
        if not found:
            raise ChatTemplateError(
                "this model's chat template does not let an assistant message be continued"
            )
        return head + str(opening)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `ids`; broken UTF-8 becomes U+FFFD. Special tokens only with `special`."""
        if special:
            pieces = [
                self._spelling(i).encode() if i in self._special_ids else self.token_bytes(i) for i in ids
            ]
        else:
            pieces = [self.token_bytes(i) for i in ids]
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._adds_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text: none for special and unknown ids."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> bytes:
        """Spell a token, of a byte-level or a byte-fallback vocabulary."""
        added = self._added.get(token_id)
        if added is not None:
            return b"" if added.special else str(added.content).encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._byte_level:
            return token.translate(_TO_LATIN1).encode("latin-1", errors="ignore")
        if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def _render(
        self, compiled: jinja2.Template, messages: list[dict[str, Any]], add_generation_prompt: bool
    ) -> str:
        try:
            return compiled.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._spelling(self.bos_id),
                eos_token=self._spelling(self.eos_ids[0] if self.eos_ids else None),
                tools=None,
                documents=None,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error.message}") from error
        except (TypeError, KeyError, AttributeError, IndexError, ValueError) as error:
            raise ChatTemplateError(f"the chat template failed on the messages: {error}") from error

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._starts.sub(GUARD, value.translate(_DROP_MARKS))
        if isinstance(value, Mapping):
            return {key: self._guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item) for item in value]
        return value


def _cut(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of `text`. Unlike `encode`, the batch call lets other threads run meanwhile."""
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise ChatTemplateError("an assistant message can be continued only if its content is a string")
    return content


def byte_level_bpe(
    tokens: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    pre_tokenizer: str,
    special: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer from GGUF's lists.

    `pre_tokenizer` is GGUF's name for how text is cut into words first. `special` are the control
    tokens among `tokens`; `whole` are ordinary text that is never cut. Raises ValueError for merges
    that do not fit the vocabulary, and for a pre-tokenizer that we do not know: a wrong guess would
    silently change every prompt.
    """
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenizer in _LLAMA3_NAMES)
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"the merges do not fit the vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if pre_tokenizer in _QWEN_NAMES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre_tokenizer)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    return backend


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _PLAIN:
        return words
    if name in _DIGITS_FIRST:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name in _LLAMA3_NAMES | _QWEN_NAMES:
        split = pre_tokenizers.Split(Regex(_WORDS % (3 if name in _LLAMA3_NAMES else 1)), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    raise ValueError(f"pre-tokenizer {name!r} is not known; use the model's safetensors folder instead")


def _without_specials(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that takes the spelling of a special token for ordinary text.

    It shares the model with `backend`: a copy of a large vocabulary takes a quarter of a second.
    """
    plain = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(backend, part) is not None:
            setattr(plain, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    plain.add_tokens([added[i] for i in sorted(added)])
    if {i: t.content for i, t in plain.get_added_tokens_decoder().items()} != {
        i: t.content for i, t in added.items()
    }:
        plain = copy.deepcopy(backend)  # ids with gaps: only a copy keeps them
    plain.encode_special_tokens = True
    return plain


def _byte_alphabet() -> dict[int, str]:
    """Return the printable character by which byte-level BPE spells each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


_TO_LATIN1 = {ord(char): chr(byte) for byte, char in _byte_alphabet().items()}


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template is damaged: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
