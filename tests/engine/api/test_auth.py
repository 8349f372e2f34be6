"""Key files and the policy of paths."""

from __future__ import annotations

import pytest

from engine.api.auth import Keys, KeysError, Principal, allowed

TOKEN = "t" * 16


def write(folder, name, token=TOKEN, mode=0o600):
    path = folder / name
    path.write_text(token + "\n")
    path.chmod(mode)
    return path


def test_an_empty_folder_gets_a_key_for_each_role(tmp_path):
    folder = tmp_path / "keys"
    keys = Keys.load_or_create(folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["client.key", "operator.key", "viewer.key", "webhook.key"]
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    tokens = {path.stem: path.read_text().strip() for path in folder.iterdir()}
    assert len(set(tokens.values())) == 4
    for role, token in tokens.items():
        assert keys.find(token) == Principal(role)
    again = Keys.load_or_create(folder)
    assert again.find(tokens["operator"]) == Principal("operator")


def test_tenants_come_from_file_names(tmp_path):
    write(tmp_path, "client-acme.key")
    assert Keys.load_or_create(tmp_path).find(TOKEN) == Principal("client", "acme")
    assert [path.name for path in tmp_path.iterdir()] == ["client-acme.key"]


def test_unknown_tokens_are_nobody(tmp_path):
    write(tmp_path, "client.key")
    keys = Keys.load(tmp_path)
    assert [keys.find(token) for token in ("", "x", TOKEN + "t", TOKEN[:-1], "é")] == [None] * 5


@pytest.mark.parametrize(
    ("name", "token", "mode", "message"),
    [
        ("client.key", TOKEN, 0o640, "chmod 600"),
        ("client.key", TOKEN, 0o604, "chmod 600"),
        ("client.key", "short", 0o600, "16 to 512"),
        ("client.key", "", 0o600, "16 to 512"),
        ("client.key", f"{TOKEN} {TOKEN}", 0o600, "16 to 512"),
        ("admin.key", TOKEN, 0o600, "name it"),
        ("client-.key", TOKEN, 0o600, "name it"),
    ],
)
def test_files_that_are_no_safe_keys_are_refused_by_name(tmp_path, name, token, mode, message):
    path = write(tmp_path, name, token, mode)
    with pytest.raises(KeysError, match=message) as caught:
        Keys.load(tmp_path)
    assert str(path) in str(caught.value)


def test_one_token_has_one_owner(tmp_path):
    write(tmp_path, "client.key")
    write(tmp_path, "operator.key")
    with pytest.raises(KeysError, match="another key file"):
        Keys.load(tmp_path)


@pytest.mark.parametrize(
    ("method", "path", "roles"),
    [
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/metrics", None),
        ("POST", "/v1/chat/completions", {"client", "operator"}),
        ("GET", "/quaver/status", {"viewer", "operator"}),
        ("HEAD", "/quaver/status", {"viewer", "operator"}),
        ("POST", "/quaver/chaos/halt", {"operator"}),
        ("DELETE", "/quaver/chaos/faults/1", {"operator"}),
        ("POST", "/quaver/alerts/webhook", {"webhook"}),
        ("POST", "/quaver/alerts/webhook/", {"operator"}),
        ("GET", "/", {"operator"}),
        ("GET", "//quaver/status", {"operator"}),
    ],
)
def test_policy(method, path, roles):
    assert allowed(method, path, metrics_open=True) == roles


def test_metrics_can_be_closed():
    assert allowed("GET", "/metrics", metrics_open=False) == {"viewer", "operator"}
