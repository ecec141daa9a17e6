"""Write requirements.lock: every package of the image to the version, as pip resolves pyproject.toml today."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HEAD = "# What the image is made of, to the version; `make docker-lock` writes it anew from pyproject.toml."


def main() -> None:
    report = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    what = ["-c", "constraints.txt", ".", "setuptools", "uv"]
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *report, *what]
    found = json.loads(subprocess.run(pip, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    packages = (item["metadata"] for item in found["install"] if item["metadata"]["name"] != "spark-dfl")
    lines = sorted(
        f"{package['name'].lower().replace('_', '-')}=={package['version'].partition('+')[0]}" for package in packages
    )
    (HERE / "requirements.lock").write_text("\n".join([HEAD, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
