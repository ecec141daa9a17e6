"""`python -m spark_node` is `spark-dfl`."""

import sys

from spark_node.memory import restart_without_thread_caches

_STAY = ("run", "host", "node", "orchestrator", "observe", "dashboard")
"""Commands whose processes serve or learn for hours."""


def command() -> int:
    """`spark-dfl` as a process of its own; its exit code. `cli.main.main` is the same within another's process."""
    if sys.argv[1:2] and sys.argv[1] in _STAY:
        restart_without_thread_caches()
    from spark_node.cli.main import main

    return main()


if __name__ == "__main__":
    raise SystemExit(command())
