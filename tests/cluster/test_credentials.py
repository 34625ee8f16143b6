"""Credentials: valid combinations, the environment, and where a task needs none."""

import dataclasses

import pytest

from checks import message
from replicax._src.cluster.credentials import Credentials, is_loopback, random_token
from replicax._src.untrusted import file_access
from replicax.errors import ClusterEnvironmentError, InvalidArgumentError


@pytest.fixture
def pem(tmp_path):
    path = tmp_path / "some.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\n")
    path.chmod(0o600)
    return str(path)


def test_nothing_in_the_environment_is_no_credentials():
    assert Credentials.from_environment({"PATH": "/bin"}) == Credentials()


def test_a_token_of_the_environment():
    assert Credentials.from_environment({"REPLICAX_TOKEN": "secret"}).token == "secret"


def test_a_token_of_a_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    assert Credentials.from_environment({"REPLICAX_TOKEN_FILE": str(tmp_path / "token")}).token == "secret"


def test_certificates_of_the_environment(pem):
    environ = {"REPLICAX_TLS_CA": pem, "REPLICAX_TLS_CERTIFICATE": pem, "REPLICAX_TLS_KEY": pem}
    credentials = Credentials.from_environment(environ)
    assert credentials == Credentials(ca_file=pem, certificate_file=pem, key_file=pem)
    assert credentials.is_mutual
    assert credentials.uses_tls


def refused_environment(environ, *says):
    message(
        ClusterEnvironmentError, lambda: Credentials.from_environment(environ), *says, "in the environment"
    )


def test_invalid_environments(tmp_path, pem):
    refused_environment({"REPLICAX_TOKEN": ""}, "REPLICAX_TOKEN", "an empty one")
    refused_environment({"REPLICAX_TOKEN": "naïve"}, "visible ASCII")
    refused_environment({"REPLICAX_TOKEN": "a\nb"}, "visible ASCII")
    refused_environment({"REPLICAX_TOKEN": "a "}, "end with a space")
    refused_environment({"REPLICAX_TOKEN": "a", "REPLICAX_TOKEN_FILE": "b"}, "two tokens")
    refused_environment({"REPLICAX_TOKEN_FILE": str(tmp_path / "none")}, "cannot be read", "none")
    refused_environment({"REPLICAX_TLS_KEY": pem}, "given alone", "key_file")
    refused_environment({"REPLICAX_TLS_CERTIFICATE": pem}, "given alone", "certificate_file")
    refused_environment({"REPLICAX_TLS_CA": str(tmp_path / "none")}, "cannot be read", "REPLICAX_TLS_CA")
    (tmp_path / "der").write_bytes(b"0\x82")
    refused_environment({"REPLICAX_TLS_CA": str(tmp_path / "der")}, "not a PEM file", "REPLICAX_TLS_CA")


OPEN = ["REPLICAX_TOKEN_FILE", "REPLICAX_TLS_CA", "REPLICAX_TLS_CERTIFICATE", "REPLICAX_TLS_KEY"]


def environment_with(name, path, pem):
    """An environment in which one of the files is ``path``."""
    other = {"REPLICAX_TLS_CERTIFICATE": "REPLICAX_TLS_KEY", "REPLICAX_TLS_KEY": "REPLICAX_TLS_CERTIFICATE"}
    return {name: str(path)} | ({other[name]: pem} if name in other else {})


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("mode", [0o666, 0o602, 0o777])
def test_file_that_all_users_may_write_is_refused(tmp_path, pem, name, mode):
    """Also behind a link, as Kubernetes mounts secrets."""
    (tmp_path / "file").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").chmod(mode)
    for path in (tmp_path / "file", tmp_path / "link"):
        refused_environment(
            environment_with(name, path, pem), f"all users may write it (mode {mode:04o})", "chmod 600"
        )


@pytest.mark.parametrize("name", OPEN)
def test_file_of_another_user_is_refused(tmp_path, pem, name, monkeypatch):
    (tmp_path / "file").write_text("-----BEGIN CERTIFICATE-----\n")
    monkeypatch.setattr(file_access, "is_own", lambda about: False)
    refused_environment(environment_with(name, tmp_path / "file", pem), "belongs to another user")


def test_secret_that_all_users_may_read_is_one_warning(tmp_path, pem, caplog):
    """Kubernetes mounts secrets with mode 0644. Certificates are no secrets."""
    for name in OPEN:
        path = tmp_path / name
        path.write_text("-----BEGIN CERTIFICATE-----\n")
        path.chmod(0o644)
        for _ in range(2):
            Credentials.from_environment(environment_with(name, path, pem))
    warnings = [
        record.getMessage() for record in caplog.records if str(tmp_path / "REPL") in record.getMessage()
    ]
    assert [text.partition(" ")[0] for text in warnings] == ["The", "key_file:"]
    assert all("all users may read it (mode 0644)" in text for text in warnings)


def test_the_error_does_not_tell_the_token():
    text = message(
        ClusterEnvironmentError, lambda: Credentials.from_environment({"REPLICAX_TOKEN": "sec\tret"}), "ASCII"
    )
    assert "sec" not in text.replace("secrets", "")


def test_the_token_is_not_printed():
    assert "secret" not in repr(Credentials(token="secret"))


def test_they_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Credentials().token = "other"


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "127.8.0.1:0", "[::1]:1"])
def test_server_on_loopback_needs_no_credentials(address):
    Credentials().check_server(address)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "ps0.example.com:1", "127.example.com:1", "[::ffff:127.0.0.1]:1"],
)
def test_other_servers_need_a_token_or_mutual_tls(address, pem):
    message(
        InvalidArgumentError,
        lambda: Credentials().check_server(address),
        address,
        "accept everybody",
        "REPLICAX_TOKEN",
        "REPLICAX_TLS_CA",
    )
    certificate_alone = Credentials(certificate_file=pem, key_file=pem)
    message(InvalidArgumentError, lambda: certificate_alone.check_server(address), "accept everybody")
    Credentials(token="secret").check_server(address)
    Credentials(ca_file=pem, certificate_file=pem, key_file=pem).check_server(address)


def test_a_server_with_a_ca_needs_a_certificate(pem):
    message(
        InvalidArgumentError,
        lambda: Credentials("secret", ca_file=pem).check_server("localhost:1"),
        "no certificate",
    )


def test_random_tokens_differ_and_are_allowed():
    assert len({random_token() for _ in range(100)}) == 100
    Credentials(token=random_token())


@pytest.mark.parametrize(("said", "checks"), [("1", True), ("0", False), (None, False)])
def test_the_environment_turns_checksums_on(said, checks):
    environ = {} if said is None else {"REPLICAX_CHECKSUMS": said}
    security = Credentials(token="secret").security(environ)
    assert security.wants_checksums(is_loopback=True, uses_tls=False) is checks
    assert security.wants_checksums(is_loopback=False, uses_tls=True) is checks
    assert security.wants_checksums(is_loopback=False, uses_tls=False)


def test_files_that_are_no_certificates_are_named(pem):
    message(InvalidArgumentError, lambda: Credentials(ca_file=pem).security({}), pem)


def test_hosts_of_the_loopback():
    assert [is_loopback(h) for h in ("localhost", "127.0.0.1", "::1", "::", "0.0.0.0", "10.0.0.1", "a")] == [
        True,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
