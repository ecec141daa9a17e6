"""The graph of a round: what each kind promises, that all peers derive the same one, and what is refused."""

import hashlib
import subprocess
import sys
import time
from collections import Counter
from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from spark_node.config import TOPOLOGIES, load, presets
from spark_node.errors import ConfigError
from spark_node.topology import Graph, check, graph

seeds = st.integers(0, 2**63 - 1)
rounds = st.integers(0, 1_000_000)
every_kind = pytest.mark.parametrize("kind", TOPOLOGIES)


@st.composite
def sizes(draw: st.DrawFn, kind: str, most: int = 60) -> tuple[int, int]:
    """Nodes and a degree that `check` is expected to allow."""
    nodes = draw(st.integers(3 if kind == "ring" else 2, most))
    if kind in ("ring", "line"):
        return nodes, draw(st.integers(1, 99_999))
    low = 1 if kind == "cluster" or nodes == 2 else 2
    degree = draw(st.integers(low, nodes - 1))
    if kind == "regular" and nodes % 2:
        degree -= degree % 2
    return nodes, degree


def as_networkx(drawn: Graph[int]) -> nx.Graph:
    """The drawn graph, checked for what holds for every kind: simple, loopless, symmetric, in order."""
    result = nx.Graph()
    result.add_nodes_from(drawn.members)
    result.add_edges_from((drawn.members[i], drawn.members[j]) for i, j in drawn.edges)
    assert result.number_of_edges() == len(drawn.edges)
    assert all(i < j for i, j in drawn.edges)
    assert list(drawn.edges) == sorted(drawn.edges)
    for member in drawn.members:
        assert drawn.neighbours(member) == tuple(m for m in drawn.members if m in result[member])
    return result


def degrees(drawn: nx.Graph) -> list[int]:
    return sorted(degree for _, degree in drawn.degree())


# What each kind promises


@given(sizes("regular"), seeds, rounds)
@effort(max_examples=150, deadline=None)
def test_regular_gives_every_peer_the_degree_and_is_connected(size: tuple[int, int], seed: int, round: int) -> None:
    nodes, degree = size
    drawn = as_networkx(graph("regular", range(nodes), degree, seed, round))
    assert degrees(drawn) == [degree] * nodes
    assert nx.is_connected(drawn)


@pytest.mark.parametrize(("nodes", "degree"), [(300, 3), (300, 149), (300, 150), (300, 298), (300, 299), (301, 150)])
def test_regular_holds_at_both_ends_and_in_the_middle(nodes: int, degree: int) -> None:
    drawn = as_networkx(graph("regular", range(nodes), degree, 0, 1))
    assert degrees(drawn) == [degree] * nodes
    assert nx.is_connected(drawn)


@given(sizes("cluster"), seeds, rounds)
@effort(max_examples=100, deadline=None)
def test_cluster_divides_the_peers_into_complete_groups_of_even_size(
    size: tuple[int, int], seed: int, round: int
) -> None:
    nodes, degree = size
    drawn = as_networkx(graph("cluster", range(nodes), degree, seed, round))
    groups = [drawn.subgraph(group) for group in nx.connected_components(drawn)]
    assert all(nx.density(group) == 1 for group in groups)
    smallest, largest = min(map(len, groups)), max(map(len, groups))
    assert largest - smallest <= 1
    assert smallest >= 2
    if nodes % (degree + 1) == 0:
        assert smallest == largest == degree + 1
    assert 2 * (degree + 1) / 3 - 1 < smallest <= largest < 3 * (degree + 1) / 2 + 1


@given(sizes("erdos-renyi"), seeds, rounds)
@effort(max_examples=100, deadline=None)
def test_erdos_renyi_is_connected(size: tuple[int, int], seed: int, round: int) -> None:
    nodes, degree = size
    drawn = as_networkx(graph("erdos-renyi", range(nodes), degree, seed, round))
    assert nx.is_connected(drawn)
    if degree == nodes - 1:
        assert nx.density(drawn) == 1


@pytest.mark.parametrize(("nodes", "degree"), [(200, 8), (60, 30), (50, 48)])
def test_erdos_renyi_has_the_degree_in_the_mean_and_spreads_like_a_binomial(nodes: int, degree: int) -> None:
    chance = degree / (nodes - 1)
    counts = [len(graph("erdos-renyi", range(nodes), degree, 0, round).edges) for round in range(100)]
    pairs = nodes * (nodes - 1) / 2
    variance = pairs * chance * (1 - chance)
    mean = sum(counts) / len(counts)
    assert abs(mean - pairs * chance) < 5 * (variance / len(counts)) ** 0.5
    assert 0.6 < sum((count - mean) ** 2 for count in counts) / len(counts) / variance < 1.6


def test_erdos_renyi_adds_no_more_edges_than_joining_the_components_takes() -> None:
    drawn = [graph("erdos-renyi", range(400), 2, 0, round) for round in range(20)]
    mean = sum(2 * len(one.edges) / 400 for one in drawn) / len(drawn)
    assert 2.2 < mean < 2.5  # G(n, p) of mean degree 2 has about 0.16 n components: 2 + 2 * 0.16


@given(sizes("ring"), seeds, rounds)
@effort(max_examples=50, deadline=None)
def test_ring_is_one_cycle(size: tuple[int, int], seed: int, round: int) -> None:
    nodes, degree = size
    drawn = as_networkx(graph("ring", range(nodes), degree, seed, round))
    assert degrees(drawn) == [2] * nodes
    assert nx.is_connected(drawn)


@given(sizes("line"), seeds, rounds)
@effort(max_examples=50, deadline=None)
def test_line_is_one_path(size: tuple[int, int], seed: int, round: int) -> None:
    nodes, degree = size
    drawn = as_networkx(graph("line", range(nodes), degree, seed, round))
    assert degrees(drawn) == [1, 1] + [2] * (nodes - 2)
    assert nx.is_connected(drawn)


@every_kind
def test_a_peer_alone_has_no_neighbours(kind: str) -> None:
    drawn = graph(kind, ["only"], 5, 0, 1)
    assert drawn.edges == ()
    assert drawn.neighbours("only") == ()


# Everyone derives the same graph, and the next round another


@every_kind
@given(data=st.data(), seed=seeds, round=rounds, fresh=st.booleans())
@effort(max_examples=20, deadline=None)
def test_same_arguments_give_the_same_graph(kind: str, data: st.DataObject, seed: int, round: int, fresh: bool) -> None:
    nodes, degree = data.draw(sizes(kind))
    drawn = [graph(kind, range(nodes), degree, seed, round, fresh) for _ in range(2)]
    assert drawn[0] == drawn[1]


@every_kind
def test_fresh_rounds_and_other_seeds_have_graphs_of_their_own(kind: str) -> None:
    drawn = {graph(kind, range(30), 4, seed, round).edges for seed in range(5) for round in range(20)}
    assert len(drawn) == 100


@every_kind
def test_without_fresh_all_rounds_share_the_graph_of_round_0(kind: str) -> None:
    drawn = {graph(kind, range(30), 4, 7, round, fresh=False).edges for round in range(20)}
    assert drawn == {graph(kind, range(30), 4, 7, 0).edges}


@every_kind
def test_members_matter_only_through_their_order(kind: str) -> None:
    names = tuple(f"peer-{i:02}" for i in range(20))
    named, numbered = graph(kind, names, 4, 3, 5), graph(kind, range(20), 4, 3, 5)
    assert named.edges == numbered.edges
    for i, name in enumerate(names):
        assert named.neighbours(name) == tuple(names[j] for j in numbered.neighbours(i))


@pytest.mark.parametrize(
    ("kind", "nodes", "degree", "digest"),
    [
        ("regular", 300, 5, "4befb4ff6e74e7cc"),
        ("regular", 20, 2, "4dccc9442dcf26ae"),
        ("regular", 20, 9, "956a6bd9a8153e97"),
        ("regular", 20, 16, "b21a4bb65510b914"),
        ("cluster", 300, 5, "eeb0f6d4f1fcd6a3"),
        ("cluster", 20, 5, "3e4f88e26c8214ff"),
        ("erdos-renyi", 300, 5, "684a1c8036574bc6"),
        ("erdos-renyi", 300, 2, "cb1a1eef5a3a2fc4"),
        ("erdos-renyi", 2000, 5, "62bb4d028faebc9f"),
        ("ring", 300, 2, "63e840b53612e419"),
        ("line", 300, 2, "384b32dd7e6f8609"),
    ],
)
def test_the_sampling_is_pinned(kind: str, nodes: int, degree: int, digest: str) -> None:
    """Peers of two releases must agree on the graph: a change here is a change of the protocol."""
    edges = graph(kind, range(nodes), degree, seed=2024, round=7).edges
    assert hashlib.sha256(repr(edges).encode()).hexdigest()[:16] == digest


def test_a_small_graph_is_pinned_edge_by_edge() -> None:
    drawn = graph("regular", "abcdefgh", 3, seed=1, round=1)
    assert " ".join(drawn.members[i] + drawn.members[j] for i, j in drawn.edges) == (
        "ac ad ah bd bf bg cd ce ef eg fh gh"
    )


def test_a_stranger_and_a_double_member_are_errors() -> None:
    with pytest.raises(KeyError):
        graph("ring", "abc", 2, 0, 0).neighbours("d")
    with pytest.raises(ValueError, match="twice"):
        graph("ring", "abca", 2, 0, 0)


# Over many rounds everyone meets everyone


@pytest.mark.parametrize(
    ("kind", "nodes", "degree"),
    [
        ("regular", 12, 2),
        ("regular", 12, 3),
        ("regular", 13, 6),
        ("regular", 12, 8),
        ("cluster", 12, 3),
        ("cluster", 13, 3),
        ("erdos-renyi", 12, 2),
        ("erdos-renyi", 12, 6),
        ("ring", 12, 2),
        ("line", 12, 2),
    ],
)
def test_every_pair_meets_about_equally_often(kind: str, nodes: int, degree: int) -> None:
    drawn = [graph(kind, range(nodes), degree, 0, round).edges for round in range(400)]
    met = Counter(edge for edges in drawn for edge in edges)
    pairs = list(combinations(range(nodes), 2))
    expected = sum(met.values()) / len(pairs)
    deviation = sum((met[pair] - expected) ** 2 / expected for pair in pairs)
    assert deviation < 1.6 * len(pairs)  # the mean is at most len(pairs), the spread about its root


def test_regular_draws_all_graphs_about_equally_often() -> None:
    """Of the 70 graphs of degree 3 on 6 nodes, 10 are bipartite."""
    drawn = [graph("regular", range(6), 3, 0, round).edges for round in range(600)]
    bipartite = sum(nx.is_bipartite(nx.Graph(edges)) for edges in drawn) / len(drawn)
    assert abs(bipartite - 10 / 70) < 0.05


# What is refused

GIVEN = "topology.degree = {degree} with {nodes} peers, kind {kind}"
TOO_FEW = f"{GIVEN}: every peer needs a neighbour"
TOO_MANY = f"{GIVEN}: there are fewer other peers"
UNCONNECTED = f"{GIVEN}: one neighbour each leaves the peers unconnected (kind cluster can pair them anew each round)"
ODD = f"{GIVEN}: an odd number of peers cannot each have an odd number of neighbours"


@every_kind
@given(data=st.data())
@effort(max_examples=50, deadline=None)
def test_what_has_a_graph_is_allowed(kind: str, data: st.DataObject) -> None:
    nodes, degree = data.draw(sizes(kind, most=100_000))
    check(kind, nodes, degree)


@pytest.mark.parametrize(
    ("kind", "nodes", "degree", "message"),
    [
        ("star", 5, 2, "topology.kind = 'star': allowed: regular, cluster, erdos-renyi, ring, line"),
        ("regular", 0, 2, "run.nodes = 0: allowed: at least 1"),
        ("ring", 2, 2, "topology.kind = 'ring' with 2 peers: allowed: line, or at least 3 peers"),
        ("regular", 20, 0, f"{TOO_FEW}; allowed: from 2 to 19"),
        ("regular", 20, 1, f"{UNCONNECTED}; allowed: from 2 to 19"),
        ("regular", 20, 20, f"{TOO_MANY}; allowed: from 2 to 19"),
        ("regular", 5, 5, f"{TOO_MANY}; allowed: an even number from 2 to 4"),
        ("regular", 21, 5, f"{ODD}; allowed: an even number from 2 to 20"),
        ("regular", 3, 1, f"{UNCONNECTED}; allowed: 2"),
        ("regular", 2, 2, f"{TOO_MANY}; allowed: 1"),
        ("cluster", 4, 4, f"{TOO_MANY}; allowed: from 1 to 3"),
        ("erdos-renyi", 9, 1, f"{UNCONNECTED}; allowed: from 2 to 8"),
        ("erdos-renyi", 9, 9, f"{TOO_MANY}; allowed: from 2 to 8"),
    ],
)
def test_what_has_no_graph_is_refused_in_one_line(kind: str, nodes: int, degree: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(kind, nodes, degree)
    assert str(caught.value) == message.format(kind=kind, nodes=nodes, degree=degree)
    with pytest.raises(ConfigError):
        graph(kind, range(nodes), degree, 0, 0)


@pytest.mark.parametrize("preset", [None, *presets()])
def test_defaults_and_presets_have_a_graph(preset: str | None) -> None:
    loaded = load(preset=preset, environment={})
    check(loaded.topology.kind, loaded.run.nodes, loaded.topology.degree)


# Cost


@pytest.mark.parametrize(("nodes", "seconds"), [(300, 0.020), (5000, 1.0)])
def test_a_regular_graph_is_cheap(nodes: int, seconds: float) -> None:
    spent = []
    for round in range(5):
        start = time.process_time()
        graph("regular", range(nodes), 5, 0, round).neighbours(0)
        spent.append(time.process_time() - start)
    assert min(spent) < seconds


def test_torch_is_not_imported() -> None:
    code = "import spark_node.topology, sys; sys.exit('torch' in sys.modules or 'networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
