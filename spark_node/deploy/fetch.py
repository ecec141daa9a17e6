"""Getting the run folder, and all logs, out of the containers and their volumes."""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from spark_node.deploy import bundle
from spark_node.deploy.engine import Engine
from spark_node.deploy.fleet import Fleet
from spark_node.deploy.plan import LOGS, OBSERVER, RUN, container_name
from spark_node.errors import UserError
from spark_node.observe.run_folder import read_run_id

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PATIENCE = 10
"""Times as long as another call: a run folder may be large."""
_LINES = 100_000
"""Last lines that are kept of what a container wrote."""


def fetch(fleet: Fleet, out: Path | None, say: Callable[[str], None]) -> Path | None:
    """The run folder with all logs in it, as `out` or runs/RUN_ID; None where there is none yet.

    A folder of the same run is replaced as a whole, another's is refused.
    """
    parent = (out.parent if out is not None else Path("runs")).resolve()
    parent.mkdir(parents=True, exist_ok=True)
    new = Path(mkdtemp(prefix=".fetching-", dir=parent))
    try:
        deployment = fleet.deployment
        volume, seconds = container_name(deployment, OBSERVER), deployment.seconds * _PATIENCE

        def take(engine: Engine) -> int | None:
            return engine.read(volume, RUN, lambda chunks: bundle.unpack(chunks, new))

        found = fleet.everywhere("fetching the run folder", take, seconds, [deployment.observer])
        if not found[deployment.observer]:
            return None
        run_id = _run_id(new)
        target = out if out is not None else Path("runs", run_id)
        _refuse_another(target, run_id)
        save_logs(fleet, new / "logs", say)
        new.chmod(0o755)
        bundle.replace_folder(new, target.resolve())
        return target
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.suppress(OSError):
            parent.rmdir()  # unless there is anything in it


def save_logs(fleet: Fleet, folder: Path, say: Callable[[str], None]) -> None:
    """What every container wrote as CONTAINER.log, and its peers' own logs in a folder CONTAINER.

    A host that is gone costs its logs, and nothing else.
    """

    def take(engine: Engine) -> None:
        for seen in engine.containers():
            text = "\n".join(engine.tail(seen.name, _LINES))
            if text:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{seen.name}.log").write_text(f"{text}\n", encoding="utf-8")
        for volume in engine.volumes():
            _take_logs(engine, volume, folder / volume)

    for host, problem in fleet.on(take, fleet.deployment.seconds * _PATIENCE).problems.items():
        say(f"{host}: its logs could not be fetched: {problem}")


def _take_logs(engine: Engine, volume: str, folder: Path) -> None:
    engine.read(volume, LOGS, lambda chunks: bundle.unpack(chunks, folder))
    with contextlib.suppress(OSError):
        folder.rmdir()  # unless there are any


def _run_id(folder: Path) -> str:
    run_id = read_run_id(folder)
    if not _RUN_ID.fullmatch(run_id):
        raise UserError(f"run id {run_id[:80]!r}: not one that an orchestrator gives; give --out")
    return run_id


def _refuse_another(target: Path, run_id: str) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    with contextlib.suppress(UserError):
        if read_run_id(target) == run_id:
            return
    raise UserError(f"--out {target}: is there already and is not run {run_id}; give another folder")
