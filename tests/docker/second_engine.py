"""A second Docker engine beside the first: its own data, sockets and certificates, and no network of its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.docker.engine import Engine, NoEngine

SECONDS = 90


@dataclass(frozen=True)
class SecondEngine:
    """Reached over a socket by the tests, and over TCP with TLS by what is tested."""

    local: Engine
    tcp: str
    folder: Path
    process: "subprocess.Popen[bytes]"

    def file(self, name: str) -> str:
        return str(self.folder / name)


@contextmanager
def second_engine(folder: Path) -> Iterator[SecondEngine]:
    """Started and ended here; NoEngine says why there is none."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise NoEngine("only root can start a second engine, with dockerd installed")
    make_certificates(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        tcp = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    local, log = f"unix://{folder / 'docker.sock'}", folder / "dockerd.log"
    command = ["dockerd", "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")]
    command += ["--pidfile", str(folder / "pid"), "--host", local, "--host", tcp, "--tlsverify"]
    for flag, name in (("--tlscacert", "ca.pem"), ("--tlscert", "server.pem"), ("--tlskey", "server.key")):
        command += [flag, str(folder / name)]
    command += ["--bridge=none", "--iptables=false", "--ip-masq=false"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        end = time.monotonic() + SECONDS
        while not Engine(local).answers():
            if process.poll() is not None or time.monotonic() > end:
                raise NoEngine(f"a second dockerd does not start: {log.read_text(errors='replace')[-300:]}")
            time.sleep(0.3)
        yield SecondEngine(Engine(local), tcp, folder, process)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        subprocess.run(["umount", str(folder / "exec" / "netns" / "default")], check=False, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def copy_image(image: str, source: Engine, target: Engine) -> None:
    """docker save | docker load."""
    there = {**os.environ, **({"DOCKER_HOST": target.address} if target.address else {})}
    here = {**os.environ, **({"DOCKER_HOST": source.address} if source.address else {})}
    with subprocess.Popen(["docker", "save", image], env=here, stdout=subprocess.PIPE) as saving:
        subprocess.run(["docker", "load"], env=there, stdin=saving.stdout, check=True, capture_output=True)


def make_certificates(folder: Path) -> None:
    """An authority, and what the engine and its client show each other."""
    key = ec.generate_private_key(ec.SECP256R1())
    root = _certificate("engines", key, "engines", key, authority=True)
    _write(folder, "ca", root, key)
    for name in ("server", "client"):
        own = ec.generate_private_key(ec.SECP256R1())
        _write(folder, name, _certificate(name, own, "engines", key, authority=False), own)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, by: ec.EllipticCurvePrivateKey, authority: bool
) -> x509.Certificate:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
        issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - timedelta(minutes=5),
        not_valid_after=now + timedelta(days=1),
    )
    made = made.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    return made.sign(by, SHA256())


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = folder / f"{name}.key"
    path.touch(mode=0o600)
    path.write_bytes(private)
