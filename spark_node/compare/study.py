"""A study: what is compared, as a grid of configurations. Pure data: no files, no clock."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spark_node import config as configuration
from spark_node.config import Config
from spark_node.errors import UserError

TABLES = ("rounds_to_target", "bytes_to_target", "accuracy", "clients", "ablation", "significance", "cost")
PLOTS = ("convergence", "clients", "accuracy_vs_bytes", "accuracy_vs_value", "time_and_memory", "compression")
PUBLISHED = ("rounds_to_target", "accuracy", "clients")
"""The tables beside which a study may put the figures of the paper."""

_METHOD = ("learning", "local", "momentum", "distillation", "package")
"""Sections that say how a method learns; what else a value's preset says is about its network and is left out."""
_HARMLESS: dict[str, Any] = {"run__workers": 0, "run__rank_timeout": 120.0, "data__folder": ""}
"""Settings that change neither the figures nor the weights of a run."""
_SWEPT = {"algorithm": "run.algorithm", "partition": "data.partition"}

_NUMBER = re.compile(r"[0-9.]+")

Layer = tuple[str, Mapping[str, Any]]


class StudyError(UserError):
    """A study that cannot be read or makes no sense: the message names the file and the key."""


@dataclass(frozen=True)
class AxisValue:
    """One value of an axis: a label, and the settings it stands for."""

    label: str
    settings: Mapping[str, Any]
    preset: str | None = None


@dataclass(frozen=True)
class Axis:
    """What is varied: its values, each with a label."""

    name: str
    values: tuple[AxisValue, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(value.label for value in self.values)

    @property
    def keys(self) -> frozenset[str]:
        """The settings that its values set."""
        return frozenset(key for value in self.values for key in value.settings)


@dataclass(frozen=True)
class Study:
    """A question, the grid that answers it, and how the answer is shown."""

    title: str
    axes: tuple[Axis, ...]
    seeds: tuple[int, ...] = (0,)
    question: str = ""
    paper: str = ""
    preset: str | None = None
    base: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the quick size; empty at full size. They are stronger than everything but flags."""
    is_quick: bool = False
    at_round: int | None = None
    """The round whose accuracy is compared; without it the last that all runs have."""
    jobs: int | None = None
    """Runs at once; a study that measures time sets 1."""
    tables: tuple[str, ...] = TABLES
    plots: tuple[str, ...] = PLOTS
    published: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    """Figures of the paper: table, row label, column label -> text."""
    origin: str = "study"

    @property
    def rows(self) -> Axis:
        """The first axis: a row of the tables, a line of the plots each."""
        return self.axes[0]

    @property
    def columns(self) -> list[tuple[str, ...]]:
        """The points of the other axes: a column of the tables, a panel of the plots each."""
        return list(itertools.product(*(axis.labels for axis in self.axes[1:])))

    def column_name(self, point: Sequence[str]) -> str:
        """The heading of a column; a bare number is told what it counts, a study of one axis has one column."""
        named = zip(self.axes[1:], point, strict=True)
        return (
            ", ".join(f"{axis.name} {label}" if _NUMBER.fullmatch(label) else label for axis, label in named) or "all"
        )

    def cells(self, flags: Mapping[str, Any] | None = None) -> list["Cell"]:
        """Every point of the grid with its whole configuration; the seeds of a point follow each other."""
        found = [
            self._cell(values, seed, flags or {})
            for values in itertools.product(*(axis.values for axis in self.axes))
            for seed in self.seeds
        ]
        self._check_distinct(found)
        return found

    def _cell(self, values: Sequence[AxisValue], seed: int, flags: Mapping[str, Any]) -> "Cell":
        layers: list[Layer] = []
        if self.preset is not None:
            layers.append((f"preset {self.preset}", configuration.preset_layer(self.preset)))
        layers.append((f"{self.origin} [base]", self.base))
        layers.append(("environment", configuration.environment_layer()))
        for value in values:
            layers += _value_layers(value, self.origin)
        layers.append((f"{self.origin} [quick]", self.quick))
        layers.append(("flags", {**flags, "run.seed": seed}))
        labels = tuple((axis.name, value.label) for axis, value in zip(self.axes, values, strict=True))
        return Cell(labels, seed, configuration.compose(layers))

    def _check_distinct(self, cells: Iterable["Cell"]) -> None:
        """Two points with one configuration: something stronger has overruled what an axis varies."""
        names: dict[str, Cell] = {}
        configs: dict[str, Cell] = {}
        for cell in cells:
            twin = configs.setdefault(configuration.to_toml(cell.config), cell)
            if twin is not cell:
                raise StudyError(
                    f"{self.origin}: {cell.title} and {twin.title} are the same run; flags, [quick] or a repeated "
                    "value overrule what tells them apart"
                )
            twin = names.setdefault(cell.name, cell)
            if twin is not cell:
                raise StudyError(f"{self.origin}: {cell.title} and {twin.title} need labels that differ in letters")


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    labels: tuple[tuple[str, str], ...]
    seed: int
    config: Config

    @property
    def group(self) -> tuple[str, ...]:
        """Its point of the grid without the seed: what is averaged over seeds."""
        return tuple(label for _, label in self.labels)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "_".join([*(slug(label) for label in self.group), f"seed{self.seed}"])

    @property
    def title(self) -> str:
        return ", ".join([*self.group, f"seed {self.seed}"])


def same_run(one: Config, other: Config) -> bool:
    """Whether two configurations give the same run, wherever the data lies and however many workers there are."""
    return fingerprint(one) == fingerprint(other)


def fingerprint(config: Config) -> str:
    """The configuration as text, without what changes neither the figures nor the weights of a run."""
    return configuration.to_toml(config.replace(**_HARMLESS))


def slug(text: str) -> str:
    """A label as part of a file name; what has no letter keeps its number, so that labels stay apart."""
    plain = text.lower().replace("α", "alpha").replace("μ", "mu").replace("κ", "kappa")
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.") or "value"


def ad_hoc(
    axes: Sequence[Axis], seeds: Sequence[int], preset: str | None = None, base: Mapping[str, Any] | None = None
) -> Study:
    """A study from the command line."""
    title = " against ".join(axes[0].labels) if len(axes[0].values) <= 3 else f"By {axes[0].name}"
    varied = f", by {' and '.join(axis.name for axis in axes[1:])}" if axes[1:] else ""
    return Study(
        title=title + varied, axes=tuple(axes), seeds=tuple(seeds), preset=preset, base=base or {}, origin="compare"
    )


def algorithm_axis(names: Iterable[str]) -> Axis:
    """Algorithms with the settings of the preset of the same name, where there is one."""
    from spark_node.observe.wording import NAMES

    known = configuration.presets()
    values = []
    for name in names:
        if name not in configuration.ALGORITHMS and ":" not in name:
            allowed = f"{', '.join(configuration.ALGORITHMS)}, package.module:factory"
            raise StudyError(f"--algorithms {name}: unknown; allowed: {allowed}")
        preset = name if name in known else None
        values.append(AxisValue(NAMES.get(name, name), {"run.algorithm": name}, preset))
    return Axis("algorithm", tuple(values))


def setting_axis(key: str, values: Sequence[Any], name: str | None = None) -> Axis:
    """One setting with several values, labelled by themselves."""
    return Axis(
        name or next((short for short, its in _SWEPT.items() if its == key), key.partition(".")[2] or key),
        tuple(AxisValue(label_of(key, value), {key: value}) for value in values),
    )


def with_axis(study: Study, axis: Axis) -> Study:
    """The study with an axis in the place of the one that varies the same settings, or added at the end."""
    axes = [axis if other.keys & axis.keys else other for other in study.axes]
    if axis not in axes:
        axes.append(axis)
    if axes.count(axis) > 1:
        raise StudyError(f"{study.origin}: {' and '.join(sorted(axis.keys))} is varied by two axes; vary it once")
    return replace(study, axes=tuple(axes))


def only_algorithms(study: Study, names: Sequence[str]) -> Study:
    """The study with only some of its algorithms, each with the settings that the study gives it."""
    key = _SWEPT["algorithm"]
    axis = next((axis for axis in study.axes if key in axis.keys), None)
    if axis is None:
        return with_axis(study, algorithm_axis(names))
    had = {str(value.settings.get(key)) for value in axis.values}
    missing = [name for name in names if name not in had]
    if missing:
        raise StudyError(f"--algorithms {missing[0]}: not in {study.origin}; allowed: {', '.join(sorted(had))}")
    kept = tuple(value for value in axis.values if value.settings.get(key) in names)
    return replace(study, axes=tuple(replace(axis, values=kept) if other is axis else other for other in study.axes))


def parse_vary(text: str) -> Axis:
    """`section.key=v1,v2,...` of --vary; a list of lists is written in TOML: model.hidden=[[100],[50]]."""
    key, equals, raw = text.partition("=")
    if not equals or not raw.strip():
        raise StudyError(f"--vary {text}: expected section.key=v1,v2,..., for example --vary momentum.mu=0.5,0.9")
    _, whole = configuration.parse_assignment(f"{key}={raw}")
    listed = isinstance(whole, list) and all(isinstance(entry, list) for entry in whole)
    values = whole if listed else [configuration.parse_assignment(f"{key}={part}")[1] for part in raw.split(",")]
    return setting_axis(key.strip(), values)


def _value_layers(value: AxisValue, origin: str) -> list[Layer]:
    layers: list[Layer] = []
    if value.preset is not None:
        wanted = configuration.preset_layer(value.preset)
        method = {k: v for k, v in wanted.items() if k.partition(".")[0] in _METHOD or k == "run.algorithm"}
        layers.append((f"preset {value.preset}", method))
    layers.append((f"{origin}, {value.label}", value.settings))
    return layers


def label_of(key: str, value: Any) -> str:
    """A value in a table: IID, α = 0.1, mu = 0.9, else as it is written."""
    if key == "data.partition":
        kind, _, parameter = str(value).partition(":")
        return {"iid": "IID", "writer": "by writer"}.get(
            kind, f"α = {parameter}" if kind == "dirichlet" else str(value)
        )
    if isinstance(value, bool):
        return f"{key.partition('.')[2]} {'on' if value else 'off'}"
    return str(value)
