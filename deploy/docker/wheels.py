"""Fill deploy/docker/wheels with the wheels of requirements.lock, for images that are built without an index."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK, WHEELS = HERE / "requirements.lock", HERE / "wheels"
COMPLETE = WHEELS / ".complete"
"""A copy of the lock file whose wheels are all there."""


def main() -> None:
    if COMPLETE.exists() and COMPLETE.read_bytes() == LOCK.read_bytes():
        return
    COMPLETE.unlink(missing_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    of_image = ["--only-binary", ":all:", "--python-version", "3.11", "--no-deps"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *of_image]
    subprocess.run([*pip, "-d", str(WHEELS), "-r", str(LOCK)], check=True)
    COMPLETE.write_bytes(LOCK.read_bytes())


if __name__ == "__main__":
    main()
