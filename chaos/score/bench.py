"""Generates answers on the real engine in this process, with the faults that a server would have in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from chaos.faults.absent_slot import AbsentSlot, told_answer
from chaos.faults.base import Messages
from chaos.faults.registry import PROMPT_KINDS
from chaos.model_hook import ModelFaults
from chaos.probes import judge
from chaos.prompt_hook import PromptHook
from chaos.prompts import Item
from chaos.score import peers
from chaos.score.answer import Answer
from chaos.score.plan import TWINS, Cell
from chaos.tokens import token_pieces
from engine.core import Engine, load_engine
from engine.messages import HEAD_SIGNALS, AttachFault, RequestMeta, SamplingParams, StepOutput, Submit
from engine.models.loader import load_tokenizer
from engine.models.store import resolve
from engine.settings import EngineSettings
from engine.text import TextStream
from engine.tokenizer import Tokenizer
from telemetry.columns import decode
from telemetry.sentence import FirstSentence

_TTL_S = 3600.0
_SALT = b"score"  # of the prefix cache
_PREVIOUS = HEAD_SIGNALS.index("prev_attention")


class _TappedFaults(ModelFaults):
    """Faults, and while `tapped` the raw logits [tokens][vocabulary] of every answer, as they come."""

    tapped = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Tensor]] = {}

    def tap(self, wanted: bool) -> None:
        """Begin or end keeping logits; those kept are forgotten."""
        self.tapped = wanted
        self.seen.clear()
        self._changed()

    def logits(
        self, metas: Sequence[RequestMeta], choices: Sequence[int], steps: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, dict[int, list[str]]]:
        """Keep the logits before any fault changes them."""
        if self.tapped:
            for meta, row in zip(metas, logits, strict=True):
                self.seen.setdefault(meta.request_id, []).append(row.clone())
        return super().logits(metas, choices, steps, logits)

    def _changed(self) -> None:
        super()._changed()
        self.on_logits |= self.tapped


class _Ask(NamedTuple):
    """How a batch is asked."""

    temperature: float
    seed: int
    others: bool
    together: int | None
    salt: bytes


@dataclass
class _Open:
    item: Item
    asked: Item | None  # in its place
    submitted: float
    stream: TextStream
    text: str = ""
    sentence: FirstSentence = field(default_factory=FirstSentence)
    ended: int | None = None
    ids: list[int] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)


class Bench:
    """An engine with the chaos hooks. Every answer is drawn with all its layer detail."""

    def __init__(self, settings: EngineSettings) -> None:
        path = resolve(settings.model, settings.model_cache)
        self.tokenizer: Tokenizer = load_tokenizer(path)
        self._model_hook = _TappedFaults()
        self.engine: Engine = load_engine(settings, self._model_hook)
        self._prompt_hook = PromptHook(token_pieces(self.tokenizer))
        self._polygraph: peers.Polygraph | None = None

    def answers(
        self,
        items: Sequence[Item],
        cell: Cell,
        *,
        temperature: float,
        seed: int,
        others: bool = False,
        together: int | None = None,
        cached: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Answer]:
        """Answer every item under the cell's fault, item i with the random seed `seed + i`.

        `others`: with the scores that others use. `together`: so many at once, None as many as run at once.
        `cached`: the prefix cache is read and written. `progress` hears of every answer that is over. Answers
        come in the order of the items.
        """
        if others and self._polygraph is None and peers.version() is not None:
            config = self.engine.model.config
            self._polygraph = peers.Polygraph(config.layers, config.heads)
        self._model_hook.tap(others and self._polygraph is not None)
        hook = self._prompt_hook if cell.kind in PROMPT_KINDS else self._model_hook
        if cell.kind is not None:
            hook.attach(
                AttachFault(
                    fault_id=cell.name,
                    kind=cell.kind,
                    params=cell.params,
                    selector={},
                    seed=seed,
                    ttl_s=_TTL_S,
                )
            )
        try:
            ask = _Ask(temperature, seed, others, together, _SALT if cached else b"")
            return self._run(items, cell, ask, progress)
        finally:
            hook.detach(None)

    def _run(
        self, items: Sequence[Item], cell: Cell, ask: _Ask, progress: Callable[[int], None]
    ) -> list[Answer]:
        twin = TWINS[cell.twin] if cell.twin else (lambda item: item)
        now = 0.0  # seconds that the engine worked: what else is done here counts for nothing
        opened: dict[str, _Open] = {}
        touched: set[str] = set()
        done: dict[str, Answer] = {}
        waiting = list(enumerate(map(twin, items)))[::-1]
        room = min(filter(None, (ask.together, self.engine.settings.max_running)))
        while waiting or opened:
            while waiting and len(opened) < room:
                i, item = waiting.pop()
                meta = RequestMeta(request_id=str(i))
                messages, faults = self._prompt_hook.apply(meta, item.messages)
                encoding, more = self._prompt_hook.encoding(
                    meta, chat=True, bos=self.tokenizer.bos_id is not None
                )
                touched |= {meta.request_id} if faults or more else set()
                params = SamplingParams(
                    max_tokens=item.max_tokens,
                    temperature=ask.temperature,
                    seed=ask.seed + i,
                    full_signals=True,
                    top_logprobs=peers.EPR_TOP if ask.others else 0,
                )
                ids = self.tokenizer.encode_prompt(self.tokenizer.chat(messages, template=encoding.template))
                if self.tokenizer.bos_id is not None:
                    ids = [self.tokenizer.bos_id] * encoding.bos + ids
                self.engine.submit(Submit(meta=meta, token_ids=ids, params=params, cache_salt=ask.salt))
                asked = _instead(item, messages) if cell.kind == AbsentSlot.kind else None
                opened[str(i)] = _Open(item, asked, now, TextStream(self.tokenizer))
            output = self.engine.step()
            now += output.duration_s
            touched |= set(output.touched)
            self._take(output, opened)
            for finish in output.finished:
                entry = opened.pop(finish.request_id)
                done[finish.request_id] = self._answer(
                    entry, finish.request_id, finish.request_id in touched, now - entry.submitted
                )
                progress(1)
        return [done[str(i)] for i in range(len(items))]

    def _take(self, output: StepOutput, opened: dict[str, _Open]) -> None:
        step = decode(output, capture=True)
        assert step.token_ids is not None
        for row, request_id in enumerate(step.request_ids):
            entry = opened[request_id]
            entry.tokens.append(step.signals[row].tobytes())
            entry.ids.append(int(step.token_ids[row]))
            text = entry.stream.push(entry.ids[-1:])
            entry.text += text
            ended = entry.sentence.push(text, 1)
            entry.ended = entry.ended or ended
        for row, heads in zip(step.detail_rows, step.heads, strict=True):
            if step.layer_stride == 1:
                opened[step.request_ids[row]].heads.append(heads.tobytes())
        for row, logprobs in zip(output.logprob_rows, output.logprobs, strict=True):
            opened[step.request_ids[row]].tops.append(logprobs)

    def _answer(self, entry: _Open, request_id: str, touched: bool, seconds: float) -> Answer:
        text = entry.text + entry.stream.finish()
        whole = len(entry.heads) == len(entry.tokens)
        answer = Answer(
            item=entry.item.id,
            family=entry.item.family,
            text=text,
            correct=judge(entry.item, text).correct,
            as_asked=None if entry.asked is None else judge(entry.asked, text).correct,
            touched=touched,
            sentence=entry.ended or entry.sentence.finish(),
            seconds=seconds,
            layers=self.engine.model.config.layers if whole else 0,
            tokens=b"".join(entry.tokens),
            heads=b"".join(entry.heads) if whole else b"",
        )
        if not entry.tops:
            return answer
        found = {"EPR": peers.epr(entry.tops)}
        logits = self._model_hook.seen.pop(request_id, None)
        if self._polygraph is not None and logits and whole:
            log_probs = torch.log_softmax(torch.stack(logits), -1).numpy()
            found |= self._polygraph.scores(entry.ids, log_probs, answer.head_rows[:, _PREVIOUS])
        return msgspec.structs.replace(answer, peers=found)


def _instead(item: Item, messages: Messages) -> Item:
    """Return the item with what is right to say to the question that `absent_slot` asks instead."""
    answer = told_answer(messages[-2]["content"])
    if answer is None:
        return msgspec.structs.replace(item, check="abstain", answers=())
    return msgspec.structs.replace(item, check="slot", answers=(answer,))
