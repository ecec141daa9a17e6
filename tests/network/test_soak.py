"""A minute of rounds: nothing in a peer may grow with them. benchmarks/soak.py does the same for two hours."""

from benchmarks import connections, soak

LIMITS = {
    "anonymous_MB": (2.0, 0.03), "malloc_MB": (1.0, 0.01), "python_blocks": (4000, 40),
    "descriptors": (2, 0.05), "threads": (3, 0.1), "connections": (2, 0.05),
}  # fmt: skip
"""What warming up may take, and what a round may add where that is more: a leak leaves one of a kind in each."""


def test_connections_leave_nothing_behind() -> None:
    """Neither end keeps anything of one that is closed, of its watch, or of a call that nobody waited for."""
    *_, third, last = connections.measure(400, thread_caches=False)
    for end in ("caller", "called"):  # a thread that gRPC starts counts once, a leak in every part
        assert min(third[f"{end}_blocks"], last[f"{end}_blocks"]) < 0.5, (third, last)
        assert min(third[f"{end}_bytes"], last[f"{end}_bytes"]) < 100, (third, last)


def test_rounds_leave_nothing_behind() -> None:
    rows = {row["what"]: row for row in soak.measure(1.0, 6, 0.0) if row["process"] == "peer"}
    rounds = rows["descriptors"]["rounds"]
    assert rounds >= 20
    for what, (warming_up, a_round) in LIMITS.items():
        assert rows[what]["growth"] < max(warming_up, a_round * rounds), (what, rows[what])
