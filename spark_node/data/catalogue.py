"""What we know of every dataset: its shape, its constants, its official files, their digests and mirrors."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from spark_node.errors import DataError


@dataclass(frozen=True)
class File:
    """One official file: its name, and the size and sha256 of its decompressed bytes."""

    name: str
    size: int
    sha256: str

    @property
    def variants(self) -> tuple[str, ...]:
        """The names it goes by, the one that `data fetch` writes first."""
        if "-idx" not in self.name:
            return (self.name,)
        dotted = self.name.replace("-idx", ".idx")
        return (f"{self.name}.gz", self.name, f"{dotted}.gz", dotted)


@dataclass(frozen=True)
class Download:
    """One thing to download: a gzipped file, or a tar that holds `files` in its folder `inside`."""

    name: str
    mirrors: tuple[str, ...]
    files: tuple[File, ...]
    inside: str | None = None


@dataclass(frozen=True)
class Entry:
    """One dataset. `train` and `test` count samples; `folders` are searched, in order, below each place."""

    name: str
    title: str
    train: int | None
    test: int | None
    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    writers: bool = False
    embedded: bool = False
    folders: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    system_folder: str | None = None
    system_package: str | None = None
    advice: str | None = None

    @property
    def files(self) -> tuple[File, ...]:
        """All its official files."""
        return tuple(file for download in self.downloads for file in download.files)


def _gzipped(mirrors: tuple[str, ...], *files: File) -> tuple[Download, ...]:
    return tuple(Download(f"{file.name}.gz", mirrors, (file,)) for file in files)


_FASHION_MNIST = _gzipped(
    (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com",
    ),
    File(
        "train-images-idx3-ubyte",
        47_040_016,
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    File("train-labels-idx1-ubyte", 60_008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    File(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    File("t10k-labels-idx1-ubyte", 10_008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
)

_MNIST = _gzipped(
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
        "https://sagemaker-sample-files.s3.amazonaws.com/datasets/image/MNIST",
    ),
    File(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    File("train-labels-idx1-ubyte", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    File(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    File("t10k-labels-idx1-ubyte", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)

_QMNIST_LABELS = _gzipped(
    (
        "https://raw.githubusercontent.com/facebookresearch/qmnist/main",
        "https://github.com/facebookresearch/qmnist/raw/master",
    ),
    File(
        "qmnist-train-labels-idx2-int",
        1_920_012,
        "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
    ),
    File(
        "qmnist-test-labels-idx2-int",
        1_920_012,
        "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd",
    ),
)

_CIFAR10 = (
    Download(
        "cifar-10-binary.tar.gz",
        (
            "https://www.cs.toronto.edu/~kriz",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10",
        ),
        tuple(
            File(name, 30_730_000, digest)
            for name, digest in (
                ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
                ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
                ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
                ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
                ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
                ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
            )
        ),
        inside="cifar-10-batches-bin",
    ),
)

# The constants of digits and femnist were measured on their training parts (femnist: 300 writers of LEAF).
ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="digits",
            title="8x8 digits, embedded",
            train=1438,
            test=359,
            classes=10,
            shape=(1, 8, 8),
            mean=(0.3044,),
            std=(0.3757,),
            scale=16.0,
            embedded=True,
            advice="digits is embedded: it comes with scikit-learn, there is nothing to fetch",
        ),
        Entry(
            name="fashion-mnist",
            title="Fashion-MNIST",
            train=60_000,
            test=10_000,
            classes=10,
            shape=(1, 28, 28),
            mean=(0.2860,),
            std=(0.3530,),
            folders=("fashion-mnist", "."),
            downloads=_FASHION_MNIST,
            system_folder="/usr/share/datasets/fashion-mnist",
            system_package="dataset-fashion-mnist",
        ),
        Entry(
            name="mnist",
            title="MNIST",
            train=60_000,
            test=10_000,
            classes=10,
            shape=(1, 28, 28),
            mean=(0.1307,),
            std=(0.3081,),
            folders=("mnist", "."),
            downloads=_MNIST,
        ),
        Entry(
            name="mnist-writers",
            title="MNIST with QMNIST's writers",
            train=60_000,
            test=10_000,
            classes=10,
            shape=(1, 28, 28),
            mean=(0.1307,),
            std=(0.3081,),
            writers=True,
            folders=("mnist-writers", ".", "mnist", "qmnist", "../mnist"),
            downloads=_MNIST + _QMNIST_LABELS,
        ),
        Entry(
            name="femnist",
            title="FEMNIST (LEAF)",
            train=None,
            test=None,
            classes=62,
            shape=(1, 28, 28),
            mean=(0.9615,),
            std=(0.1642,),
            writers=True,
            folders=("femnist/data", "femnist", "data/femnist/data", "data", "."),
            advice=(
                "femnist is made by LEAF's own scripts (https://github.com/TalwalkarLab/leaf): "
                "run there `cd data/femnist && ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample`, "
                "then give that folder with --folder DIR or SPARK_DATA=DIR"
            ),
        ),
        Entry(
            name="cifar10",
            title="CIFAR-10 (binary version)",
            train=50_000,
            test=10_000,
            classes=10,
            shape=(3, 32, 32),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            folders=("cifar10", "cifar10/cifar-10-batches-bin", ".", "cifar-10-batches-bin"),
            downloads=_CIFAR10,
        ),
    )
}


def entry(name: str) -> Entry:
    """The dataset called `name`, or a DataError that says which there are."""
    if name in ENTRIES:
        return ENTRIES[name]
    close = difflib.get_close_matches(name, ENTRIES, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    raise DataError(f"unknown dataset {name!r}{meant} (there are: {', '.join(ENTRIES)})")


def owners(sha256: str) -> Iterator[str]:
    """The datasets that have an official file with this digest."""
    return (e.name for e in ENTRIES.values() for file in e.files if file.sha256 == sha256)
