"""Where every peer of a run is, asked from a place that reaches them: `python -m spark_node.deploy.probe HOST:PORT`.

A deployment runs this inside the orchestrator's container, so that whoever deploys needs no way to the peers but the
engines. Standard library only; prints one line of JSON.
"""

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import ProxyHandler, build_opener

_SECONDS, _MOST_BYTES, _AT_ONCE = 5.0, 4 * 2**20, 32


def main(arguments: list[str]) -> int:
    """Ask the orchestrator for its members and each of them for its round."""
    print(json.dumps(look(arguments[0])))
    return 0


def look(address: str) -> dict[str, Any]:
    """{"started", "members", "rounds": {peer: round or None}} of the orchestrator with HTTP at `address`."""
    series = values(_get(f"http://{address}/metrics"))
    targets = json.loads(_get(f"http://{address}/sd"))
    peers = {str(target["labels"]["peer"]): str(target["targets"][0]) for target in targets}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rounds = dict(zip(peers, pool.map(_round, peers.values()), strict=True))
    members = int(series.get("spark_orchestrator_members", 0))
    return {"started": bool(series.get("spark_orchestrator_started", 0)), "members": members, "rounds": rounds}


def values(text: str) -> Mapping[str, float]:
    """The series of a page of metrics, by name, whatever their labels; the last of a name counts."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            found[name.partition("{")[0]] = float(value)
    return found


def _round(address: str) -> int | None:
    try:
        return int(values(_get(f"http://{address}/metrics")).get("spark_round", 0))
    except (OSError, ValueError):
        return None


def _get(url: str) -> str:
    with build_opener(ProxyHandler({})).open(url, timeout=_SECONDS) as reply:
        return str(reply.read(_MOST_BYTES).decode("utf-8", "replace"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
