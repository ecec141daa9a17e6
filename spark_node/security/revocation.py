"""The revocation list: which generations of which identities are over. Signed by the authority, numbered, reloaded.

gRPC for Python takes no revocation list in its handshake. So servers look at every call, and clients ask for a host
name that no revoked certificate has: its generation is part of it (`Identity.target`).
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256

from spark_node.security.identity import REVOKED, CertificateError, Identity, Role

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""How often the file is looked at, at most."""


@dataclass(frozen=True)
class Revocations:
    """The last revoked generation by role and name; `number` rises with every list."""

    authority: str
    number: int = 0
    last: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def covers(self, identity: Identity) -> bool:
        return identity.generation <= self.last.get((identity.role.value, identity.name), 0)

    def valid_generation(self, role: Role, name: str) -> int:
        """The lowest generation of that name that is not revoked."""
        return self.last.get((role.value, name), 0) + 1

    def with_(self, identity: Identity) -> "Revocations":
        """The next list, on which this identity is."""
        last = {**self.last, (identity.role.value, identity.name): identity.generation}
        return Revocations(self.authority, self.number + 1, last)


def write(path: Path, revocations: Revocations, key: EllipticCurvePrivateKey) -> None:
    """Put the list in place of the one there, at once."""
    entries = [{"role": r, "name": n, "generation": g} for (r, n), g in sorted(revocations.last.items())]
    body = {"authority": revocations.authority, "number": revocations.number, "revoked": entries}
    signature = key.sign(_canonical(body), ECDSA(SHA256())).hex()
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps({**body, "signature": signature}, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def read(path: Path, authority: x509.Certificate) -> Revocations:
    """A list that this authority has signed; CertificateError where it is missing or another's."""
    remedy = "copy it anew from the authority's folder"
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        signature = bytes.fromhex(said.pop("signature"))
        public = authority.public_key()
        if not isinstance(public, EllipticCurvePublicKey):
            raise ValueError("no such key")
        public.verify(signature, _canonical(said), ECDSA(SHA256()))
        last = {(str(e["role"]), str(e["name"])): int(e["generation"]) for e in said["revoked"]}
        return Revocations(str(said["authority"]), int(said["number"]), last)
    except OSError as error:
        raise CertificateError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidSignature):
        raise CertificateError(f"{path}: not a list that the authority beside it has signed; {remedy}") from None


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


class LiveRevocations:
    """The list of a folder as it stands now. A newer one is taken up; an unsound or older one is not."""

    def __init__(self, folder: Path, authority: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._authority = folder / REVOKED, x509.load_pem_x509_certificate(authority)
        self._clock, self._looked = clock, clock()
        self._stamp = self._look()
        self._now = read(self._path, self._authority)

    def __call__(self) -> Revocations:
        """The list; the file is looked at once a second at most."""
        if self._clock() - self._looked >= _LOOK_SECONDS:
            self._looked = self._clock()
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
        return self._now

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _reload(self) -> None:
        try:
            found = read(self._path, self._authority)
        except CertificateError as error:
            log.error("the revocation list stays as it was: %s", error)
            return
        if found.number < self._now.number:
            log.error("the revocation list stays as it was: %s is older (%d)", self._path, found.number)
            return
        self._now = found
        log.info("revocation list %d: %d identities", found.number, len(found.last))
