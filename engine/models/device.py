"""A fused model behind the interface of every model: arrays in, statistics of the rows out.

It runs where its weights and the pool's pages are. Steps of decodes alone go through recordings where
there is a recorder; steps with prompts in them are launched kernel by kernel.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.graphs import Graphs, Recorder, bucket
from engine.kernels.fused import HeadRows
from engine.kv.pages import PagePool
from engine.models.fused import Chunk, Fused, Step, Watch, Work
from engine.models.step import TOP, Batch, Floats, LayerDetail, Output

#: How much the newest step counts in a shape's typical time.
_NEWEST = 0.1


class DeviceModel:
    """`fused` for one engine, under `name`: its recordings hold the addresses of that engine's pages."""

    def __init__(self, fused: Fused, name: str, recorder: Recorder | None = None) -> None:
        self.name = name
        self.drops = False
        self.config = fused.config
        self.dtype = fused.dtype
        self.device = fused.device
        self.ops = fused.ops
        self._fused = fused
        self._recorder = recorder
        self._graphs: Graphs | None = None
        self._plain_s: dict[tuple[int, int], float] = {}  # a shape's typical step without detail

    @torch.inference_mode()
    def step(self, batch: Batch, pool: PagePool, keep: list[int]) -> Output:
        """Compute a batch and write its keys and values; the rows `keep` keep their logits."""
        began = time.perf_counter()
        work = work_of(batch, self.device)
        if self._recorder is not None and not work.prefills and len(batch.rows) == len(batch.tokens):
            step = self._replay(self._recorder, work, pool)
        else:
            step = self._fused.run(work, pool.keys, pool.values)
        lse, entropy = _host(step.rows.lse), _host(step.rows.entropy)
        ids, values = _listed(step.rows)
        detail = None
        if step.lens_entropy is not None and step.heads is not None:
            watched = _host(step.lens_entropy), _host(step.heads)
            detail = LayerDetail(*watched, self._extra(batch, time.perf_counter() - began))
        else:
            self._note(batch, time.perf_counter() - began)
        logits = self._fused.logits(step.hidden[keep]).cpu()
        hidden = step.hidden.cpu() if batch.hidden else None
        return Output(lse, entropy, ids, values, keep, logits, detail, hidden=hidden)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [R, vocab] of hidden states [R, hidden] as `Output` has them."""
        return self._fused.logits(hidden.to(self.device)).cpu()

    def _replay(self, recorder: Recorder, work: Work, pool: PagePool) -> Step:
        if self._graphs is None:
            self._graphs = self._fused.graphs(pool.keys, pool.values, recorder)
        watch, none = work.watch, work.lengths[:0]
        found = self._graphs(
            {
                "tokens": work.tokens,
                "positions": work.positions,
                "slots": work.slots,
                "table": work.table,
                "lengths": work.lengths,
                "places": watch.places if watch else none,
                "prompt_lengths": watch.prompt_lengths if watch else none,
            },
            watch.layers if watch else (),
        )
        rows = HeadRows(*(found.get(name, none) for name in HeadRows._fields))
        return Step(rows, found["hidden"], found.get("lens_entropy"), found.get("heads"))

    def _note(self, batch: Batch, seconds: float) -> None:
        """Learn what a step of this shape takes without detail."""
        typical = self._plain_s.get(_shape(batch), seconds)
        self._plain_s[_shape(batch)] = typical + _NEWEST * (seconds - typical)

    def _extra(self, batch: Batch, seconds: float) -> float:
        """What detail took: a device works on after its kernels are launched, so by comparison with steps of
        the shape without it; nothing while there were none."""
        return max(0.0, seconds - self._plain_s.get(_shape(batch), seconds))


def work_of(batch: Batch, device: torch.device) -> Work:
    """Take `batch` to `device`: leading spans of one token are decodes, all others chunks.

    Right in any order of spans; with decodes first, as the scheduler plans them, they share a launch.
    """
    counts = batch.counts.tolist()
    decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    ends = batch.starts + batch.counts
    positions = np.arange(len(batch.tokens)) - np.repeat(batch.offsets - batch.starts, batch.counts)

    def there(array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    tables, detail = there(batch.tables), batch.detail
    watch = None
    if detail is not None and len(detail.layers):
        watch = Watch(
            tuple(detail.layers.tolist()),
            there((batch.offsets + batch.counts - 1)[detail.spans]),
            there(batch.tables[detail.spans]),
            there(ends[detail.spans]),
            there(detail.prompt_lengths),
        )
    return Work(
        tokens=there(batch.tokens),
        positions=there(positions),
        slots=there(batch.slots),
        table=tables[:decodes],
        lengths=there(ends[:decodes]),
        rows=there(batch.rows),
        prefills=[
            Chunk(int(batch.offsets[i]), counts[i], int(batch.starts[i]), tables[i : i + 1])
            for i in range(decodes, len(counts))
        ],
        watch=watch,
    )


def _shape(batch: Batch) -> tuple[int, int]:
    return bucket(len(batch.tokens)), bucket(batch.tables.shape[1])


def _host(tensor: Tensor) -> Floats:
    found: Floats = tensor.cpu().numpy()
    return found


def _listed(rows: HeadRows) -> tuple[Any, Floats]:
    """Ids and values [R, TOP] as an `Output` lists them: −1 and −∞ where there are fewer."""
    count, ranked = rows.top_logits.shape
    ids = np.full((count, TOP), -1, np.int32)
    values = np.full((count, TOP), -np.inf, np.float32)
    ids[:, :ranked] = rows.top_tokens.cpu().numpy()
    values[:, :ranked] = rows.top_logits.cpu().numpy()
    return ids, values
