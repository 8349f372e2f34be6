"""Token records of requests in progress, for `"signals": true` and for the live request page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from telemetry.columns import Step, finite

_RETIRED = 64  # ended requests whose records can still be read, for a reader that comes last


class Encoder:
    """Implements `engine.hooks.RecordEncoder`. Holds references to steps, builds dicts when asked.

    What it holds is bounded by the engine: running choices times the longest context.
    """

    def __init__(
        self, text: Callable[[int], str | None] | None = None, refresh: Callable[[], None] = lambda: None
    ) -> None:
        """`refresh` is called before anything is read, so that steps still on their way are pushed."""
        self.text, self._refresh = text, refresh
        self._rows: dict[str, dict[int, list[tuple[Step, int, int]]]] = {}
        self._retired: OrderedDict[str, None] = OrderedDict()

    def open(self, request_id: str, choices: int) -> None:
        """Start to keep the tokens of a request."""
        self._retired.pop(request_id, None)
        self._rows[request_id] = {choice: [] for choice in range(choices)}

    def push(self, step: Step) -> None:
        """Keep the rows of one engine step."""
        detail = {row: index for index, row in enumerate(step.detail_rows)}
        for row, (request_id, choice) in enumerate(zip(step.request_ids, step.choices, strict=True)):
            choices = self._rows.get(request_id)
            if choices is not None and choice in choices:
                choices[choice].append((step, row, detail.get(row, -1)))

    def retire(self, request_id: str) -> None:
        """The request is over: forget it once some more have ended."""
        if request_id not in self._rows:
            return
        self._retired[request_id] = None
        while len(self._retired) > _RETIRED:
            oldest, _ = self._retired.popitem(last=False)
            self._rows.pop(oldest, None)

    def records(self, request_id: str, choice: int, start: int = 0) -> list[dict[str, Any]]:
        """Return one dict per emitted token, in order, from the `start`-th on; empty when unknown."""
        self._refresh()
        rows = self._rows.get(request_id, {}).get(choice, [])
        return [self._record(*row) for row in rows[start:]]

    def _record(self, step: Step, row: int, detail: int) -> dict[str, Any]:
        values = step.signals[row].tolist()
        record: dict[str, Any] = {"step": step.steps[row], "time": step.time}
        record |= {name: finite(value) for name, value in zip(TOKEN_SIGNALS, values, strict=True)}
        if record["rank"] is not None:
            record["rank"] = int(record["rank"])
        token = None if step.token_ids is None else int(step.token_ids[row])
        record["token_id"] = token
        record["text"] = None if token is None or self.text is None else self.text(token)
        if detail >= 0:
            record["layers"] = {
                "layers": step.layers,
                "heads": step.heads_per_layer,
                "reason": step.detail_reasons[detail],
                "rate": step.detail_rates[detail],
                "stride": step.layer_stride,
                "lens_entropy": finite(step.lens_entropy[detail].tolist()),
                **{name: finite(step.heads[detail, i].tolist()) for i, name in enumerate(HEAD_SIGNALS)},
            }
        return record
