"""Identities: what a certificate of a run says, and loading one's own so that anything doubtful ends at the start."""

import enum
import re
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from spark_node.errors import UserError

AUTHORITY, REVOKED = "authority", "revoked.json"
_NAME = re.compile(r"[a-z0-9._-]{1,64}")
_URI = re.compile(r"spark://([a-z0-9._-]{1,64})/([a-z]+)/([a-z0-9._-]{1,64})/([1-9][0-9]{0,8})")


class CertificateError(UserError):
    """A certificate or key that cannot be used; the message says what to do."""


class Role(enum.Enum):
    """What the holder of a certificate may do."""

    PEER = "peer"
    ORCHESTRATOR = "orchestrator"
    OBSERVER = "observer"


@dataclass(frozen=True)
class Identity:
    """Whom a certificate names. A revocation ends a generation: the next certificate of that name has a higher one."""

    authority: str
    role: Role
    name: str
    generation: int = 1

    @property
    def uri(self) -> str:
        return f"spark://{self.authority}/{self.role.value}/{self.name}/{self.generation}"

    @property
    def target(self) -> str:
        """The host name that a client checks: that of an identity, wherever it listens."""
        return target(self.role, self.name, self.generation)


def target(role: Role, name: str, generation: int) -> str:
    """The DNS name in the certificate of that identity."""
    return f"{name}.{generation}.{role.value}.spark"


def check_name(name: str) -> str:
    """Host names do not tell upper from lower case, so names in certificates have no upper case."""
    if not _NAME.fullmatch(name):
        raise CertificateError(f"name {name[:80]!r}: allowed: 1 to 64 of a-z, 0-9, dots, dashes, underscores")
    return name


@dataclass(frozen=True)
class Seen:
    """A certificate as somebody showed it."""

    identity: Identity
    not_before: datetime
    not_after: datetime
    serial: int


@lru_cache(maxsize=1024)
def read_certificate(pem: bytes) -> Seen:
    """What a certificate says of its holder; ValueError where it is none of ours. Its signature is not checked here."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("no identity in it") from None
    found = [
        match for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if (match := _URI.fullmatch(uri))
    ]
    if len(found) != 1:
        raise ValueError("no identity in it")
    authority, role, name, generation = found[0].groups()
    identity = Identity(authority, Role(role), name, int(generation))
    return Seen(identity, certificate.not_valid_before_utc, certificate.not_valid_after_utc, certificate.serial_number)


@dataclass(frozen=True)
class Credentials:
    """One's own certificate and key, and the authority's certificate, as PEM."""

    identity: Identity
    not_after: datetime
    certificate: bytes
    key: bytes
    authority: bytes


def paths(folder: Path, role: Role, name: str) -> tuple[Path, Path]:
    """Where the certificate and the key of an identity lie."""
    return folder / role.value / f"{name}.pem", folder / role.value / f"{name}.key"


def load(folder: Path, role: Role, name: str, now: datetime | None = None) -> Credentials:
    """One's own credentials, checked in full; CertificateError where anything is amiss."""
    certificate_path, key_path = paths(folder, role, check_name(name))
    authority = _read(folder / f"{AUTHORITY}.pem", "ask whoever runs the authority for it (spark-dfl certs)")
    issue = f"make one with: spark-dfl certs issue {folder} --role {role.value} {name}"
    certificate, key = _read(certificate_path, issue), _read_key(key_path, issue)
    try:
        seen = read_certificate(certificate)
        root, own = x509.load_pem_x509_certificate(authority), x509.load_pem_x509_certificate(certificate)
        own.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise CertificateError(f"{certificate_path}: not of the authority in {folder}; {issue}") from None
    if (seen.identity.role, seen.identity.name) != (role, name):
        raise CertificateError(f"{certificate_path}: is of {seen.identity.uri}, not of {role.value} {name}; {issue}")
    moment = now or datetime.now(UTC)
    for what, end in ((folder / f"{AUTHORITY}.pem", root.not_valid_after_utc), (certificate_path, seen.not_after)):
        if end <= moment:
            remedy = issue if what == certificate_path else "make a new authority with: spark-dfl certs init"
            raise CertificateError(f"{what}: expired on {end:%Y-%m-%d %H:%M} UTC; {remedy}")
    if seen.not_before > moment:
        raise CertificateError(f"{certificate_path}: holds from {seen.not_before:%Y-%m-%d %H:%M} UTC; set the clock")
    _check_pair(own, key, key_path, issue)
    return Credentials(seen.identity, seen.not_after, certificate, key, authority)


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None


def _read_key(path: Path, remedy: str) -> bytes:
    key = _read(path, remedy)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise CertificateError(f"{path}: others may read this key; chmod 600 it, and issue a new one if they have")
    return key


def _check_pair(certificate: x509.Certificate, key: bytes, path: Path, remedy: str) -> None:
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateError(f"{path}: not a private key; {remedy}") from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    matches = private.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)
    if not isinstance(private, EllipticCurvePrivateKey) or not matches:
        raise CertificateError(f"{path}: not the key of its certificate; {remedy}")
