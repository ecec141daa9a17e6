"""Certificates and limits by themselves: what is made, what is refused and with which words, how patience ends."""

import json
import os
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from spark_node.cli.main import main
from spark_node.config import SecuritySettings, load, to_toml
from spark_node.errors import ConfigError, UserError
from spark_node.membership import peer_names
from spark_node.security import identity
from spark_node.security.authority import Authority, forget_keys, make_run_folder
from spark_node.security.identity import CertificateError, Identity, Role
from spark_node.security.limits import Guard, Rates, TokenBucket
from spark_node.security.revocation import LiveRevocations, Revocations, read, write
from spark_node.security.tls import MutualTls, Plaintext, security_of


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority.create(tmp_path / "ca", "monday", 30)
    made.issue(Role.PEER, "peer-000", 10)
    return made


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_identity_is_name_role_and_authority_and_loads_with_its_key(authority: Authority) -> None:
    own = identity.load(authority.folder, Role.PEER, "peer-000")
    assert own.identity == Identity("monday", Role.PEER, "peer-000", 1)
    assert own.identity.uri == "spark://monday/peer/peer-000/1"
    assert own.identity.target == "peer-000.1.peer.spark"
    certificate = x509.load_pem_x509_certificate(own.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["peer-000.1.peer.spark"]
    assert own.not_after - datetime.now(UTC) < timedelta(days=10)


def test_keys_are_for_their_owner_only(authority: Authority) -> None:
    keys = sorted(authority.folder.rglob("*.key"))
    assert [key.name for key in keys] == ["authority.key", "peer-000.key"]
    assert {mode(key) for key in keys} == {0o600}
    assert {mode(authority.folder), mode(authority.folder / "peer")} == {0o700}


def test_the_certificates_of_three_hundred_peers_take_seconds_and_their_keys_can_be_forgotten(tmp_path: Path) -> None:
    start = time.process_time()
    make_run_folder(tmp_path / "certs", "run", peer_names(300), 1.0)
    assert time.process_time() - start < 10
    assert len(list(tmp_path.rglob("*.key"))) == 303
    forget_keys(tmp_path / "certs")
    assert not list(tmp_path.rglob("*.key"))


def test_a_holder_gets_its_own_key_the_authoritys_certificate_and_the_list_and_no_more(
    authority: Authority, tmp_path: Path
) -> None:
    authority.issue(Role.PEER, "peer-001", 10, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"authority.pem", "revoked.json", "peer/peer-001.pem", "peer/peer-001.key"}
    assert identity.load(tmp_path / "out", Role.PEER, "peer-001").identity.name == "peer-001"
    assert not (authority.folder / "peer" / "peer-001.key").exists()


def refused(folder: Path, role: Role = Role.PEER, name: str = "peer-000") -> str:
    with pytest.raises(CertificateError) as caught:
        MutualTls(folder, role, name)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_missing_certificate_says_how_to_make_one(authority: Authority) -> None:
    assert "spark-dfl certs issue" in refused(authority.folder, name="peer-007")
    (authority.folder / "authority.pem").unlink()
    assert "authority.pem: cannot be read" in refused(authority.folder)


def test_an_expired_certificate_is_refused_with_its_date(authority: Authority) -> None:
    authority.issue(Role.PEER, "peer-000", -1)
    assert "expired on 20" in refused(authority.folder)


def test_a_certificate_of_another_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other", "monday", 30)
    other.issue(Role.PEER, "peer-000", 10)
    for name in ("peer-000.pem", "peer-000.key"):
        os.replace(other.folder / "peer" / name, authority.folder / "peer" / name)
    assert "not of the authority" in refused(authority.folder)
    with pytest.raises(CertificateError, match="another authority"):
        other.issue(Role.PEER, "peer-001", 1, authority.folder)


def test_a_key_that_others_may_read_or_that_is_anothers_is_refused(authority: Authority) -> None:
    key = authority.folder / "peer" / "peer-000.key"
    key.chmod(0o640)
    assert "chmod 600" in refused(authority.folder)
    key.chmod(0o600)
    authority.issue(Role.PEER, "peer-001", 10)
    os.replace(authority.folder / "peer" / "peer-001.key", key)
    assert "not the key of its certificate" in refused(authority.folder)
    key.write_text("nonsense")
    assert "not a private key" in refused(authority.folder)


def test_a_certificate_under_anothers_file_name_is_refused(authority: Authority) -> None:
    for end in ("pem", "key"):
        os.replace(authority.folder / "peer" / f"peer-000.{end}", authority.folder / "peer" / f"peer-009.{end}")
    assert "not of peer peer-009" in refused(authority.folder, name="peer-009")


def test_a_revoked_identity_is_refused_until_it_is_issued_anew_with_another_generation(authority: Authority) -> None:
    authority.revoke(Role.PEER, "peer-000")
    assert "revoked" in refused(authority.folder)
    assert authority.issue(Role.PEER, "peer-000", 10).generation == 2
    MutualTls(authority.folder, Role.PEER, "peer-000")
    with pytest.raises(CertificateError, match="never issued"):
        authority.revoke(Role.PEER, "peer-999")


def test_clients_ask_for_a_name_that_no_revoked_certificate_has(authority: Authority) -> None:
    authority.issue(Role.PEER, "peer-001", 10)
    mine = MutualTls(authority.folder, Role.PEER, "peer-001")
    assert mine.expected(Role.PEER, "peer-000") == "peer-000.1.peer.spark"
    authority.revoke(Role.PEER, "peer-000")
    mine._revocations._looked -= 10
    assert mine.expected(Role.PEER, "peer-000") == "peer-000.2.peer.spark"


def test_a_list_is_reloaded_when_it_changes_but_never_an_older_or_a_forged_one(
    authority: Authority, tmp_path: Path
) -> None:
    path, now = authority.folder / "revoked.json", [0.0]
    root = (authority.folder / "authority.pem").read_bytes()
    live = LiveRevocations(authority.folder, root, lambda: now[0])
    first, who = path.read_bytes(), Identity("monday", Role.PEER, "peer-000")
    authority.revoke(Role.PEER, "peer-000")
    assert not live().covers(who)  # looked at once a second
    now[0] = 2.0
    assert live().covers(who)
    path.write_bytes(first)  # replayed
    now[0] = 4.0
    assert live().covers(who)
    stranger = Authority.create(tmp_path / "other", "monday", 1)
    write(path, Revocations("monday", 99), stranger._key)
    now[0] = 6.0
    assert live().covers(who)
    with pytest.raises(CertificateError, match="has signed"):
        read(path, x509.load_pem_x509_certificate(root))
    path.unlink()
    now[0] = 8.0
    assert live().covers(who)
    assert "revoked.json: cannot be read" in refused(authority.folder)


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "*", "x" * 65, "ä", "../up"])
def test_names_that_could_be_mistaken_are_refused(authority: Authority, name: str) -> None:
    with pytest.raises(CertificateError, match="allowed"):
        authority.issue(Role.PEER, name, 1)


# Settings


def test_without_certificates_nothing_starts_and_nothing_falls_back() -> None:
    with pytest.raises(CertificateError, match="--certs DIR"):
        security_of(SecuritySettings(), Role.PEER, "peer-000")
    assert isinstance(security_of(SecuritySettings(tls="off"), Role.PEER, "peer-000"), Plaintext)


@pytest.mark.parametrize("key", ["network.host", "network.orchestrator"])
def test_plaintext_is_for_the_loopback_only(key: str) -> None:
    end = ":7000" if key.endswith("orchestrator") else ""
    for host in ("127.0.0.1", "localhost", "127.9.9.9"):
        load(flags={"security.tls": "off", key: host + end}, environment={})
    load(flags={"security.tls": "off", key: f"[::1]{end}" if end else "::1"}, environment={})
    for host in ("10.0.0.1", "0.0.0.0", "example.org", "[::]"):
        with pytest.raises(ConfigError, match=f"{key} = .*security.tls = 'off'"):
            load(flags={"security.tls": "off", key: host + end}, environment={})
        load(flags={key: host + end}, environment={})


def test_a_token_is_for_plaintext_and_is_not_written_down() -> None:
    config = load(flags={"security.tls": "off", "security.token": "sesame"}, environment={})
    assert "sesame" not in to_toml(config)
    with pytest.raises(ConfigError, match="token"):
        load(flags={"security.token": "sesame"}, environment={})


# The command


def test_the_command_makes_shows_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca, out = str(tmp_path / "ca"), str(tmp_path / "out")
    assert main(["certs", "init", ca, "--name", "monday"]) == 0
    assert main(["certs", "issue", ca, "--peers", "2:5", "--out", out]) == 0
    assert main(["certs", "issue", ca, "--role", "observer"]) == 0
    assert main(["certs", "revoke", ca, "peer-003"]) == 0
    capsys.readouterr()
    assert main(["certs", "show", ca, "--json"]) == 0
    shown = {row["identity"]: (row["state"], row["key"]) for row in json.loads(capsys.readouterr().out)["identities"]}
    assert shown == {
        "spark://monday/peer/peer-002/1": ("valid", False),
        "spark://monday/peer/peer-003/1": ("revoked", False),
        "spark://monday/peer/peer-004/1": ("valid", False),
        "spark://monday/observer/observer/1": ("valid", True),
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["issue", "nowhere", "peer-000"], "certs init"),
        (["show", "nowhere"], "authority.pem"),
        (["init", "new", "--days", "0"], "days"),
        (["issue", "nowhere", "--peers", "5:2"], "nowhere"),
        ([], "ACTION"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["certs", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("command", [["orchestrator"], ["node", "--orchestrator", "127.0.0.1:1"]])
def test_commands_without_certificates_end_with_a_line_and_2(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--certs DIR" in error


# Limits


def test_a_bucket_gives_its_rate_and_saves_a_burst() -> None:
    bucket = TokenBucket(10.0, 20.0, 0.0)
    assert [bucket.take(1, 0.0) for _ in range(21)] == [True] * 20 + [False]
    assert [bucket.take(1, 0.5) for _ in range(6)] == [True] * 5 + [False]
    assert not bucket.take(21, 1e9)


def test_one_caller_that_calls_too_often_costs_another_nothing() -> None:
    rates = Rates(5.0, lambda: 0.0)
    assert [rates.allow("a") for _ in range(11)] == [True] * 10 + [False]
    assert rates.allow("b")


def guard(**changes: float) -> Guard:
    return Guard(SecuritySettings(**changes), 1000, lambda: 0.0)  # type: ignore[arg-type]


def test_a_sender_has_so_many_messages_and_streams() -> None:
    it = guard(messages_per_second=5.0, streams_per_sender=2)
    assert [it.enter("a") for _ in range(3)] == [True, True, False]
    assert it.enter("b")
    for _ in range(8):
        it.leave("a")
        assert it.enter("a")
    it.leave("a")
    assert not it.enter("a")  # ten in no time


def test_bytes_are_limited_but_one_message_of_the_largest_size_is_not() -> None:
    it = Guard(SecuritySettings(bytes_per_second=1024.0), 10_000, lambda: 0.0)
    assert it.spend("a", 10_000)
    assert it.spend("a", 10_000)
    assert not it.spend("a", 1)
    assert it.spend("b", 1)


def test_a_sender_is_cut_off_after_some_strikes_for_some_rounds_and_the_others_are_not() -> None:
    it = guard(strikes=3, cut_off_rounds=2)
    assert [it.strike("a", 7) for _ in range(3)] == [False, False, True]
    assert [it.is_cut_off("a", k) for k in (7, 8, 9)] == [True, True, False]
    assert not it.is_cut_off("b", 7)
    assert (it.cut_off(7), it.cut_off(9)) == (1, 0)


def test_strikes_of_long_ago_are_forgotten() -> None:
    it = guard(strikes=3, cut_off_rounds=2)
    assert not any(it.strike("a", k) for k in range(0, 100, 3))


def test_nobody_is_cut_off_before_the_first_round() -> None:
    it = guard()
    assert it.enter("a")
    assert not it.is_cut_off("a", 0)


def test_the_memory_of_senders_is_bounded() -> None:
    it = guard()
    for i in range(10_000):
        it.strike(f"connection {i}", 1)
    assert len(it._senders) <= 4096


def test_a_sender_is_forgotten_when_it_is_as_good_as_a_new_one() -> None:
    now = [0.0]
    settings = SecuritySettings(messages_per_second=1.0, strikes=3, cut_off_rounds=2)
    it = Guard(settings, 1000, lambda: now[0])
    for who in ("quiet", "busy", "struck", "cut off"):
        assert it.enter(who)
    for who in ("quiet", "struck", "cut off"):
        it.leave(who)
    it.strike("struck", 1)
    for _ in range(3):
        it.strike("cut off", 1)
    it.round_begins(1)
    assert len(it._senders) == 4  # each has a message less than a new one
    now[0] = 10.0
    it.round_begins(2)
    assert set(it._senders) == {"busy", "struck", "cut off"}
    assert it.is_cut_off("cut off", 2)
    it.round_begins(4)
    assert set(it._senders) == {"busy"}
    it.leave("busy")
    now[0] = 20.0
    it.round_begins(5)
    assert not it._senders


def test_a_rate_is_not_escaped_by_a_new_round() -> None:
    it = guard(messages_per_second=5.0, streams_per_sender=100)
    for k in range(10):
        assert it.enter("a")
        it.leave("a")
        it.round_begins(k)
    assert not it.enter("a")


def test_errors_of_certificates_are_the_users() -> None:
    assert issubclass(CertificateError, UserError)
