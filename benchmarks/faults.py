"""How far each fault and its control take answers from the truth, by family: the table of docs/chaos.md.

    python -m benchmarks.faults [--n 12] [--seed 5] [--case NAME …] [--output FILE]

The default model in this process, greedy; `n` fresh items of each family of the prompt library. Right is what
`chaos.probes` calls so, for the question that was asked before the fault. A case is paired with the same
questions without a fault.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import machine
from chaos.faults.registry import MODEL_KINDS, parse_fault
from chaos.model_hook import factory
from chaos.probes import judge
from chaos.prompt_hook import PromptHook
from chaos.prompts import GROUPS, Item, Split, absent, answered, cited, generate
from chaos.quality.intervals import difference, rate
from chaos.tokens import token_pieces
from engine.core import load_engine
from engine.messages import AttachFault, RequestMeta, SamplingParams, Submit
from engine.models.loader import load_tokenizer
from engine.models.store import resolve
from engine.settings import EngineSettings

_HELD_OUT: tuple[Split, ...] = ("calibration", "tuning", "test")


@dataclass(frozen=True)
class Case:
    """How items are asked, and the fault meanwhile (kind empty: none).

    `control`: its control has a row too. Where that is the same prompt on the same path, tests see to it that
    nothing changes.
    """

    name: str
    twin: Callable[[Item], Item]
    kind: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    control: bool = False


def _same(item: Item) -> Item:
    return item


CASES = [
    Case("clean", _same),
    Case("absent twin: abstains", absent),
    Case("absent twin, answered", answered),
    Case("cited", cited),
    Case("`absent_slot`", _same, "absent_slot"),
    Case("`authority`", _same, "authority", control=True),
    Case("`premise`", _same, "premise", control=True),
    Case("`citation`", cited, "citation", control=True),
    Case("`truncation`, needle", _same, "truncation", {"side": "needle"}, control=True),
    Case("`template`, brackets", _same, "template"),
    Case("`template`, headings", _same, "template", {"style": "headings"}),
    Case("`template`, bare", _same, "template", {"style": "bare"}),
    Case("`double_bos`", _same, "double_bos"),
    Case("`double_bos`, 4", _same, "double_bos", {"count": 4}),
    Case("`noise`, σ 1", _same, "noise", {"sigma": 1.0}),
    Case("`noise`, σ 2", _same, "noise", {"sigma": 2.0}),
    Case("`noise`, σ 3", _same, "noise", {"sigma": 3.0}),
    Case("`hidden_noise`, σ 0.5", _same, "hidden_noise"),
    Case("`head_noise`, σ 0.5", _same, "head_noise"),
    Case("`sampler`, T 1.8", _same, "sampler"),
    Case("`sampler`, T 1.8, top_k 40", _same, "sampler", {"top_k": 40}),
    Case("`head_stuck`, layer 10", _same, "head_stuck"),
    Case("`head_stuck`, layer 0", _same, "head_stuck", {"layer": 0}),
    Case("`kv_roll`", _same, "kv_roll"),
    Case("`kv_rope`", _same, "kv_rope"),
    Case("`kv_shift`", _same, "kv_shift"),
    Case("`kv_swap`", _same, "kv_swap"),
    Case("`kv_flip`, exponent", _same, "kv_flip"),
]


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
    """Print a Markdown table, a row a case and a column a family, and write the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=12, help="items of each family")
    parser.add_argument("--seed", type=int, default=5, help="which items")
    parser.add_argument("--case", nargs="*", default=[""], help="only cases whose name has one of these")
    parser.add_argument("--output", type=Path, help="where the JSON goes; nowhere without it")
    arguments = parser.parse_args()
    lab = Lab()
    families = [(split, family) for split in _HELD_OUT for family in GROUPS[split]]
    items = [
        item
        for split, family in families
        for item in generate(split, arguments.n, arguments.seed, families=(family,), late=False)
    ]
    print("| case | all | change |" + "".join(f" {family} |" for _, family in families))
    print("|---|---|---|" + "---|" * len(families))
    clean: dict[Callable[[Item], Item], list[bool]] = {}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if not any(part in case.name for part in arguments.case):
            continue
        asked = [case.twin(item) for item in items]
        if case.twin not in clean:
            clean[case.twin] = lab.right(asked, "", {})
        faults = {case.name: case.params}
        if case.control:
            faults["– its control"] = {**case.params, **parse_fault(case.kind, case.params).control}
        for name, params in faults.items():
            right = lab.right(asked, case.kind, params) if case.kind else clean[case.twin]
            row = _row(items, right, clean[case.twin] if case.kind else None)
            rows.append({"case": name, "kind": case.kind or None, "params": params} | row)
            _print(rows[-1])
    if arguments.output is not None:
        told = {"n": arguments.n, "seed": arguments.seed, "items": len(items), "cases": rows}
        arguments.output.write_text(json.dumps(machine.describe() | told, indent=1) + "\n")


def _row(items: list[Item], right: list[bool], clean: list[bool] | None) -> dict[str, Any]:
    """The share of right answers with its interval, the paired change and the shares by family."""
    of = [item.family for item in items]
    families = {
        family: sum(r for r, f in zip(right, of, strict=True) if f == family) / of.count(family)
        for family in dict.fromkeys(of)
    }
    return {
        "right": msgspec.to_builtins(rate(right, of)),
        "change": None if clean is None else msgspec.to_builtins(difference(clean, right, of)),
        "families": families,
    }


def _print(row: dict[str, Any]) -> None:
    moved = row["change"]
    change = "" if moved is None else f"{moved['change']:+.2f} ({moved['low']:+.2f} … {moved['high']:+.2f})"
    shares = "".join(f" {share:.2f} |" for share in row["families"].values())
    print(f"| {row['case']} | {row['right']['rate']:.2f} | {change} |{shares}".replace("-", "−"), flush=True)


if __name__ == "__main__":
    main()
