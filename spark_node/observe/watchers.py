"""Several watchers of one run."""

from spark_node.observe.records import RoundRecord, RunInfo, Watcher


class Together:
    """Tells each watcher in turn; the first that fails stops the run."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def started(self, info: RunInfo) -> None:
        for watcher in self._watchers:
            watcher.started(info)

    def progress(self, round: int, done: int, total: int) -> None:
        for watcher in self._watchers:
            watcher.progress(round, done, total)

    def round_done(self, record: RoundRecord) -> None:
        for watcher in self._watchers:
            watcher.round_done(record)
