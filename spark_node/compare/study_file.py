"""Reads study files. A mistake is one line that names the file, the key and what is allowed."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_node import config as configuration
from spark_node.compare.study import PLOTS, PUBLISHED, TABLES, Axis, AxisValue, Study, StudyError, label_of
from spark_node.errors import ConfigError

_KEYS = (
    "title",
    "question",
    "paper",
    "seeds",
    "at_round",
    "jobs",
    "tables",
    "plots",
    "base",
    "vary",
    "quick",
    "published",
)
_KEYS_QUICK = ("seeds", "at_round", "base", "vary")
_SEEDS_HIGHEST = 2**63 - 1


def load_study(path: Path, quick: bool = False) -> Study:
    """Read a study file; StudyError, one line that names the file and the key, where it is wrong."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror}); give a study file") from None
    except ValueError as error:
        raise StudyError(f"{path}: not TOML ({error})") from None
    reader = _Reader(str(path))
    study = reader.study(tree)
    if quick:
        study = reader.quick(study, tree)
    reader.check(study)
    return study


class _Reader:
    """Reads one file; every complaint names it and the key."""

    def __init__(self, file: str) -> None:
        self._file = file

    def study(self, tree: Mapping[str, Any]) -> Study:
        self._known(tree, _KEYS, "")
        base = self._table(tree, "base")
        preset = base.get("preset")
        if preset is not None and preset not in configuration.presets():
            raise self._error("base.preset", preset, ", ".join(configuration.presets()))
        axes = tuple(self._axis(entry, f"vary[{i}]") for i, entry in enumerate(self._list(tree, "vary"), start=1))
        if not axes:
            raise self._error("vary", None, "at least one [[vary]] with a name and values")
        return Study(
            title=self._text(tree, "title", required=True),
            question=self._text(tree, "question"),
            paper=self._text(tree, "paper"),
            axes=axes,
            seeds=self._seeds(tree, "seeds"),
            preset=preset,
            base=self._settings({key: value for key, value in base.items() if key != "preset"}, "base"),
            at_round=self._count(tree, "at_round"),
            jobs=self._count(tree, "jobs"),
            tables=self._names(tree, "tables", TABLES),
            plots=self._names(tree, "plots", PLOTS),
            published=self._published(tree),
            origin=self._file,
        )

    def quick(self, study: Study, tree: Mapping[str, Any]) -> Study:
        """The study at its quick size; the figures of the paper are not for that."""
        part = self._table(tree, "quick")
        if not part:
            raise self._error("quick", None, "a [quick] table with seeds, base settings and axes of the quick size")
        self._known(part, _KEYS_QUICK, "quick.")
        small = replace(study, is_quick=True, published={}, at_round=self._count(part, "at_round", "quick."))
        if "seeds" in part:
            small = replace(small, seeds=self._seeds(part, "seeds", "quick."))
        small = replace(small, quick=self._settings(self._table(part, "base", "quick."), "quick.base"))
        names = [axis.name for axis in study.axes]
        for index, entry in enumerate(self._list(part, "vary", "quick."), start=1):
            axis = self._axis(entry, f"quick.vary[{index}]")
            if axis.name not in names:
                raise self._error(f"quick.vary[{index}].name", axis.name, ", ".join(names))
            small = replace(small, axes=tuple(axis if old.name == axis.name else old for old in small.axes))
        return small

    def check(self, study: Study) -> None:
        """What no single key can say: every cell has a configuration, and rows and columns are what is published."""
        try:
            study.cells()
        except StudyError:
            raise
        except ConfigError as error:
            said = str(error)
            raise StudyError(said if self._file in said else f"{self._file}: {said}") from None
        rows = study.rows.labels
        columns = [study.column_name(point) for point in study.columns]
        for table, entries in study.published.items():
            for row, cells in entries.items():
                if row not in rows:
                    raise self._error(f"published.{table}", row, ", ".join(rows))
                for column in cells:
                    if column not in columns:
                        raise self._error(f"published.{table}.{row}", column, ", ".join(columns))

    def _axis(self, entry: Any, where: str) -> Axis:
        if not isinstance(entry, dict):
            raise self._error(where, entry, "a table with name and values")
        self._known(entry, ("name", "setting", "values", "labels"), f"{where}.")
        name = self._text(entry, "name", f"{where}.", required=True)
        setting = self._text(entry, "setting", f"{where}.")
        values, labels = self._list(entry, "values", f"{where}."), self._list(entry, "labels", f"{where}.")
        if not values:
            raise self._error(f"{where}.values", values, "a list of at least one value")
        if labels and len(labels) != len(values):
            raise self._error(f"{where}.labels", labels, f"{len(values)} labels, one a value")
        found = tuple(self._value(value, setting, f"{where}.values[{i}]") for i, value in enumerate(values, start=1))
        if labels:
            found = tuple(replace(value, label=str(label)) for value, label in zip(found, labels, strict=True))
        if len({value.label for value in found}) < len(found):
            raise self._error(f"{where}.values", [value.label for value in found], "values with labels of their own")
        return Axis(name, found)

    def _value(self, value: Any, setting: str, where: str) -> AxisValue:
        if not isinstance(value, dict):
            if not setting:
                raise self._error(where, value, "{ label = ..., section.key = value }, or a `setting` beside `values`")
            return AxisValue(label_of(setting, value), {setting: value})
        label = self._text(value, "label", f"{where}.", required=True)
        preset = value.get("preset")
        if preset is not None and preset not in configuration.presets():
            raise self._error(f"{where}.preset", preset, ", ".join(configuration.presets()))
        rest = {key: its for key, its in value.items() if key not in ("label", "preset")}
        return AxisValue(label, self._settings(rest, where), preset)

    def _settings(self, tree: Mapping[str, Any], where: str) -> dict[str, Any]:
        try:
            return configuration.flatten(tree, f"{self._file}, {where}")
        except ConfigError as error:
            raise StudyError(str(error)) from None

    def _published(self, tree: Mapping[str, Any]) -> dict[str, dict[str, dict[str, str]]]:
        found: dict[str, dict[str, dict[str, str]]] = {}
        for name, rows in self._table(tree, "published").items():
            if name not in PUBLISHED:
                raise self._error("published", name, ", ".join(PUBLISHED))
            if not isinstance(rows, dict) or not all(isinstance(cells, dict) for cells in rows.values()):
                raise self._error(f"published.{name}", rows, "a table of rows, each a table of columns")
            found[name] = {row: {column: str(cell) for column, cell in cells.items()} for row, cells in rows.items()}
        return found

    def _seeds(self, tree: Mapping[str, Any], key: str, prefix: str = "") -> tuple[int, ...]:
        seeds = tree.get(key, [0])
        whole = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed <= _SEEDS_HIGHEST for seed in seeds)
        if not whole or not seeds or len(set(seeds)) < len(seeds):
            raise self._error(f"{prefix}{key}", seeds, "a list of different whole numbers, for example [0, 1, 2]")
        return tuple(seeds)

    def _count(self, tree: Mapping[str, Any], key: str, prefix: str = "") -> int | None:
        value = tree.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self._error(f"{prefix}{key}", value, "a whole number from 1")
        return value

    def _names(self, tree: Mapping[str, Any], key: str, allowed: Sequence[str]) -> tuple[str, ...]:
        names = self._list(tree, key) if key in tree else list(allowed)
        for name in names:
            if name not in allowed:
                raise self._error(key, name, ", ".join(allowed))
        return tuple(names)

    def _text(self, tree: Mapping[str, Any], key: str, prefix: str = "", required: bool = False) -> str:
        value = tree.get(key, "")
        if not isinstance(value, str) or (required and not value):
            raise self._error(f"{prefix}{key}", tree.get(key), "a text")
        return value

    def _table(self, tree: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
        value = tree.get(key, {})
        if not isinstance(value, dict):
            raise self._error(f"{prefix}{key}", value, "a table")
        return value

    def _list(self, tree: Mapping[str, Any], key: str, prefix: str = "") -> list[Any]:
        value = tree.get(key, [])
        if not isinstance(value, list):
            raise self._error(f"{prefix}{key}", value, "a list")
        return value

    def _known(self, tree: Mapping[str, Any], allowed: Sequence[str], prefix: str) -> None:
        for key in tree:
            if key not in allowed:
                raise StudyError(f"{self._file}: {prefix}{key}: unknown key; allowed: {', '.join(allowed)}")

    def _error(self, key: str, value: Any, allowed: str) -> StudyError:
        given = "is missing" if value is None else f"= {value!r}"
        return StudyError(f"{self._file}: {key} {given}; allowed: {allowed}")
