"""The dashboard's only way to the engine: a client of its HTTP API. Shapes are in `dashboards.shapes`."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from dashboards.shapes import Alerts, Chaos, Detail, Live, Preview, Request, Status, Tiers, read

T = TypeVar("T")


class ApiError(Exception):
    """The engine could not be asked. `mend` tells the user what to do about it (Markdown)."""

    def __init__(self, message: str, mend: str, status: int | None = None) -> None:
        super().__init__(message)
        self.message, self.mend, self.status = message, mend, status


class Api:
    """A blocking client of one engine. Methods raise ApiError and nothing else.

    `key` is the viewer's; the calls that change something take the operator's as an argument and
    never keep it.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float = 4.0) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=8)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, limits=limits)

    def close(self) -> None:
        self._http.close()

    def status(self) -> Status:
        return self._get("/quaver/status", Status)

    def live(self, seconds: int) -> Live:
        return self._get(f"/quaver/live?seconds={seconds}", Live)

    def alerts(self) -> Alerts:
        return self._get("/quaver/alerts", Alerts)

    def chaos(self) -> Chaos:
        return self._get("/quaver/chaos", Chaos)

    def tiers(self) -> Tiers:
        return self._get("/quaver/tiers", Tiers)

    def requests(self, limit: int = 50, route: str | None = None) -> list[Request]:
        """Return finished requests, the newest first."""
        query = f"?limit={limit}" + (f"&route={quote(route, safe='')}" if route else "")
        return self._get(f"/quaver/records/requests{query}", list[Request])

    def request(self, request_id: str) -> Detail | None:
        """Return one request with its tokens, layers and spans; None when there is no such record."""
        try:
            return self._get(f"/quaver/records/requests/{quote(request_id, safe='')}", Detail)
        except ApiError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    def preview(self, key: str, selector: dict[str, Any]) -> Preview:
        """Return how many of the recent requests a selector would have reached."""
        return self._convert(
            "/quaver/chaos/preview",
            self._send("POST", "/quaver/chaos/preview", key, {"selector": selector}),
            Preview,
        )

    def start_fault(self, key: str, fault: dict[str, Any]) -> None:
        self._send("POST", "/quaver/chaos/faults", key, fault)

    def stop_fault(self, key: str, fault_id: str) -> None:
        self._send("DELETE", f"/quaver/chaos/faults/{quote(fault_id, safe='')}", key)

    def halt(self, key: str) -> None:
        """Stop every fault and block new starts."""
        self._send("POST", "/quaver/chaos/halt", key)

    def unblock(self, key: str) -> None:
        self._send("POST", "/quaver/chaos/unblock", key)

    def _get(self, path: str, kind: type[T]) -> T:
        return self._convert(path, self._call("GET", path, {}, None), kind)

    def _convert(self, path: str, body: bytes, kind: type[T]) -> T:
        try:
            return read(body, kind)
        except ValueError as error:
            message = f"The answer to {path.partition('?')[0]} was not understood: {error}."
            raise ApiError(message, "Run the dashboard and the engine from the same version.") from error

    def _send(self, method: str, path: str, key: str, body: dict[str, Any] | None = None) -> bytes:
        return self._call(method, path, {"authorization": f"Bearer {key}"}, body)

    def _call(self, method: str, path: str, headers: dict[str, str], body: dict[str, Any] | None) -> bytes:
        try:
            answer = self._http.request(method, path, headers=headers, json=body)
        except httpx.TimeoutException as error:
            mend = "It may be starting or overloaded; look at `quaver doctor` and at its log."
            raise ApiError(f"The engine at {self.url} did not answer in time.", mend) from error
        except httpx.HTTPError as error:
            mend = "Start it with `quaver serve`, or set `QUAVER_URL` to where it runs."
            raise ApiError(f"No engine answers at {self.url}.", mend) from error
        except ValueError as error:  # a key that cannot be a header
            raise ApiError("This key holds characters no key has.", "Copy it again from its file.") from error
        if answer.is_success:
            return answer.content
        raise _refusal(answer, reading=method == "GET")


def _refusal(answer: httpx.Response, reading: bool) -> ApiError:
    try:
        told = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        told = f"HTTP {answer.status_code} on {answer.request.url.path}"
    status = answer.status_code
    if status in (401, 403) and reading:
        mend = "Set `QUAVER_VIEWER_KEY`, or `QUAVER_KEYS_DIR` to the folder that holds `viewer.key`."
    elif status == httpx.codes.UNAUTHORIZED:
        mend = "Type the operator key: the content of `operator.key` in the engine's keys folder."
    elif status == httpx.codes.FORBIDDEN:
        mend = "Chaos needs the operator key and an engine started with `QUAVER_CHAOS=1`."
    elif status >= 500:
        mend = "Look at the engine's log; `quaver doctor` names common causes."
    else:
        mend = ""
    return ApiError(str(told), mend, status)
