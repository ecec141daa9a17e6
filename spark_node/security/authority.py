"""A run's authority: makes identities and ends them. ECDSA P-256 throughout; keys 0600 in folders 0700."""

import os
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from spark_node.security import revocation
from spark_node.security.identity import (
    AUTHORITY,
    REVOKED,
    CertificateError,
    Identity,
    Role,
    Seen,
    check_name,
    paths,
    read_certificate,
)
from spark_node.security.revocation import Revocations

_SKEW = timedelta(minutes=5)
"""Clocks of two machines differ: certificates hold from a little before they were made."""


class Authority:
    """The certificate and the key that sign a run's identities, in a folder."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.folder, self._certificate, self._key = folder, certificate, key
        self.name = _common_name(certificate)
        self.revocations = revocation.read(folder / REVOKED, certificate)

    @classmethod
    def create(cls, folder: Path, name: str, days: float) -> "Authority":
        """A new authority in a new folder."""
        check_name(name)
        if (folder / f"{AUTHORITY}.pem").exists() or (folder / f"{AUTHORITY}.key").exists():
            raise CertificateError(f"{folder}: has an authority already; issue from it, or give another folder")
        _make_folder(folder)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = _builder(subject, subject, key.public_key(), datetime.now(UTC) + timedelta(days=days))
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        certificate = made.add_extension(usage, critical=True).sign(key, SHA256())
        _write(folder / f"{AUTHORITY}.key", _private(key), 0o600)
        _write(folder / f"{AUTHORITY}.pem", certificate.public_bytes(Encoding.PEM), 0o644)
        revocation.write(folder / REVOKED, Revocations(name), key)
        return cls(folder, certificate, key)

    @classmethod
    def open(cls, folder: Path) -> "Authority":
        """The authority that a folder holds, with its key."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / f"{AUTHORITY}.pem").read_bytes())
            key = load_pem_private_key((folder / f"{AUTHORITY}.key").read_bytes(), None)
        except OSError as error:
            missing = f"{error.filename}: cannot be read ({error.strerror})"
            raise CertificateError(f"{missing}; make an authority with: spark-dfl certs init {folder}") from None
        except (ValueError, TypeError):
            raise CertificateError(f"{folder}: holds no authority that can be read") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{folder}: the authority's key is of another kind than spark-dfl certs makes")
        return cls(folder, certificate, key)

    def issue(self, role: Role, name: str, days: float, folder: Path | None = None) -> Identity:
        """A certificate and a key for an identity, here or in another folder together with what their holder needs."""
        identity = Identity(self.name, role, check_name(name), self.revocations.valid_generation(role, name))
        end = min(datetime.now(UTC) + timedelta(days=days), self._certificate.not_valid_after_utc)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(identity.uri),
            x509.DNSName(identity.target),
        ]
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        made = _builder(subject, self._certificate.subject, key.public_key(), end)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(usage, critical=True).add_extension(both, critical=True)
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = made.sign(self._key, SHA256())
        there = folder or self.folder
        if there != self.folder:
            self._hand_out(there)
        for place in {there, self.folder}:  # the authority remembers whom it has named, not their keys
            _make_folder(place / role.value)
            _write(paths(place, role, name)[0], certificate.public_bytes(Encoding.PEM), 0o644)
        _write(paths(there, role, name)[1], _private(key), 0o600)
        return identity

    def _hand_out(self, folder: Path) -> None:
        """What every holder needs beside its own: the authority's certificate and the revocation list."""
        _make_folder(folder)
        theirs = folder / f"{AUTHORITY}.pem"
        own = (self.folder / f"{AUTHORITY}.pem").read_bytes()
        if theirs.exists() and theirs.read_bytes() != own:
            raise CertificateError(f"{folder}: belongs to another authority; give another folder")
        _write(theirs, own, 0o644)
        shutil.copyfile(self.folder / REVOKED, folder / REVOKED)

    def revoke(self, role: Role, name: str) -> Revocations:
        """End every certificate of this identity that there is; the next one issued is of a new generation."""
        if not paths(self.folder, role, check_name(name))[0].exists():
            known = ", ".join(seen.identity.name for _, seen in issued(self.folder) if seen.identity.role is role)
            raise CertificateError(f"{role.value} {name}: never issued here; known: {known[:200] or 'none'}")
        generation = self.revocations.valid_generation(role, name)
        self.revocations = self.revocations.with_(Identity(self.name, role, name, generation))
        revocation.write(self.folder / REVOKED, self.revocations, self._key)
        return self.revocations


def issued(folder: Path) -> Iterable[tuple[Path, Seen]]:
    """Every identity whose certificate lies in a folder."""
    for role in Role:
        for path in sorted((folder / role.value).glob("*.pem")):
            try:
                yield path, read_certificate(path.read_bytes())
            except (OSError, ValueError):
                raise CertificateError(f"{path}: not a certificate that spark-dfl certs made; remove it") from None


def make_run_folder(folder: Path, name: str, peers: Iterable[str], days: float) -> None:
    """Everything that a run on this machine needs, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    authority = Authority.create(folder, name, days)
    for peer in peers:
        authority.issue(Role.PEER, peer, days)
    authority.issue(Role.ORCHESTRATOR, "orchestrator", days)
    authority.issue(Role.OBSERVER, "observer", days)


def forget_keys(folder: Path) -> None:
    """Remove every private key of a folder; certificates may stay."""
    for path in folder.rglob("*.key"):
        path.unlink(missing_ok=True)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, end: datetime
) -> x509.CertificateBuilder:
    """A certificate that ends at `end`; one of no or less than no days is born expired, which tests need."""
    begin = min(datetime.now(UTC), end) - _SKEW
    made = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    return made.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _common_name(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Never readable by others, not even for a moment."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
    new.replace(path)
