"""Connections of a run: mutual TLS by identity, or plaintext where a user asked for that on the loopback.

Both listen, make channels and say who calls. Nothing falls back from the one to the other.
"""

import hmac
import logging
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc import aio

from spark_node.config import SecuritySettings
from spark_node.security.identity import CertificateError, Identity, Role, load, read_certificate, target
from spark_node.security.revocation import LiveRevocations

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, Any]]
ORCHESTRATOR, OBSERVER = "orchestrator", "observer"
"""The names of the two that a run has one of."""
TOKEN = "spark-token"
_REMEMBERED = 4
"""Connections of one identity that were seen to call, so that each counts once: a peer has one, observers a few."""


class NotAllowed(Exception):
    """A caller that may not do what it asks; the reason is one that metrics count."""

    def __init__(self, reason: str, detail: str, over: Identity | None = None) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail
        self.over = over
        """The identity of the caller, where its certificate has expired or is revoked."""


class Security(Protocol):
    """How a process listens, connects, and knows its callers."""

    connections: int
    """Connections that were made to this process so far, with or without success."""
    authenticated: int
    """Those of them on which a holder of a certificate of this run has called."""

    def listen(self, server: aio.Server, address: str) -> int:
        """Open a port; 0 or RuntimeError where it cannot be had."""

    def channel(self, address: str, role: Role, name: str, options: Options) -> aio.Channel:
        """A connection to that very identity, whoever listens at the address."""

    def expected(self, role: Role, name: str) -> str:
        """As whom the other end of such a channel must show itself; a channel made for another is of no use."""

    def caller(self, context: Any, roles: Collection[Role]) -> Identity | None:
        """Who calls, if one of these roles; None where identities are not known. NotAllowed otherwise."""

    def joins(self, context: Any, roles: Collection[Role]) -> Identity | None:
        """The same for calls to the orchestrator: without certificates, the run's token counts, if it has one."""


class Plaintext:
    """No encryption, no identities: for the loopback of a machine whose users trust each other."""

    def __init__(self, token: str = "") -> None:
        self._token = token
        self.connections = self.authenticated = 0

    def listen(self, server: aio.Server, address: str) -> int:
        return int(server.add_insecure_port(address))

    def channel(self, address: str, role: Role, name: str, options: Options) -> aio.Channel:
        return aio.insecure_channel(address, options=list(options), interceptors=self._interceptors(role))

    def expected(self, role: Role, name: str) -> str:
        return ""

    def caller(self, context: Any, roles: Collection[Role]) -> Identity | None:
        return None

    def joins(self, context: Any, roles: Collection[Role]) -> Identity | None:
        shown = "".join(value for key, value in context.invocation_metadata() or () if key == TOKEN)
        if self._token and not hmac.compare_digest(shown.encode(), self._token.encode()):
            raise NotAllowed(
                "unauthenticated", "not the token of this run; set security.token as its orchestrator has it"
            )
        return None

    def _interceptors(self, role: Role) -> list[Any]:
        return [_ShowToken(self._token)] if self._token and role is Role.ORCHESTRATOR else []


class _ShowToken(aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Adds the run's token to every call."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = aio.Metadata(*(details.metadata or ()), (TOKEN, self._token))
        return await continuation(details._replace(metadata=metadata), request)


class MutualTls:
    """Both sides show a certificate of the run's authority. The client asks for an identity, the server sees one."""

    def __init__(self, folder: Path, role: Role, name: str) -> None:
        self._own = own = load(folder, role, name)
        self._revocations = LiveRevocations(folder, own.authority)
        if self._revocations().covers(own.identity):
            issue = f"spark-dfl certs issue {folder} --role {role.value} {name}"
            raise CertificateError(f"{role.value} {name}: this certificate is revoked; get a new one: {issue}")
        self._client = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        self._known: dict[tuple[Role, str], tuple[str, ...]] = {}
        self.connections = self.authenticated = 0

    def listen(self, server: aio.Server, address: str) -> int:
        pairs = [(self._own.key, self._own.certificate)]
        served = grpc.ssl_server_certificate_configuration(pairs, self._own.authority)
        server_side = grpc.dynamic_ssl_server_credentials(served, self._connected, require_client_authentication=True)
        return int(server.add_secure_port(address, server_side))

    def _connected(self) -> None:
        """gRPC asks before every handshake whether the certificate has changed: a count of connections."""
        self.connections += 1

    def channel(self, address: str, role: Role, name: str, options: Options) -> aio.Channel:
        asked = ("grpc.ssl_target_name_override", self.expected(role, name))
        return aio.secure_channel(address, self._client, options=[*options, asked])

    def expected(self, role: Role, name: str) -> str:
        return target(role, name, self._revocations().valid_generation(role, name))

    def caller(self, context: Any, roles: Collection[Role]) -> Identity | None:
        shown = context.auth_context().get("x509_pem_cert", ())
        try:
            seen = read_certificate(next(iter(shown)))
        except (StopIteration, ValueError):
            raise NotAllowed("unauthenticated", "no identity in the certificate") from None
        identity = seen.identity
        if seen.not_after <= datetime.now(UTC):
            raise NotAllowed("expired", f"the certificate of {identity.name} has expired", identity)
        if self._revocations().covers(identity):
            raise NotAllowed("revoked", f"the certificate of {identity.name} is revoked", identity)
        if identity.authority != self._own.identity.authority:
            raise NotAllowed("unauthenticated", "a certificate of another authority")
        self._note(identity, context.peer())
        if identity.role not in roles:
            allowed = " or ".join(role.value for role in roles)
            raise NotAllowed("wrong_role", f"{identity.name} is {identity.role.value}; this is for {allowed}")
        return identity

    joins = caller

    def _note(self, identity: Identity, connection: str) -> None:
        """Count a connection when it first calls; what is kept for that is bounded by who there is, not by time."""
        key = identity.role, identity.name
        known = self._known.get(key, ())
        if connection not in known:
            self.authenticated += 1
            self._known[key] = (connection, *known)[:_REMEMBERED]


def trouble_with(error: aio.AioRpcError) -> str:
    """What a failed handshake means and what to do; empty where it was none, and waiting may help."""
    said = error.details() or ""
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return "its certificate is not of our authority, or has expired; give both sides certificates of one authority"
    if "Hostname Verification" in said:
        return "the certificate there is another's or revoked; check the address and the revocation list"
    if "WRONG_VERSION_NUMBER" in said:
        return "it speaks no TLS; start it with --certs DIR"
    return ""


def security_of(settings: SecuritySettings, role: Role, name: str) -> Security:
    """What the settings ask for; CertificateError where a certificate is asked for and cannot be used."""
    if settings.tls == "off":
        return Plaintext(settings.token)
    return MutualTls(require_folder(settings), role, name)


def require_folder(settings: SecuritySettings) -> Path:
    """The folder of certificates, without which there is no TLS, and without TLS nothing."""
    if not settings.certs:
        without = "or, on one machine only, without encryption: --set security.tls=off"
        raise CertificateError(f"security.certs = '': give --certs DIR (spark-dfl certs makes one), {without}")
    return Path(settings.certs)
