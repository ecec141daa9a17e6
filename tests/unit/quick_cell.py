"""Stands in for `spark-dfl run` in tests of comparisons: the run folder without the training.

STAND_IN says what happens to a seed: `fail:1` or `hang:1`; every start is noted in STAND_IN_LOG.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from spark_node import config as configuration
from tests.unit.fabricated import INFO, record
from tests.unit.fabricated import write_run as write_run


def main() -> int:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    config, out = configuration.load(file=Path(given["--config"]), environment={}), Path(given["--out"])
    with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
        log.write(json.dumps({"out": out.name, "workers": config.run.workers, "pid": os.getpid()}) + "\n")
    what, _, seed = os.environ.get("STAND_IN", "").partition(":")
    if what and int(seed) == config.run.seed:
        if what == "fail":
            print("spark-dfl: error: the run failed: out of luck; see error.log", file=sys.stderr)
            return 1
        _hang(config, out)
    base = 0.6 if config.run.algorithm == "spark" else 0.5
    rise = (base + 0.1 * r + 0.001 * config.run.seed for r in range(config.run.rounds))
    write_run(out, config, accuracies=tuple(rise))
    return 0


def _hang(config: configuration.Config, out: Path) -> None:
    """One round, then nothing until it is interrupted; what there is gets written then, as a real run does."""
    from spark_node.observe.run_folder import RunFolder

    folder = RunFolder(out, config)
    folder.started(INFO)
    folder.round_done(record(1, 0.42))
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        time.sleep(60)
    except KeyboardInterrupt:
        folder.finish("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    sys.exit(main())
