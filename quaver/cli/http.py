"""How the commands talk to a running server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

URL = Annotated[
    str, typer.Option("--url", envvar="QUAVER_URL", help="The server.", show_default="http://127.0.0.1:8000")
]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file", help="File with the bearer key; default: the one in the server's keys folder."
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"


class ServerError(Exception):
    """The server could not be reached, or refused; the message says what to do."""


def no_answer(url: str, error: Exception) -> ServerError:
    """Say why nothing was heard from `url`, and how to name another server."""
    if not _is_url(url):
        return ServerError(f"{url!r} is no URL; --url or QUAVER_URL takes one such as {DEFAULT_URL}")
    return ServerError(
        f"no answer from {url} ({error}); is `quaver serve` running? --url or QUAVER_URL names another "
        "server (QUAVER_PORT is the port that `quaver serve` listens on)"
    )


def _is_url(url: str) -> bool:
    """Whether a server can be asked there: http or https, and a host."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def read_key(role: str, key_file: Path | None = None) -> str:
    """Return the key of a role: from `key_file`, else `QUAVER_<ROLE>_KEY`, else the keys folder."""
    if key_file is None and (value := os.environ.get(f"QUAVER_{role.upper()}_KEY")):
        return _a_key(value, f"QUAVER_{role.upper()}_KEY")
    if key_file is None:
        from quaver.settings import load_settings

        key_file = load_settings().keys_dir / f"{role}.key"
    try:
        return _a_key(key_file.expanduser().read_text(encoding="latin-1"), str(key_file))
    except OSError as error:
        raise ServerError(
            f"cannot read the {role} key {key_file} ({error.strerror}); give --key-file, or start "
            "`quaver serve` once to create the keys"
        ) from None


def _a_key(text: str, where: str) -> str:
    """Return the key in `text`; raises ServerError on what can be none, before it is sent anywhere."""
    key = text.strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ServerError(f"there is no key in {where}: a key is one line of letters, digits and signs")
    return key


def call(method: str, url: str, path: str, key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send one request and return the JSON object of the answer, or raise `ServerError`."""
    import httpx

    from chaos.client import RefusedError, content

    try:
        answer = httpx.request(
            method,
            url.rstrip("/") + path,
            json=body,
            headers={"authorization": f"Bearer {key}"},
            timeout=10.0,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise no_answer(url, error) from None
    try:
        return content(answer)
    except RefusedError as error:
        raise ServerError(str(error)) from None
