"""What keeps tenants apart in the prefix cache: a salt for each, from a secret of this server.

Without it a tenant could tell from the time to the first token what others have asked before.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from engine.api.auth import create_secret, read_secret
from engine.kv.names import SALT_BYTES

_FILE = "cache.secret"  # beside the keys, which end in .key


class Salts:
    """Derives salts: HMAC-SHA256 of a tenant's name under the secret, cut to SALT_BYTES."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    @classmethod
    def load_or_create(cls, folder: Path) -> Salts:
        """Read the secret in the keys folder, made at the first start, mode 0600. Raises KeysError."""
        path = folder.expanduser() / _FILE
        create_secret(path, secrets.token_urlsafe(32))
        return cls(read_secret(path))

    def of(self, tenant: str) -> bytes:
        """Return a tenant's salt."""
        return hmac.digest(self._secret, tenant.encode(), hashlib.sha256)[:SALT_BYTES]
