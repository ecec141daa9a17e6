"""The certificates of a network that `run` starts: made in a process of their own, gone with the run."""

import os
from pathlib import Path

from spark_node.config import Config
from spark_node.errors import ConfigError
from spark_node.launch.host import fork
from spark_node.membership import peer_names
from spark_node.security.authority import forget_keys, make_run_folder

FOLDER = "certs"


def secured(config: Config, run_id: str, folder: Path) -> Config:
    """The configuration with a folder of certificates: the user's, or one in the run folder with a new authority.

    A child makes them, so that no process that peers are forked from ever had a key in its memory.
    """
    if config.security.tls == "off" or config.security.certs:
        return config
    if config.network.orchestrator:
        said = f"network.orchestrator = {config.network.orchestrator!r}: its run has certificates of its own"
        raise ConfigError(f"{said}; give them with --certs DIR, or leave the orchestrator to `run`")
    place = folder.resolve() / FOLDER
    peers, days = peer_names(config.run.nodes), config.security.days

    def work() -> int:
        make_run_folder(place, f"run-{run_id}", peers, days)
        return 0

    folder.mkdir(parents=True, exist_ok=True)
    _, status = os.waitpid(fork(work, "certificates"), 0)
    if status:
        raise ConfigError(f"{place}: no certificates could be made there; is the disk full?")
    return config.replace(security__certs=str(place))


def forget(config: Config, folder: Path) -> None:
    """The run is over: the keys that `secured` made are of no use to anybody but a thief."""
    place = folder.resolve() / FOLDER
    if config.security.certs == str(place):
        forget_keys(place)
