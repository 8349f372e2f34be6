"""Talks to a running server's chaos endpoints: used by `quaver chaos` and the demo."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx


class RefusedError(Exception):
    """The server said no, or is none of ours: the message tells what to do, `status` and `code` why."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def content(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object that a server answered with.

    Raises RefusedError with its own words on an error, and on what no Quaver server says: a page, a
    redirection, something that is not an object.
    """
    message, code = refusal(answer)
    if message is not None:
        raise RefusedError(answer.status_code, code, message)
    try:
        result = answer.json()
    except ValueError:
        result = None
    if not answer.is_success or not isinstance(result, dict):
        raise RefusedError(
            answer.status_code,
            None,
            f"{answer.url} answered {answer.status_code}; is a Quaver server there? "
            "--url or QUAVER_URL names another",
        )
    return result


def refusal(answer: httpx.Response) -> tuple[str | None, str | None]:
    """Return message and code of an OpenAI-shaped error answer; None where it has none."""
    try:
        error = answer.json()["error"]
        return error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        return None, None


class ChaosClient:
    """Blocking; `key` is an operator's (a viewer's suffices for `status`).

    Raises RefusedError on an error answer and httpx.TransportError when nothing answers.
    """

    def __init__(
        self, url: str, key: str, *, timeout_s: float = 30.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=timeout_s, transport=transport
        )

    def status(self) -> dict[str, Any]:
        """Return the switch, faults in force, kinds, lever and recent journal."""
        return self._call("GET", "/quaver/chaos")

    def start(
        self,
        kind: str,
        ttl_s: float,
        params: dict[str, float | int | str | bool] | None = None,
        selector: dict[str, float | str] | None = None,
        *,
        seed: int = 0,
        stop: dict[str, float | str] | None = None,
        dry: bool = False,
    ) -> dict[str, Any]:
        """Start a fault; returns its listing with `fault_id` once it is in force.

        `stop`: conditions that halt chaos (`alert`, `promql`, `interruptions`). `dry`: nothing is
        started; returns whom it would reach and what it would act with.
        """
        body = {
            "kind": kind,
            "ttl_s": ttl_s,
            "params": params or {},
            "selector": selector or {},
            "seed": seed,
            "stop": stop or {},
        }
        return self._call("POST", "/quaver/chaos/preview" if dry else "/quaver/chaos/faults", body)

    def preview(self, selector: dict[str, float | str] | None = None) -> dict[str, Any]:
        """Return how many of the recent requests a selector would have reached."""
        return self._call("POST", "/quaver/chaos/preview", {"selector": selector or {}})

    def note(self, text: str) -> dict[str, Any]:
        """Write a line to the chaos journal; returns the entry."""
        return self._call("POST", "/quaver/chaos/notes", {"text": text})

    def canary(self) -> dict[str, Any]:
        """Ask the known question now; returns how the answer compares with that before the faults."""
        return self._call("POST", "/quaver/chaos/canary")

    def stop(self, fault_id: str) -> dict[str, Any]:
        """End a fault. Harmless when it is over already."""
        return self._call("DELETE", f"/quaver/chaos/faults/{quote(fault_id, safe='')}")

    def halt(self) -> dict[str, Any]:
        """End every fault and block new ones."""
        return self._call("POST", "/quaver/chaos/halt")

    def unblock(self) -> dict[str, Any]:
        """Allow new faults again."""
        return self._call("POST", "/quaver/chaos/unblock")

    def alerts(self) -> dict[str, Any]:
        """Return what fires and what fired, as `GET /quaver/alerts` tells it."""
        return self._call("GET", "/quaver/alerts")

    def live(self, seconds: int) -> dict[str, Any]:
        """Return the last seconds of traffic in bins of one second, as `GET /quaver/live` tells them."""
        return self._call("GET", f"/quaver/live?seconds={seconds}")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> ChaosClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return content(self._http.request(method, path, json=body))
