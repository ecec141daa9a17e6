"""`python -m spark_node` is `spark-dfl`."""

import os
import sys

from spark_node.distributed.place import leave
from spark_node.memory import restart_without_thread_caches

_STAY = ("run", "host", "node", "orchestrator", "observe", "dashboard")
"""Commands whose processes serve or learn for hours."""


def command() -> int:
    """`spark-dfl` as a process of its own; its exit code. `cli.main.main` is the same within another's process."""
    if sys.argv[1:2] and sys.argv[1] in _STAY:
        restart_without_thread_caches()
    from spark_node.cli.main import main

    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        leave(code)
    return code


if __name__ == "__main__":
    raise SystemExit(command())
