"""Bearer keys: files with one token each, and the policy of which role may do what."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Literal, cast

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.api.errors import ApiError

Role = Literal["client", "viewer", "operator", "webhook"]

ROLES: tuple[Role, ...] = ("client", "viewer", "operator", "webhook")
_NAME = re.compile(r"(client|viewer|operator|webhook)(?:-([a-z0-9_.-]{1,64}))?\.key")
_TOKEN = re.compile(r"[!-~]{16,512}")
_OPEN = {"/health", "/ready"}


class KeysError(Exception):
    """The key files cannot be used; the message names the file and the mend."""


class Principal(msgspec.Struct, frozen=True):
    """Who is asking, in `scope["state"]["principal"]`."""

    role: Role
    tenant: str = "default"


class Keys:
    """Known tokens, kept as SHA-256 digests."""

    def __init__(self, tokens: dict[str, Principal]) -> None:
        self._digests = [(_digest(token), principal) for token, principal in tokens.items()]

    @classmethod
    def load(cls, folder: Path) -> Keys:
        """Read `<role>[-<tenant>].key` files; raises KeysError when one is unsafe or not a key.

        Files of other names are ignored.
        """
        tokens: dict[str, Principal] = {}
        for path in sorted(folder.expanduser().glob("*.key")):
            token = read_secret(path)
            match = _NAME.fullmatch(path.name)
            if match is None:
                raise KeysError(f"{path}: name it <role>[-<tenant>].key with a role of {', '.join(ROLES)}")
            if token in tokens:
                raise KeysError(f"{path}: the same token is in another key file; give each its own")
            tokens[token] = Principal(cast("Role", match[1]), match[2] or "default")
        if not tokens:
            raise KeysError(f"{folder}: no key files; start with an empty folder to have them made")
        return cls(tokens)

    @classmethod
    def load_or_create(cls, folder: Path) -> Keys:
        """Like `load`; a folder without key files first gets one key for each role, mode 0600."""
        folder = folder.expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not any(folder.glob("*.key")):
            for role in ROLES:
                create_secret(folder / f"{role}.key", f"qv-{role}-{secrets.token_urlsafe(32)}")
        return cls.load(folder)

    def find(self, token: str) -> Principal | None:
        """Return whose token this is; takes the same time whichever key matches, or none."""
        digest = _digest(token)
        found = None
        for known, principal in self._digests:
            if hmac.compare_digest(known, digest):
                found = principal
        return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def create_secret(path: Path, token: str) -> None:
    """Write a secret file of mode 0600 unless it is there, or another process has just made it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")


def read_secret(path: Path) -> str:
    """Return the token in a file; raises KeysError when others can read it or it is none."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise KeysError(f"{path}: mode {mode:04o} lets others read this key; run: chmod 600 {path}")
    token = path.read_text(errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise KeysError(f"{path}: needs one token of 16 to 512 printable characters without spaces")
    return token


def allowed(method: str, path: str, *, metrics_open: bool) -> frozenset[Role] | None:
    """Return the roles that may do this, or None when anybody may."""
    reading = method in ("GET", "HEAD")
    if path in _OPEN or (path == "/metrics" and metrics_open):
        return None
    if path.startswith("/v1/"):
        return frozenset({"client", "operator"})
    if path == "/quaver/alerts/webhook":
        return frozenset({"webhook"})
    if reading and (path.startswith("/quaver/") or path == "/metrics"):
        return frozenset({"viewer", "operator"})
    return frozenset({"operator"})


class AuthMiddleware:
    """Answers 401 or 403 before any route sees the request; sets the principal otherwise."""

    def __init__(self, app: ASGIApp, keys: Keys, *, metrics_open: bool = True) -> None:
        self.app = app
        self.keys = keys
        self.metrics_open = metrics_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            try:
                principal = self._admit(scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> Principal | None:
        roles = allowed(scope["method"], scope["path"], metrics_open=self.metrics_open)
        if roles is None:
            return None
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise ApiError(
                401,
                "missing_api_key",
                "send `Authorization: Bearer <key>`; the keys are in the server's keys folder",
                headers={"www-authenticate": "Bearer"},
            )
        principal = self.keys.find(token.strip())
        if principal is None:
            raise ApiError(
                401, "invalid_api_key", "this key is not known here", headers={"www-authenticate": "Bearer"}
            )
        if principal.role not in roles:
            raise ApiError(
                403,
                "role_not_allowed",
                f"a {principal.role} key may not do this; it takes: {', '.join(sorted(roles))}",
            )
        return principal
