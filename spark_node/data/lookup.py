"""Where a dataset may lie on this machine, in the order in which the places are tried."""

import importlib.util
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from spark_node.data import catalogue
from spark_node.data.catalogue import Entry
from spark_node.errors import DataError

VARIABLE = "SPARK_DATA"


@dataclass(frozen=True)
class Place:
    """One place that was tried: who named it, and which of the dataset's files are there."""

    origin: str
    path: Path
    files: Mapping[str, Path] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that holds the files found, or the place itself."""
        if not self.found:
            return self.path
        return Path(os.path.commonpath([path.parent.resolve() for path in self.files.values()]))

    @property
    def found(self) -> bool:
        """Whether every file is there."""
        return bool(self.files) and not self.missing


def locate(name: str, folder: Path | None = None) -> list[Place]:
    """Every place tried for the dataset, in order. A folder that the user names is the only place."""
    entry = catalogue.entry(name)
    if entry.embedded:
        return [_embedded()]
    return [_search(entry, origin, path) for origin, path in _places(entry, folder)]


def find(entry: Entry, folder: Path | None = None) -> Place:
    """The first place that holds the dataset, or a DataError that lists the places and the way out."""
    places = [_search(entry, origin, path) for origin, path in _places(entry, folder)]
    for place in places:
        if place.found:
            return place
    looked = ", ".join(f"{p.path}{_lacks(p)} ({p.origin})" for p in places)
    raise DataError(f"{entry.name} not found; looked in {looked}; {remedy(entry, folder)}")


def files_in(entry: Entry, root: Path) -> Place:
    """What of the dataset lies in or below one folder."""
    return _search(entry, "folder", root)


def cache_folder(entry: Entry) -> Path:
    """Where `data fetch` puts the dataset unless told otherwise."""
    return platformdirs.user_cache_path("spark-dfl") / "data" / entry.name


def target_folder(entry: Entry, folder: Path | None) -> Path:
    """Where `data fetch --folder` puts the dataset: FOLDER/NAME, for several share their file names."""
    if folder is None:
        return cache_folder(entry)
    folder = Path(os.path.expanduser(folder))
    return folder if folder.name == entry.name else folder / entry.name


def remedy(entry: Entry, folder: Path | None = None) -> str:
    """The command that puts a good copy where the user looked for it."""
    if not entry.downloads:
        return f"to get it: {entry.advice}"
    if entry.system_folder is not None and folder == Path(entry.system_folder):
        return f"run: apt-get install --reinstall {entry.system_package}"
    command = fetch_command(entry, folder)
    package = f" (or: apt-get install {entry.system_package})" if entry.system_package and folder is None else ""
    return f"run: {command}{package}"


def fetch_command(entry: Entry, folder: Path | None = None) -> str:
    """The command that fetches the dataset, or says how it is made."""
    elsewhere = folder is not None and folder != cache_folder(entry)
    return f"spark-dfl data fetch {entry.name}" + (f" --folder {shlex.quote(str(folder))}" if elsewhere else "")


def _places(entry: Entry, folder: Path | None) -> list[tuple[str, Path]]:
    if folder is not None:
        return [("the folder given", Path(os.path.expanduser(folder)))]
    places = []
    if root := os.environ.get(VARIABLE):
        places.append((VARIABLE, Path(os.path.expanduser(root))))
    if entry.system_folder is not None:
        places.append((f"package {entry.system_package}", Path(entry.system_folder)))
    return [*places, ("cache", cache_folder(entry))]


def _search(entry: Entry, origin: str, root: Path) -> Place:
    if not entry.files:
        return _search_femnist(entry, origin, root)
    found = {
        file.name: path for file in entry.files if (path := _first_file(root, entry.folders, file.variants)) is not None
    }
    missing = tuple(file.name for file in entry.files if file.name not in found)
    return Place(origin, root, found, missing)


def _first_file(root: Path, folders: tuple[str, ...], names: tuple[str, ...]) -> Path | None:
    candidates = (root / folder / name for folder in folders for name in names)
    return next((path for path in candidates if os.path.isfile(path)), None)


def _search_femnist(entry: Entry, origin: str, root: Path) -> Place:
    """LEAF's train/*.json and test/*.json, or one femnist*.npz."""
    for base in (root / folder for folder in entry.folders):
        parts = {part: _listed(base / part, "*.json") for part in ("train", "test")}
        if all(parts.values()):
            return Place(origin, root, {f"{part}/{f.name}": f for part, files in parts.items() for f in files})
        if archives := _listed(base, "femnist*.npz"):
            return Place(origin, root, {file.name: file for file in archives})
    return Place(origin, root, {}, ("train/*.json and test/*.json, or femnist*.npz",))


def _listed(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path for path in folder.glob(pattern) if path.is_file())
    except OSError:
        return []


def _embedded() -> Place:
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits comes with scikit-learn, which is not installed; run: pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return Place("embedded", path, {path.name: path})


def _lacks(place: Place) -> str:
    return f", which lacks {', '.join(place.missing)}" if place.files else ""
