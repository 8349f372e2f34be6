"""The secret behind the prefix cache's salts, and what is made of it."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from engine.api.auth import Keys, KeysError
from engine.api.salts import Salts


def test_a_salt_is_of_the_secret_and_the_tenant(tmp_path):
    Keys.load_or_create(tmp_path)
    salts = Salts.load_or_create(tmp_path)
    path = tmp_path / "cache.secret"
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    secret = path.read_text().strip().encode()
    assert salts.of("acme") == hmac.new(secret, b"acme", hashlib.sha256).digest()[:16]
    assert salts.of("acme") != salts.of("default")
    assert Salts.load_or_create(tmp_path).of("acme") == salts.of("acme")
    Keys.load(tmp_path)  # is no key


def test_two_servers_have_two_secrets(tmp_path):
    made = []
    for name in "ab":
        (tmp_path / name).mkdir()
        made.append(Salts.load_or_create(tmp_path / name).of("acme"))
    assert len(set(made)) == 2


@pytest.mark.parametrize(("secret", "mode"), [("s" * 43, 0o644), ("", 0o600)])
def test_a_secret_that_is_none_is_refused(tmp_path, secret, mode):
    path = tmp_path / "cache.secret"
    path.write_text(secret)
    path.chmod(mode)
    with pytest.raises(KeysError, match=r"cache\.secret"):
        Salts.load_or_create(tmp_path)
