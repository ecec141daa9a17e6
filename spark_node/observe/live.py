"""A run as it stands: what the live page shows. Fed by the observer, read as JSON; it sends nothing by itself."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_node.config import Config, TopologySettings
from spark_node.generated.spark.v1 import orchestrator_pb2, peer_pb2
from spark_node.membership import Roster, peer_names
from spark_node.observe import wording
from spark_node.observe.history import Round, finite
from spark_node.observe.records import RoundRecord, RunInfo

_MOST_EVENTS = 200
_NAMED = 3
"""Peers that an event names; of more it says how many."""
_ROUNDS_KEPT = 4
"""Rounds whose edges are kept: the one that is shown, and those that faster peers are in already."""


@dataclass
class _Peer:
    """What is known of one peer."""

    name: str
    state: str = "expected"
    round: int = 0
    used: int = 0
    expected: int = 0
    refused: int = 0
    accuracy: float | None = None
    loss: float | None = None
    sent: int = 0
    sent_in_round: int = 0
    seconds: float | None = None
    restarts: int = 0
    control: int = 0
    reported: int = 0

    def row(self) -> list[Any]:
        """In the order of `COLUMNS`."""
        return [getattr(self, name) for name in COLUMNS]


COLUMNS = (
    "name", "state", "round", "used", "expected", "refused",
    "accuracy", "loss", "sent", "sent_in_round", "seconds", "restarts",
)  # fmt: skip


@dataclass
class _Event:
    """Something that went wrong, or right again; the same thing of several peers in one round is one event."""

    id: int
    time: float
    kind: str
    round: int
    text: Callable[["_Event"], str]
    peers: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        said = self.text(self)
        return {"id": self.id, "time": round(self.time, 1), "kind": self.kind, "round": self.round, "text": said}

    @property
    def who(self) -> str:
        named = ", ".join(self.peers[:_NAMED])
        more = len(self.peers) - _NAMED
        return f"{named} and {more} more" if more > 0 else named


class Live:
    """A watcher that keeps the newest of everything. `changed()` waits for news; `rounds` only grows."""

    def __init__(self, config: Config, info: RunInfo, recorded: Sequence[Round] = ()) -> None:
        self.config, self._info = config, info
        self.rounds: list[dict[str, Any]] = [_row(finished) for finished in recorded]
        self._run, self._began = "", time.time()
        self._status = "waiting"
        self._now = (self.rounds[-1]["round"] if self.rounds else 0, 0, info.peers)
        self._peers: dict[str, _Peer] = {}
        self._index: dict[str, int] = {}
        self._roster: Roster | None = None
        self._edges: dict[int, dict[tuple[int, int], int]] = {}
        self._told: dict[int, set[str]] = {}
        self._events: deque[_Event] = deque(maxlen=_MOST_EVENTS)
        self._numbered = 0
        self._orchestrator_away = False
        self._news = asyncio.Event()
        self.version = 0
        for name in peer_names(info.peers):
            self._peer(name)

    # As a watcher.

    def started(self, info: RunInfo) -> None:
        """Known already."""

    def progress(self, round: int, done: int, total: int) -> None:
        self._status = "training"
        self._now = (round, done, total)
        self._touch()

    def round_done(self, record: RoundRecord) -> None:
        finished = Round.of(record)
        self.rounds.append(_row(finished))
        self._now = (record.round + 1, 0, self._now[2])
        for k in [k for k in self._edges if k < record.round]:
            del self._edges[k]
        if self.config.run.ends_with(record.aggregated_accuracy) or record.round == self.config.run.rounds:
            self._status = "complete"
        self._touch()

    # From the observer.

    def scored(self, accuracy: Mapping[str, float]) -> None:
        """How well these peers' own models do."""
        for name, value in accuracy.items():
            self._peer(name).accuracy = finite(value)

    def described(self, run: "orchestrator_pb2.RunDescription", members: "orchestrator_pb2.Members") -> None:
        """What the orchestrator said."""
        if self._orchestrator_away:
            self._orchestrator_away = False
            self._say("back", "the orchestrator is back")
        self._run = run.run
        if not run.started or not members.version:
            return
        if self._roster is None:
            topology = TopologySettings(kind=run.topology, degree=run.degree, fresh=run.fresh)
            self._roster = Roster(run.seed, topology)
        self._roster.add(members.version, members.from_round, {m.name: m.address for m in members.members})
        for member in members.members:
            peer = self._peer(member.name)
            if peer.state == "gone":
                peer.state = "expected"
                self._gather("back", self._now[0], member.name, lambda event: f"{event.who} joined again")
        self._touch()

    def orchestrator_lost(self) -> None:
        if not self._orchestrator_away:
            self._orchestrator_away = True
            self._say("lost", "the orchestrator does not answer; training goes on without it")

    def left(self, names: Iterable[str]) -> None:
        """These are no longer members."""
        for name in names:
            peer = self._peer(name)
            if peer.state == "finished":
                continue
            peer.state = "gone"
            self._gather("lost", peer.round, name, lambda event: f"{event.who} left the run or did not renew its place")

    def line_lost(self, name: str) -> None:
        """A peer's stream broke off."""
        peer = self._peer(name)
        if peer.state not in ("finished", "gone", "lost"):
            peer.state = "lost"
            self._gather("lost", peer.round, name, lambda event: f"no line to {event.who}")

    def heard(self, progress: "peer_pb2.Progress") -> None:
        """What a peer told of itself."""
        peer = self._peer(progress.name)
        if peer.control > progress.control_bytes:  # its counters began anew
            peer.restarts += 1
            self._gather("restarted", progress.round, peer.name, lambda event: f"{event.who} started again")
        elif peer.state == "lost":
            self._gather("back", progress.round, peer.name, lambda event: f"{event.who} can be reached again")
        peer.state, peer.round, peer.control = progress.state, progress.round, progress.control_bytes
        for report in progress.rounds:
            self._report(peer, report)
        self._touch()

    def over(self, status: str = "") -> None:
        """Nothing more will come."""
        if self._status != "complete":
            self._status = status or "stopped"
        self._touch()

    def _report(self, peer: _Peer, report: "peer_pb2.RoundReport") -> None:
        k = report.round
        if k <= peer.reported:
            return
        peer.reported = k
        peer.used, peer.expected, peer.seconds = report.used, report.expected, report.seconds
        peer.loss = finite(report.facts["loss"]) if "loss" in report.facts else None
        peer.sent_in_round = sum(edge.sent for edge in report.bytes)
        peer.sent += peer.sent_in_round
        self._told.setdefault(k, set()).add(peer.name)
        for old in [old for old in self._told if old <= k - 4 * _ROUNDS_KEPT]:
            del self._told[old]
        if k >= self._shown_round:
            edges = self._edges.setdefault(k, {})
            for edge in report.bytes:
                pair = self._pair(peer.name, edge.peer)
                edges[pair] = edges.get(pair, 0) + edge.sent
        missing = report.expected - report.used
        if missing > 0:
            event = self._gather("left out", k, peer.name, _left_out)
            event.counts["neighbours"] += missing
        refused = sum(report.refused.values())
        if refused:
            peer.refused += refused
            event = self._gather("refused", k, peer.name, _refused)
            event.counts.update(dict(report.refused))

    # For readers.

    def head(self) -> dict[str, Any]:
        """What does not change."""
        config, info = self.config, self._info
        return {
            "title": f"{wording.algorithm(config)} on {config.data.dataset}",
            "partition": config.data.partition,
            "network": wording.network(config, info.peers),
            "model": wording.model(config, info.parameters),
            "seed": config.run.seed,
            "rounds_planned": config.run.rounds,
            "target": config.run.target_accuracy,
            "columns": COLUMNS,
        }

    def state(self) -> dict[str, Any]:
        """What does."""
        shown = self._shown_round
        k, done, total = self._now
        return {
            "run": self._run,
            "status": self._status,
            "began": round(self._began, 1),
            "time": round(time.time(), 2),
            "round": {"number": min(k, self.config.run.rounds), "done": done, "total": total},
            "peers": [peer.row() for peer in self._peers.values()],
            "graph": {"round": shown, "edges": self._graph(shown)},
            "events": [event.to_json() for event in self._events],
        }

    async def changed(self, since: int) -> int:
        """Wait until there is something newer than version `since`; the version there is."""
        while self.version == since:
            await self._news.wait()
        return self.version

    @property
    def _shown_round(self) -> int:
        """The last finished round; before there is one, the one under way."""
        return int(self.rounds[-1]["round"]) if self.rounds else max(self._now[0], 1)

    def _graph(self, k: int) -> list[tuple[int, int, int]]:
        """Edges as (peer, peer, bytes both ways); those of the round's graph over which nothing went have none."""
        edges = dict(self._edges.get(k, {}))
        if self._roster is not None:
            for name in self._roster.members(k):
                for other in self._roster.neighbours(name, k):
                    edges.setdefault(self._pair(name, other), 0)
        return [(i, j, sent) for (i, j), sent in edges.items()]

    def _pair(self, a: str, b: str) -> tuple[int, int]:
        self._peer(a), self._peer(b)
        i, j = self._index[a], self._index[b]
        return (i, j) if i < j else (j, i)

    def _peer(self, name: str) -> _Peer:
        if name not in self._peers:
            self._index[name] = len(self._peers)
            self._peers[name] = _Peer(name)
        return self._peers[name]

    def _gather(self, kind: str, k: int, name: str, text: Callable[[_Event], str]) -> _Event:
        """The event of this kind and round, which now has this peer as well."""
        recent = list(self._events)[-20:]
        event = next((e for e in recent if e.kind == kind and e.round == k and e.peers), None)
        if event is None:
            event = self._new(kind, k, text)
        if name not in event.peers:
            event.peers.append(name)
        self._touch()
        return event

    def _say(self, kind: str, text: str) -> None:
        self._new(kind, self._now[0], lambda _: text)
        self._touch()

    def _new(self, kind: str, k: int, text: Callable[[_Event], str]) -> _Event:
        self._numbered += 1
        self._events.append(_Event(self._numbered, time.time(), kind, k, text))
        return self._events[-1]

    def _touch(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()


def _left_out(event: _Event) -> str:
    return f"{wording.plural(event.counts['neighbours'], 'neighbour')} left out by {event.who}"


def _refused(event: _Event) -> str:
    reasons = ", ".join(f"{reason.replace('_', ' ')} {count}" for reason, count in event.counts.most_common())
    return f"{wording.plural(sum(event.counts.values()), 'message')} refused by {event.who}: {reasons}"


def _row(finished: Round) -> dict[str, Any]:
    row = finished.to_row()
    stages: Mapping[str, float] = finished.stages
    return {
        "round": row["round"],
        "accuracy": row["aggregated_accuracy"],
        "clients": row["client_accuracy_mean"],
        "spread": [row["client_accuracy"]["min"], row["client_accuracy"]["max"]],
        "bytes": row["bytes_sent"],
        "seconds": row["seconds"].get("round"),
        "evaluation": row["seconds"].get("evaluation"),
        "stages": {stage: finite(seconds) for stage, seconds in stages.items()},
        "neighbours": row["neighbours"],
        "loss": row["loss"],
    }
