"""Instant queries to a Prometheus."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 3.0  # for the whole of an answer, however it trickles in
_SHOWN = 3


class PrometheusError(Exception):
    """Prometheus did not answer, or refused the expression; the message says which."""


class Result(msgspec.Struct, frozen=True):
    """What a query returned: the value of each series, in Prometheus's order. `scalar`: it was one number."""

    values: list[float]
    scalar: bool = False
    text: str = ""

    @property
    def holds(self) -> bool:
        """Whether an alerting rule of this expression would fire; a scalar does unless it is 0."""
        return bool(self.values[0]) if self.scalar else bool(self.values)


def read(payload: Any) -> Result:
    """Read the body of `/api/v1/query`; raises PrometheusError on one that is none."""
    try:
        data = payload["data"]
        result = data["result"]
        match data["resultType"]:
            case "scalar":
                return Result([float(result[1])], True, result[1])
            case "vector":
                values = [float(sample["value"][1]) for sample in result]
                shown = [f"{_labels(sample['metric'])} {sample['value'][1]}" for sample in result[:_SHOWN]]
                more = len(result) - len(shown)
                return Result(values, text=", ".join(shown) + (f" and {more} more" if more else ""))
            case other:
                raise PrometheusError(f"the expression returns a {other}; write one that returns a vector")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PrometheusError(f"what answered is no Prometheus ({error!r})") from None


def _labels(metric: dict[str, str]) -> str:
    own = ",".join(f'{name}="{value}"' for name, value in metric.items() if name != "__name__")
    return f"{metric.get('__name__', '')}{{{own}}}"


class Prometheus:
    """An asynchronous client of one server; connects when first asked."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http: httpx.AsyncClient | None = None

    async def query(self, expression: str) -> Result:
        """Return what an expression gives now; raises PrometheusError."""
        import httpx  # noqa: PLC0415 - a server without stop conditions does without

        if self._http is None:
            self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._http.get(f"{self._url}/api/v1/query", params={"query": expression})
            payload = answer.json()
        except TimeoutError:
            raise PrometheusError(f"Prometheus at {self._url} did not answer in {TIMEOUT_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise PrometheusError(f"no answer from Prometheus at {self._url} ({why})") from None
        except (ValueError, RecursionError):
            raise PrometheusError(f"what answers at {self._url} is no Prometheus") from None
        if not answer.is_success:
            told = payload.get("error") if isinstance(payload, dict) else None
            raise PrometheusError(f"Prometheus refused: {told or answer.status_code}")
        return read(payload)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None
