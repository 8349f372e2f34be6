"""How far each fault and its control take answers from the truth, by family: the table of docs/chaos.md.

    python -m benchmarks.faults [--n 16] [--seed 5] [--case NAME]

The default model in this process, greedy; `n` fresh items of each family of the prompt library. Right is what
`chaos.probes` calls so, for the question that was asked before the fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from chaos.faults.registry import MODEL_KINDS, parse_fault
from chaos.model_hook import factory
from chaos.probes import judge
from chaos.prompt_hook import PromptHook
from chaos.prompts import GROUPS, Item, Split, absent, answered, cited, generate
from chaos.tokens import token_pieces
from engine.core import load_engine
from engine.messages import AttachFault, RequestMeta, SamplingParams, Submit
from engine.models.loader import load_tokenizer
from engine.models.store import resolve
from engine.settings import EngineSettings

_HELD_OUT: tuple[Split, ...] = ("calibration", "tuning", "test")


def _same(item: Item) -> Item:
    return item


#: Name, how items are asked, the fault's kind and parameters.
CASES: list[tuple[str, Callable[[Item], Item], str, dict[str, Any]]] = [
    ("clean", _same, "", {}),
    ("absent twin: abstains", absent, "", {}),
    ("absent twin, answered", answered, "", {}),
    ("cited", cited, "", {}),
    ("absent_slot", _same, "absent_slot", {}),
    ("authority", _same, "authority", {}),
    ("premise", _same, "premise", {}),
    ("citation", cited, "citation", {}),
    ("truncation, needle", _same, "truncation", {"side": "needle"}),
    ("template, brackets", _same, "template", {}),
    ("template, headings", _same, "template", {"style": "headings"}),
    ("double_bos", _same, "double_bos", {}),
    ("noise, σ 2", _same, "noise", {"sigma": 2.0}),
    ("hidden_noise, σ .5", _same, "hidden_noise", {}),
    ("head_noise, σ .5", _same, "head_noise", {}),
    ("sampler, T 1.8", _same, "sampler", {}),
    ("head_stuck", _same, "head_stuck", {}),
]
_WITH_CONTROL = ("authority", "premise", "citation", "truncation")


class Lab:
    """One engine with the hooks of prompts and model."""

    def __init__(self) -> None:
        settings = EngineSettings(signal_budget=0, kv_tokens=32768)
        path = resolve(settings.model, settings.model_cache)
        self.tokenizer = load_tokenizer(path)
        self.hook = factory()
        self.prompts = PromptHook(token_pieces(self.tokenizer))
        self.engine = load_engine(settings, self.hook)

    def right(self, items: list[Item], kind: str, params: dict[str, Any]) -> list[bool]:
        """Return which of the items are answered rightly under a fault (kind empty: none)."""
        leases = self.hook if kind in MODEL_KINDS else self.prompts
        if kind:
            leases.attach(AttachFault(fault_id="f", kind=kind, params=params, seed=1, ttl_s=3600.0))
        for item in items:
            meta = RequestMeta(request_id=f"{item.family} {item.id}")
            messages, _ = self.prompts.apply(meta, item.messages)
            encoding, _ = self.prompts.encoding(meta, chat=True, bos=self.tokenizer.bos_id is not None)
            rendered = self.tokenizer.chat(messages, template=encoding.template)
            ids = [self.tokenizer.bos_id or 0] * encoding.bos + self.tokenizer.encode_prompt(rendered)
            answer = SamplingParams(max_tokens=item.max_tokens)
            self.engine.submit(Submit(meta=meta, token_ids=ids, params=answer))
        replies: dict[str, list[int]] = {f"{item.family} {item.id}": [] for item in items}
        with torch.inference_mode():
            while self.engine.has_work:
                output = self.engine.step()
                tokens = memoryview(output.token_ids).cast("i")
                for row, name in enumerate(output.request_ids):
                    replies[name].append(tokens[row])
        leases.detach(None)
        ends = self.tokenizer.eos_ids
        texts = [self.tokenizer.decode([t for t in ids if t not in ends]) for ids in replies.values()]
        return [judge(item, text).correct for item, text in zip(items, texts, strict=True)]


def main() -> None:
    """Print a Markdown table: a row a case, a column a family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=16, help="items of each family")
    parser.add_argument("--seed", type=int, default=5, help="which items")
    parser.add_argument("--case", default="", help="only cases whose name has this in it")
    arguments = parser.parse_args()
    lab = Lab()
    families = [(split, family) for split in _HELD_OUT for family in GROUPS[split]]
    items = [
        item
        for split, family in families
        for item in generate(split, arguments.n, arguments.seed, families=(family,), late=False)
    ]
    print("| case | all |" + "".join(f" {family} |" for _, family in families))
    print("|---|---|" + "---|" * len(families))
    for name, twin, kind, params in CASES:
        if arguments.case not in name:
            continue
        asked = [twin(item) for item in items]
        _print(name, lab.right(asked, kind, params), arguments.n)
        if kind in _WITH_CONTROL:
            control = {**params, **parse_fault(kind, params).control}
            _print("– its control", lab.right(asked, kind, control), arguments.n)


def _print(name: str, right: list[bool], n: int) -> None:
    shares = [sum(right) / len(right), *(sum(right[at : at + n]) / n for at in range(0, len(right), n))]
    print(f"| {name} |" + "".join(f" {share:.2f} |" for share in shares), flush=True)


if __name__ == "__main__":
    main()
