"""One typed configuration. Layers, weakest first: defaults (of the algorithm), preset, file, environment, flags.

Every setting is a field with a type, a range and a line of help; every layer is checked the same way, and a
mistake is one line that names the key, the value, where it came from and what is allowed.
"""

import dataclasses
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from spark_node.errors import ConfigError

ALGORITHMS = ("spark", "ntk-dfl", "dpsgd", "dfedavg", "dfedavgm", "dfedsam")
DATASETS = ("digits", "fashion-mnist", "mnist", "mnist-writers", "femnist", "cifar10")
TOPOLOGIES = ("regular", "cluster", "erdos-renyi", "ring", "line")

Scalar = bool | int | float | str
Value = Scalar | tuple[int, ...]


def _choice(default: str, options: Iterable[str], text: str) -> Any:
    return field(default=default, metadata={"options": tuple(options), "help": text})


def _choice_or(default: str, options: Iterable[str], form: str, pattern: str, text: str) -> Any:
    """One of the options, or text that matches the pattern, which messages describe as `form`."""
    return field(default=default, metadata={"options": tuple(options), "form": form, "pattern": pattern, "help": text})


def _number(default: float, low: float, high: float, text: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "help": text})


def _integers(default: tuple[int, ...], low: int, high: int, text: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "help": text})


def _text(default: str, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _secret(text: str) -> Any:
    """Text that no file, report, log or message repeats."""
    return field(default="", repr=False, metadata={"help": text, "secret": True})


def _flag(default: bool, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class RunSettings:
    """What is run, and on what."""

    algorithm: str = _choice_or(
        "spark",
        ALGORITHMS,
        "package.module:factory",
        r"[\w.]+:[\w.]+",
        "the learning algorithm; package.module:factory: one of your own (docs/api.md)",
    )
    nodes: int = _number(20, 1, 100_000, "number of peers")
    rounds: int = _number(20, 1, 1_000_000, "communication rounds R")
    seed: int = _number(0, 0, 2**63 - 1, "the one seed of every random choice")
    target_accuracy: float = _number(0.85, 0.0, 1.0, "aggregated accuracy whose rounds and bytes are reported")
    until_target: bool = _flag(False, "end with the round that reaches target_accuracy")
    transport: str = _choice("grpc", ("grpc", "memory"), "grpc: every peer a process of its own; memory: all in one")
    device: str = _text("cpu", "torch device of every peer: cpu, cuda, cuda:1, ...")
    workers: int = _number(0, 0, 1024, "peers that compute at once on this machine; 0 = one a core")
    pace: float = _number(
        0.0, 0.0, 86_400.0, "over gRPC: seconds from a round's beginning to the next one's, at the least; 0 = no pause"
    )
    rank_timeout: float = _number(
        120.0, 1.0, 86_400.0, "under torchrun: seconds after which a rank that does not answer ends the run"
    )
    clients_every: int = _number(
        1, 1, 1_000_000, "rounds between evaluations of every peer's own model; the last is always evaluated"
    )

    def ends_with(self, aggregated_accuracy: float) -> bool:
        """Whether a round with this accuracy is the last that is wanted."""
        return self.until_target and aggregated_accuracy >= self.target_accuracy

    def evaluates_clients(self, k: int) -> bool:
        """Whether round k ends with an evaluation of every peer's own model."""
        return k % self.clients_every == 0 or k == self.rounds


@dataclass(frozen=True)
class DataSettings:
    """Which samples each peer holds."""

    dataset: str = _choice_or(
        "digits",
        DATASETS,
        "file:PATH.npz",
        r"file:[^\0]+",
        "the dataset; digits is embedded, file:PATH.npz is your own, others: spark-dfl data list",
    )
    folder: str = _text("", "folder of the dataset's files; empty = look in the usual places")
    partition: str = _text("iid", "iid | dirichlet:ALPHA | writer | file:PATH")
    samples_per_node: int = _number(200, 0, 10_000_000, "samples a peer draws (iid, dirichlet); 0 = an equal share")
    disjoint: bool = _flag(False, "dirichlet: no sample belongs to two peers")

    @property
    def title(self) -> str:
        """The dataset as people and folders call it."""
        return Path(self.dataset.removeprefix("file:")).stem if self.dataset.startswith("file:") else self.dataset


@dataclass(frozen=True)
class ModelSettings:
    """The model, the same initial weights on every peer."""

    kind: str = _text("mlp", "mlp | cnn | package.module:factory (a callable that returns a torch.nn.Module)")
    hidden: tuple[int, ...] = _integers((100,), 1, 65536, "hidden widths of the mlp, or of the cnn's head")
    channels: tuple[int, ...] = _integers((8, 16), 1, 4096, "channels of the cnn's convolutions")
    activation: str = _choice("relu", ("relu", "tanh", "gelu", "silu", "sigmoid"), "activation of mlp and cnn")
    init: str = _choice("kaiming", ("kaiming", "torch"), "kaiming (normal, fan-in, zero bias) or torch's default")


@dataclass(frozen=True)
class TopologySettings:
    """Who talks to whom."""

    kind: str = _choice("regular", TOPOLOGIES, "graph of a round")
    degree: int = _number(5, 1, 99_999, "neighbours per peer (kappa); the mean for erdos-renyi; ring and line have 2")
    fresh: bool = _flag(True, "a new graph every round; false keeps the first one")


@dataclass(frozen=True)
class LearningSettings:
    """Kernel evolution (the paper's eta, T and t*)."""

    eta: float = _number(0.01, 1e-9, 1e3, "learning rate eta of the evolution")
    eta_decay: float = _number(0.0, 0.0, 10.0, "eta is multiplied by exp(-eta_decay * rounds since the decay began)")
    eta_hold: int = _number(0, 0, 1_000_000, "rounds before the decay of eta begins")
    eta_boost: float = _number(1.0, 1e-3, 1e3, "factor on eta in the rounds of eta_boost_rounds")
    eta_boost_rounds: tuple[int, ...] = _integers((), 1, 1_000_000, "rounds of the cyclic learning-rate boost")
    loss: str = _choice("cross-entropy", ("cross-entropy", "squared"), "loss of the evolution")
    kernel: str = _choice("trace", ("trace", "full"), "N x N mean over classes, or the full (N C) x (N C) kernel")
    full_rounds: int = _number(0, 0, 1_000_000, "first rounds that take the full kernel whatever `kernel` says")
    linearize_at: str = _choice(
        "receiver", ("receiver", "sender"), "whose consensus weights the Jacobians are taken at"
    )
    integrator: str = _choice("rkc", ("rkc", "dopri5", "euler"), "rkc: stabilised; dopri5: adaptive; euler: literal")
    tolerance: float = _number(0.02, 1e-10, 1.0, "relative error of the integrators rkc and dopri5")
    timesteps: tuple[int, ...] = _integers(
        tuple(range(100, 801, 100)), 1, 1_000_000, "grid T of evolution times among which t* is chosen"
    )
    select_by: str = _choice(
        "linearized", ("linearized", "model"), "loss that chooses t*: of f_t, or of the real network"
    )
    subsample: int = _number(1, 1, 10_000, "m: each round a seeded 1/m of a peer's samples")
    jacobian: str = _choice("auto", ("auto", "factored", "dense"), "form of the Jacobian; auto = per layer the smaller")
    jacobian_chunk: int = _number(50, 1, 1_000_000, "samples per chunk of a Jacobian, to bound memory")


@dataclass(frozen=True)
class MomentumSettings:
    """The velocity (the paper's v and mu)."""

    kind: str = _choice(
        "nesterov",
        ("nesterov", "heavy-ball", "quasi-global", "off"),
        "kind of momentum; quasi-global follows the averaged models, for unequal shares of the classes",
    )
    mu: float = _number(0.9, 0.0, 0.9999, "momentum coefficient mu")
    average_velocity: bool = _flag(False, "neighbours average velocities together with weights (twice the bytes)")


@dataclass(frozen=True)
class DistillationSettings:
    """Stage-wise annealed distillation (Algorithm 2)."""

    enabled: bool = _flag(True, "mix soft labels into the targets after the warm-up")
    r_warm: int = _number(10, 0, 1_000_000, "warm-up rounds R_warm with hard labels only")
    alpha_init: float = _number(1.0, 0.0, 1.0, "weight of the hard labels when the warm-up ends")
    alpha_final: float = _number(0.7, 0.0, 1.0, "weight of the hard labels in the last round")
    tau_init: float = _number(1.0, 1e-3, 1e3, "temperature of the soft labels when the warm-up ends")
    tau_final: float = _number(1.3, 1e-3, 1e3, "temperature of the soft labels in the last round")


@dataclass(frozen=True)
class LocalSettings:
    """Local training of D-PSGD, DFedAvg, DFedAvgM and DFedSAM. Each has published values of its own (PUBLISHED)."""

    epochs: int = _number(1, 1, 100_000, "passes over the peer's samples in a round")
    batch_size: int = _number(10, 0, 10_000_000, "samples a step; the last batch may be smaller; 0 = all samples")
    lr: float = _number(0.1, 1e-9, 1e3, "learning rate of the first round")
    lr_decay: float = _number(1.0, 1e-6, 1.0, "factor on the learning rate from one round to the next")
    momentum: float = _number(0.0, 0.0, 0.9999, "heavy-ball momentum; the velocity begins at zero in every round")
    weight_decay: float = _number(0.0, 0.0, 10.0, "this times the weights is added to the gradient")
    sam_rho: float = _number(0.0, 0.0, 1e3, "rho: radius of sharpness-aware minimisation; 0 = plain gradients")
    sam_adaptive: bool = _flag(True, "measure that radius relative to each weight (ASAM)")
    sam_eta: float = _number(0.01, 0.0, 10.0, "adaptive: added to each weight's size, so that zeros move too")


PUBLISHED: dict[str, dict[str, Any]] = {
    "dpsgd": {"local.epochs": 1, "local.batch_size": 10, "local.lr": 0.1},
    "dfedavg": {"local.epochs": 20, "local.batch_size": 25, "local.lr": 0.1},
    "dfedavgm": {"local.epochs": 20, "local.batch_size": 50, "local.lr": 0.01, "local.momentum": 0.9},
    "dfedsam": {
        "local.epochs": 5,
        "local.batch_size": 32,
        "local.lr": 0.01,
        "local.lr_decay": 0.95,
        "local.momentum": 0.99,
        "local.weight_decay": 5e-4,
        "local.sam_rho": 0.01,
    },
}
"""Settings published for an algorithm, in NTK-DFL's comparison: the defaults where run.algorithm names it."""


@dataclass(frozen=True)
class PackageSettings:
    """What goes on the wire: the paper's compressions (k, rho, b) and the factored form. Lossless by default."""

    encoding: str = _choice(
        "auto", ("auto", "factored", "dense"), "form of a Jacobian on the wire; auto = per layer the smaller"
    )
    projection: str = _choice(
        "none", ("none", "axis", "flat"), "random projection: none, of the fan-in axis, or of the whole tensor"
    )
    sketch: str = _choice(
        "gaussian",
        ("gaussian", "orthonormal", "hadamard"),
        "kind of random projection; orthonormal is a true projection, hadamard the fast transform",
    )
    sketch_size: int = _number(250, 1, 10_000_000, "k: numbers that a projected axis or tensor keeps at most")
    fresh_sketch: bool = _flag(False, "a new projection every round instead of one for the run")
    keep: float = _number(1.0, 1e-6, 1.0, "rho: the largest fraction of a dense Jacobian's entries that is sent")
    bits: int = _number(0, 0, 16, "b: bits a number; 0 = lossless float32, else 2 to 16")
    input_bits: int = _number(-1, -1, 16, "bits of the inputs of the first layer; -1 = as bits")
    hidden_bits: int = _number(-1, -1, 16, "bits of the inputs of the other layers; -1 = as bits")
    signal_bits: int = _number(-1, -1, 16, "bits of signals and slopes; -1 = as bits")
    logit_bits: int = _number(-1, -1, 16, "bits of logits; -1 = 16 where anything else is quantised, else lossless")
    max_error: float = _number(
        0.0, 0.0, 1.0, "with bits = 0: as few bits as keep each factor's relative error within this; 0 = lossless"
    )
    rounding: str = _choice("nearest", ("nearest", "stochastic"), "rounding of quantised numbers")
    scale_block: int = _number(0, 0, 1_000_000, "entries that share a scale; 0 = one scale a row")
    weights: str = _choice("lossless", ("lossless", "bf16", "int8"), "how weights travel; int8 with error feedback")
    level: int = _number(1, 0, 19, "zstandard's level; 0 = no entropy coding")
    chunk_bytes: int = _number(2**20, 1024, 2**30, "size of the chunks in which a message travels")
    max_message_bytes: int = _number(2**28, 1024, 2**40, "largest message that a peer accepts")
    max_decoded_bytes: int = _number(2**30, 1024, 2**44, "most memory that one decoded message may take")
    factor_cache_bytes: int = _number(2**24, 0, 2**40, "room for neighbours' inputs that are only named when repeated")
    in_memory: str = _choice(
        "auto",
        ("auto", "encode", "hand-over"),
        "transport memory: encode every message, or hand it over as it is; auto = encode where it is not lossless",
    )

    @property
    def encoded_in_memory(self) -> bool:
        """Whether the transport `memory` turns messages into bytes on their way."""
        return self.in_memory == "encode" or (self.in_memory == "auto" and not self.lossless)

    @property
    def lossless(self) -> bool:
        """Whether what arrives is, bit for bit, what was sent (a projection happens before the sending)."""
        widths = (self.bits, self.input_bits, self.hidden_bits, self.signal_bits, self.logit_bits)
        return max(widths) <= 0 and self.max_error == 0 and self.keep == 1 and self.weights == "lossless"

    def codec(self, kind: str) -> str:
        """How messages of a kind are coded, in a word that metrics carry: int8, auto-axis250-6bit, auto-lossless."""
        if kind != "package":
            return self.weights
        parts = [self.encoding]
        if self.projection != "none":
            parts.append(f"{self.projection}{self.sketch_size}")
        if self.keep < 1:
            parts.append(f"keep{self.keep:g}")
        bits = f"{self.bits}bit" if self.bits else f"error{self.max_error:g}" if self.max_error else "lossless"
        return "-".join([*parts, bits])


@dataclass(frozen=True)
class RobustSettings:
    """Learning beside peers that lie. Each peer's own choice; the defaults trust everybody, as the paper does."""

    weights: str = _choice(
        "mean", ("mean", "median", "trimmed-mean", "clipped"), "how neighbours' weights are put together"
    )
    trim: float = _number(0.3, 0.0, 0.49, "trimmed-mean: share of the values left out at either end")
    clip: float = _number(0.5, 0.0, 1.0, "clipped: neighbours count no further away than this quantile of distances")
    packages: bool = _flag(False, "leave out packages that contradict themselves, pull too hard or fit nothing known")
    agreement: float = _number(0.1, 0.0, 10.0, "most by which logits may differ from what the last layer says")
    influence: float = _number(4.0, 1.0, 1e6, "most pull of a package on the weights, in medians of the neighbourhood")
    loss_spread: float = _number(6.0, 0.0, 1e6, "most loss of a package: median + so many MADs (or + log of classes)")


HIDDEN = "..."
"""Stands for a secret wherever a configuration is written down."""


@dataclass(frozen=True)
class PrivacySettings:
    """What others may learn of a peer's samples (docs/privacy.md). Off by default: packages are as good as the data."""

    noise: float = _number(
        0.0, 0.0, 1e6, "standard deviation of the Gaussian noise that inputs get, once, before all else; 0 = none"
    )
    clip: float = _number(28.0, 1e-6, 1e6, "with noise: the longest L2 norm that a standardised input keeps")
    label_epsilon: float = _number(
        0.0, 0.0, 100.0, "epsilon of k-ary randomised response on the labels; 0 = labels in clear"
    )
    delta: float = _number(1e-5, 1e-12, 0.5, "delta at which the epsilon of the noise is stated")
    noise_seed: int = _number(
        -1, -1, 2**63 - 1, "-1 = noise from the operating system; a seed is for experiments: not private"
    )
    logit_bound: float = _number(
        0.0, 0.0, 1e6, "logits of packages are cut off at +- this; 0 = as they are; no guarantee comes with it"
    )
    sketch_secret: str = _secret(
        "text that the peers share and nobody else: their projections depend on it; never written down"
    )


@dataclass(frozen=True)
class NetworkSettings:
    """Peers as processes: where they listen, how long they wait."""

    host: str = _text("127.0.0.1", "address that peers and orchestrator listen on and are reached at")
    port: int = _number(0, 0, 65_535, "first port of the peers of a host, one after the other; 0 = free ones")
    orchestrator: str = _text("", "host:port of the orchestrator; empty = `run` starts one of its own")
    metrics: bool = _flag(True, "serve Prometheus metrics at /metrics of every peer and the orchestrator")
    metrics_port: int = _number(
        0, 0, 65_535, "first port of the metrics of a host's peers, one after the other; 0 = free ones"
    )
    named_neighbours: int = _number(
        32, 0, 100_000, "peers in a run up to which metrics tell bytes by neighbour; beyond, neighbours are summed"
    )
    bandwidth_budget: float = _number(
        0.0, 0.0, 1e15, "bytes a second above which Prometheus warns that a peer sends too much; 0 = never; no limit"
    )
    start_timeout: float = _number(60.0, 0.0, 86_400.0, "seconds after which training starts with the peers there are")
    lease: float = _number(60.0, 0.5, 86_400.0, "seconds after which a peer that does not renew is left out")
    deadline_floor: float = _number(30.0, 0.01, 86_400.0, "least seconds that a stage waits for its neighbours")
    deadline_ceiling: float = _number(
        600.0, 0.01, 86_400.0, "most seconds that a stage waits for its neighbours, whatever the floor"
    )
    deadline_spread: float = _number(8.0, 0.0, 1000.0, "k: the deadline is median + k MAD of the waits seen so far")
    sign_of_life: float = _number(
        10.0,
        0.0,
        3600.0,
        "seconds in which a neighbour that is unusually late must answer one of three calls; 0 = never asked",
    )
    suspicion_floor: float = _number(1.0, 0.01, 86_400.0, "least seconds for a neighbour that failed again and again")
    ahead: int = _number(2, 1, 64, "rounds that a neighbour's message may come early and is kept")
    streams: int = _number(64, 1, 10_000, "messages that a peer receives at once; more are told to come again")
    keepalive: float = _number(300.0, 1.0, 3600.0, "seconds of silence after which a connection is probed")
    own_test: int = _number(0, 0, 10_000_000, "test samples on which a peer measures its own accuracy; 0 = none")
    model_history: int = _number(8, 1, 1000, "finished rounds whose models a peer keeps for the observer")
    report_history: int = _number(256, 1, 100_000, "finished rounds that an observer which was away can still hear of")
    restarts: int = _number(3, 0, 1_000_000, "times that a crashed peer is started again")
    chaos: bool = _flag(False, "peers lose and damage what they send as `spark-dfl chaos` says; for tests only")
    log: str = _choice("human", ("human", "json"), "form of the peers' logs")


@dataclass(frozen=True)
class CheckpointSettings:
    """What a peer keeps on disk, to go on from after a crash."""

    enabled: bool = _flag(True, "write checkpoints")
    every: int = _number(1, 1, 1_000_000, "rounds from one checkpoint to the next")
    keep: int = _number(8, 1, 1000, "checkpoints that a peer keeps; all peers must have one of the same round")
    oldest: int = _number(20, 0, 1_000_000, "rounds that a returning peer may be behind and still use its own weights")


@dataclass(frozen=True)
class SecuritySettings:
    """Who may talk to whom, and how much one sender may ask for."""

    tls: str = _choice("on", ("on", "off"), "mutual TLS by identity; off = plaintext, on the loopback only")
    certs: str = _text("", "folder of certificates (spark-dfl certs); empty = `run` makes those of its own network")
    token: str = _secret("with tls = off: a word that whoever talks to the orchestrator must know; empty = none")
    days: float = _number(30.0, 0.001, 36_500.0, "days for which the certificates that `run` makes hold")
    connections: int = _number(4096, 1, 10_000_000, "connections that a peer lets others make to it at once")
    streams_per_sender: int = _number(8, 1, 10_000, "messages that a peer receives at once from one sender")
    messages_per_second: float = _number(200.0, 0.1, 1e9, "calls a second that one sender may make")
    bytes_per_second: float = _number(2.0**30, 1024.0, 1e15, "bytes a second that one sender may send to a peer")
    pending_bytes: int = _number(2**29, 1024, 2**44, "bytes of one sender that a peer holds before it reads them")
    silence: float = _number(30.0, 0.1, 86_400.0, "seconds without a byte after which a message is given up")
    strikes: int = _number(10, 1, 1_000_000, "broken limits or unsound messages after which a sender is cut off")
    cut_off_rounds: int = _number(3, 1, 1_000_000, "rounds for which such a sender is refused at once")


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    run: RunSettings = RunSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    topology: TopologySettings = TopologySettings()
    learning: LearningSettings = LearningSettings()
    momentum: MomentumSettings = MomentumSettings()
    distillation: DistillationSettings = DistillationSettings()
    local: LocalSettings = LocalSettings()
    package: PackageSettings = PackageSettings()
    robust: RobustSettings = RobustSettings()
    privacy: PrivacySettings = PrivacySettings()
    network: NetworkSettings = NetworkSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    security: SecuritySettings = SecuritySettings()

    def replace(self, **settings: Any) -> "Config":
        """A copy with settings given as section__key=value, checked like any other layer.

        One that names run__algorithm takes that algorithm's published settings along, as `load` does.
        """
        changes = {key.replace("__", ".", 1): value for key, value in settings.items()}
        return _apply(self, [*_published([changes]), ("replace()", changes)])


@dataclass(frozen=True)
class Setting:
    """A setting as help pages, the loader and the documentation see it."""

    key: str
    type: str
    default: Value
    allowed: str
    help: str


def settings() -> list[Setting]:
    """Every setting there is, in order."""
    return [
        Setting(f"{section}.{f.name}", _type_name(f), _plain(f.default), _allowed(f), f.metadata["help"])
        for section, fields in _schema().items()
        for f in fields.values()
    ]


def presets() -> list[str]:
    """Names of the presets that come with the package."""
    folder = resources.files("spark_node") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(
    preset: str | None = None,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The effective configuration: defaults < preset < file < environment < flags {"section.key": value}.

    The defaults are those of the algorithm that these layers name (PUBLISHED).
    """
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if preset is not None:
        layers.append((f"preset {preset}", preset_layer(preset)))
    if file is not None:
        layers.append((str(file), file_layer(file)))
    layers.append(("environment", _from_environment(os.environ if environment is None else environment)))
    layers.append(("flags", flags or {}))
    return compose(layers)


def compose(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
    """The defaults with layers (where from, {"section.key": value}) on top, weakest first, all of them checked."""
    return _apply(Config(), [*_published([layer for _, layer in layers]), *layers])


def _published(layers: Iterable[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The defaults of the algorithm that the strongest of these layers names."""
    named = [layer["run.algorithm"] for layer in layers if "run.algorithm" in layer]
    known = bool(named) and isinstance(named[-1], str) and named[-1] in PUBLISHED
    return [(f"published settings of {named[-1]}", PUBLISHED[named[-1]])] if known else []


def preset_layer(name: str) -> dict[str, Any]:
    """What a preset sets, as {"section.key": value}."""
    if name not in presets():
        raise ConfigError(f"preset = {name!r}: unknown; allowed: {', '.join(presets())}")
    text = (resources.files("spark_node") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return _flatten(tomllib.loads(text), f"preset {name}")


def file_layer(file: Path) -> dict[str, Any]:
    """What a TOML file sets, as {"section.key": value}."""
    return _flatten(_read_toml(file), str(file))


def environment_layer() -> dict[str, Any]:
    """What the environment sets, as {"section.key": value}."""
    return _from_environment(os.environ)


def flatten(tree: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Sections of TOML as {"section.key": value}; ConfigError where something stands outside a section."""
    return _flatten(tree, origin)


def parse_assignment(text: str) -> tuple[str, Any]:
    """`section.key=value` of --set as (key, value); the value is TOML, or plain text where it is not."""
    key, equals, raw = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: expected section.key=value, for example --set learning.eta=0.02")
    return key.strip(), _parse_value(raw.strip())


def to_toml(config: Config) -> str:
    """The configuration as TOML that `load(file=...)` reads back to the same configuration, but for secrets."""
    lines: list[str] = []
    for section, fields in _schema().items():
        part = getattr(without_secrets(config), section)
        lines += [f"[{section}]", *(f"{name} = {_toml_value(getattr(part, name))}" for name in fields), ""]
    return "\n".join(lines)


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The configuration as plain dictionaries, for JSON; secrets are hidden."""
    return dataclasses.asdict(without_secrets(config))


def without_secrets(config: Config) -> Config:
    """The same with no secret in it, for files."""
    config = without_sketch_secret(config)
    return dataclasses.replace(config, security=dataclasses.replace(config.security, token=""))


def without_sketch_secret(config: Config) -> Config:
    """The same with HIDDEN in the place of the peers' secret: for processes that are no peers."""
    if not config.privacy.sketch_secret:
        return config
    return dataclasses.replace(config, privacy=dataclasses.replace(config.privacy, sketch_secret=HIDDEN))


def without_secret_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with HIDDEN in the place of every secret that `--set` gives."""
    keys = [f"{s}.{name}" for s, fields in _schema().items() for name, f in fields.items() if f.metadata.get("secret")]
    pattern = re.compile(rf"^((?:--set=)?\s*(?:{'|'.join(map(re.escape, keys))})\s*=).*$", re.DOTALL)
    return [pattern.sub(rf"\g<1>{HIDDEN}", argument) for argument in arguments]


def _schema() -> dict[str, dict[str, "dataclasses.Field[Any]"]]:
    return {
        section.name: {f.name: f for f in dataclasses.fields(section.default)}  # type: ignore[arg-type]
        for section in dataclasses.fields(Config)
    }


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: cannot be read ({error.strerror}); give an existing TOML file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {file}: not TOML ({error})") from None


def _flatten(tree: Mapping[str, Any], origin: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    known = ", ".join(f"[{name}]" for name in _schema())
    for section, entries in tree.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{section} = {entries!r} ({origin}): settings stand in a section; allowed: {known}")
        if section not in _schema():
            raise ConfigError(f"[{section}] ({origin}): unknown section; allowed: {known}")
        flat.update({f"{section}.{key}": value for key, value in entries.items()})
    return flat


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """SPARK_SECTION__KEY=value, for example SPARK_LEARNING__ETA=0.02."""
    found = {}
    for name, raw in environment.items():
        if name.startswith("SPARK_") and "__" in name:
            section, _, key = name.removeprefix("SPARK_").lower().partition("__")
            found[f"{section}.{key}"] = _parse_value(raw)
    return found


def _parse_value(raw: str) -> Any:
    try:
        tree = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    return tree["value"] if len(tree) == 1 else raw


def _apply(config: Config, layers: Iterable[tuple[str, Mapping[str, Any]]]) -> Config:
    schema = _schema()
    changed: dict[str, dict[str, Any]] = {section: {} for section in schema}
    for origin, layer in layers:
        for key, value in layer.items():
            section, _, name = key.partition(".")
            if section not in schema:
                raise ConfigError(f"{key} = {value!r} ({origin}): unknown section; allowed: {', '.join(schema)}")
            if name not in schema[section]:
                known = ", ".join(schema[section])
                raise ConfigError(f"{key} = {value!r} ({origin}): unknown key; [{section}] has: {known}")
            changed[section][name] = _checked(key, value, schema[section][name], origin)
    parts = {s: dataclasses.replace(getattr(config, s), **values) for s, values in changed.items()}
    result = dataclasses.replace(config, **parts)
    _check_together(result)
    return result


def _checked(key: str, value: Any, spec: "dataclasses.Field[Any]", origin: str) -> Value:
    """The value in its field's type, or ConfigError."""
    default, meta = spec.default, spec.metadata

    def refuse() -> ConfigError:
        said = HIDDEN if meta.get("secret") else repr(value)
        return ConfigError(f"{key} = {said} ({origin}): allowed: {_allowed(spec)}")

    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise refuse()
        return value
    if isinstance(default, str):
        fits = _is_text(value) and (
            value in meta.get("options", (value,)) or re.fullmatch(meta.get("pattern", "(?!)"), value)
        )
        if not fits:
            raise refuse()
        return str(value)
    numbers = value if isinstance(default, tuple) else [value]
    if not isinstance(numbers, list | tuple):
        raise refuse()
    whole = isinstance(default, int | tuple)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int if whole else int | float):
            raise refuse()
        if not meta["low"] <= number <= meta["high"]:
            raise refuse()
    if isinstance(default, tuple):
        return tuple(numbers)
    return int(value) if whole else float(value)


def _is_text(value: Any) -> bool:
    """Whether a file can hold it: bytes that are no UTF-8 reach us as lone surrogates."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _check_together(config: Config) -> None:
    """What no single setting can say."""
    steps = config.learning.timesteps
    if not steps or any(b <= a for a, b in pairwise(steps)):
        raise ConfigError(f"learning.timesteps = {list(steps)}: allowed: a rising list of at least one step count")
    for name in ("bits", "input_bits", "hidden_bits", "signal_bits", "logit_bits"):
        if getattr(config.package, name) == 1:
            raise ConfigError(f"package.{name} = 1: allowed: 0 (lossless) or 2 to 16 bits")
    if config.package.max_error > 0 and config.package.bits > 0:
        raise ConfigError(
            f"package.max_error = {config.package.max_error}: chooses the bits itself; leave package.bits at 0"
        )
    _check_plaintext(config)
    if config.privacy.logit_bound > 0 and config.robust.packages:
        raise ConfigError(
            f"privacy.logit_bound = {config.privacy.logit_bound}: robust.packages = true refuses logits that were cut"
        )
    kind = config.model.kind
    if kind not in ("mlp", "cnn") and ":" not in kind:
        raise ConfigError(f"model.kind = {kind!r}: allowed: mlp, cnn, or package.module:factory")
    if kind == "cnn" and not config.model.channels:
        raise ConfigError("model.channels = []: a cnn needs at least one convolution, for example [8, 16]")


def _check_plaintext(config: Config) -> None:
    """Without encryption nothing leaves the machine."""
    if config.security.tls == "on" and config.security.token:
        raise ConfigError("security.token: only for security.tls = 'off'; with certificates nobody needs a token")
    network, anywhere = config.network, config.security.tls == "on"
    for key, host in (("host", network.host), ("orchestrator", network.orchestrator.rpartition(":")[0])):
        if not anywhere and not is_loopback(host or "localhost"):
            said = f"network.{key} = {getattr(network, key)!r}: not of this machine alone, and security.tls = 'off'"
            raise ConfigError(f"{said}; leave tls on and give --certs DIR (spark-dfl certs makes one)")


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _plain(value: Any) -> Value:
    result: Value = value
    return result


def _type_name(spec: "dataclasses.Field[Any]") -> str:
    return "list of int" if isinstance(spec.default, tuple) else type(spec.default).__name__


def _allowed(spec: "dataclasses.Field[Any]") -> str:
    default, meta = spec.default, spec.metadata
    if "options" in meta:
        return ", ".join([*meta["options"], *([meta["form"]] if "form" in meta else [])])
    if isinstance(default, bool):
        return "true, false"
    if isinstance(default, str):
        return "text"
    kind = {tuple: "a list of whole numbers", int: "a whole number", float: "a number"}[type(default)]
    return f"{kind} from {meta['low']} to {meta['high']}"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes, and DEL
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return repr(value)
