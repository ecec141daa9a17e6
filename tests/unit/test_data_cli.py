"""`spark-dfl data` and its downloads, against a mirror in this process. Nothing leaves the machine."""

import argparse
import gzip
import hashlib
import io
import json
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spark_node.cli.data import add_parser
from spark_node.data import catalogue
from spark_node.data.catalogue import Download, Entry, File
from spark_node.data.datasets import load
from spark_node.data.fetch import FetchFailed, fetch
from spark_node.errors import DataError


@dataclass
class Mirror:
    """A web server and how it misbehaves."""

    files: dict[str, bytes]
    ranges: bool = True
    break_after: int | None = None
    claim: int | None = None
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    mirror: Mirror

    def do_GET(self) -> None:
        mirror, name, wanted = self.mirror, self.path.rpartition("/")[2], self.headers.get("Range")
        mirror.asked.append((name, wanted))
        if name not in mirror.files:
            self.send_error(404)
            return
        content, start = mirror.files[name], 0
        if wanted and mirror.ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(mirror.claim or len(content) - start))
        self.end_headers()
        stop = len(content) if mirror.break_after is None else start + mirror.break_after
        self.wfile.write(content[start:stop])
        mirror.break_after = None

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def idx(labels: list[int]) -> bytes:
    return b"\0\0\x08\x01" + struct.pack(">I", len(labels)) + bytes(labels)


def images(count: int) -> bytes:
    return b"\0\0\x08\x03" + struct.pack(">3I", count, 28, 28) + bytes(n % 251 for n in range(count * 784))


MNIST = {
    "train-images-idx3-ubyte": images(6),
    "train-labels-idx1-ubyte": idx([0, 1, 2, 3, 4, 5]),
    "t10k-images-idx3-ubyte": images(2),
    "t10k-labels-idx1-ubyte": idx([6, 7]),
}
GZIPPED = {f"{name}.gz": gzip.compress(content) for name, content in MNIST.items()}
FIRST = "train-images-idx3-ubyte.gz"
CIFAR = {f"data_batch_{n}.bin": bytes([n]) * 3073 for n in range(1, 6)} | {"test_batch.bin": bytes([6]) * 3073}


def official(name: str, content: bytes) -> File:
    return File(name, len(content), hashlib.sha256(content).hexdigest())


def tarred(members: dict[str, bytes], *links: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def small_catalogue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real names, with small official files and no mirror but the test's; an empty cache, no packages."""
    monkeypatch.delenv("SPARK_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("no_proxy", "*")
    downloads = tuple(Download(f"{n}.gz", (), (official(n, c),)) for n, c in MNIST.items())
    batches = tuple(official(n, c) for n, c in CIFAR.items())
    archive = Download("cifar-10-binary.tar.gz", (), batches, inside="cifar-10-batches-bin")
    replace_entry(monkeypatch, "mnist", downloads=downloads)
    replace_entry(monkeypatch, "fashion-mnist", system_folder=str(tmp_path / "debian"))
    replace_entry(monkeypatch, "cifar10", downloads=(archive,))


def replace_entry(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> Entry:
    entry = replace(catalogue.ENTRIES[name], **changes)
    monkeypatch.setitem(catalogue.ENTRIES, name, entry)
    return entry


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    mirror = Mirror(dict(GZIPPED))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"mirror": mirror}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}/data"
    yield mirror
    server.shutdown()
    server.server_close()


def parts(folder: Path) -> list[Path]:
    return list(folder.rglob("*.part"))


def spark_dfl(*words: str | Path) -> int:
    parser = argparse.ArgumentParser(prog="spark-dfl")
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["data", *map(str, words)])
    code: int = args.func(args)
    return code


class TestFetch:
    def test_files_land_in_a_folder_of_the_dataset_and_load(self, mirror: Mirror, tmp_path: Path) -> None:
        seen: list[tuple[str, int, int | None]] = []
        fetched = fetch("mnist", tmp_path, mirror=mirror.url, report=lambda *step: seen.append(step))
        assert [f.status for f in fetched] == ["fetched"] * 4
        assert fetched[0].path == tmp_path / "mnist" / FIRST
        assert load("mnist", tmp_path).train.labels.tolist() == [0, 1, 2, 3, 4, 5]
        assert not parts(tmp_path)
        assert (FIRST, len(GZIPPED[FIRST]), len(GZIPPED[FIRST])) in seen

    def test_without_a_folder_they_land_in_the_cache(self, mirror: Mirror, tmp_path: Path) -> None:
        fetch("mnist", mirror=mirror.url)
        assert (tmp_path / "cache/spark-dfl/data/mnist" / FIRST).is_file()
        assert len(load("mnist").test) == 2

    def test_folder_named_like_the_dataset_is_taken_as_it_is(self, mirror: Mirror, tmp_path: Path) -> None:
        fetch("mnist", tmp_path / "mnist", mirror=mirror.url)
        assert (tmp_path / "mnist" / FIRST).is_file()

    def test_good_files_are_left_alone_and_bad_ones_replaced(self, mirror: Mirror, tmp_path: Path) -> None:
        fetch("mnist", mirror=mirror.url)
        mirror.asked.clear()
        assert {f.status for f in fetch("mnist", mirror=mirror.url)} == {"already there"}
        assert mirror.asked == []
        (tmp_path / "cache/spark-dfl/data/mnist" / FIRST).write_bytes(b"damaged")
        assert [f.status for f in fetch("mnist", mirror=mirror.url)] == ["fetched"] + ["already there"] * 3
        assert mirror.asked == [(FIRST, None)]

    def test_good_files_elsewhere_are_not_fetched_again(
        self, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetch("mnist", tmp_path / "root", mirror=mirror.url)
        mirror.asked.clear()
        monkeypatch.setenv("SPARK_DATA", str(tmp_path / "root"))
        assert fetch("mnist", mirror=mirror.url)[0].path == tmp_path / "root/mnist" / FIRST
        assert mirror.asked == []

    def test_broken_connection_is_resumed_where_it_stopped(self, mirror: Mirror, tmp_path: Path) -> None:
        mirror.break_after = 20
        fetch("mnist", tmp_path, mirror=mirror.url)
        assert mirror.asked[:2] == [(FIRST, None), (FIRST, "bytes=20-")]
        assert (tmp_path / "mnist" / FIRST).read_bytes() == GZIPPED[FIRST]

    def test_part_of_an_earlier_try_is_resumed(self, mirror: Mirror, tmp_path: Path) -> None:
        part = self.leave_part(mirror, tmp_path, GZIPPED[FIRST][:30])
        fetch("mnist", tmp_path, mirror=mirror.url)
        assert mirror.asked[0] == (FIRST, "bytes=30-")
        assert not part.exists()

    def test_part_that_is_already_whole_is_kept(self, mirror: Mirror, tmp_path: Path) -> None:
        self.leave_part(mirror, tmp_path, GZIPPED[FIRST])
        fetch("mnist", tmp_path, mirror=mirror.url)
        assert [asked for asked in mirror.asked if asked[0] == FIRST] == [(FIRST, f"bytes={len(GZIPPED[FIRST])}-")]

    @pytest.mark.parametrize("part", [b"z" * 30, b"z" * 5000], ids=["shorter", "longer"])
    def test_part_that_does_not_fit_is_started_afresh(self, mirror: Mirror, tmp_path: Path, part: bytes) -> None:
        self.leave_part(mirror, tmp_path, part)
        fetch("mnist", tmp_path, mirror=mirror.url)
        assert mirror.asked[1] == (FIRST, None)
        assert (tmp_path / "mnist" / FIRST).read_bytes() == GZIPPED[FIRST]

    def test_server_that_ignores_ranges_sends_all_again(self, mirror: Mirror, tmp_path: Path) -> None:
        mirror.ranges = False
        self.leave_part(mirror, tmp_path, GZIPPED[FIRST][:30])
        fetch("mnist", tmp_path, mirror=mirror.url)
        assert (tmp_path / "mnist" / FIRST).read_bytes() == GZIPPED[FIRST]

    def test_next_mirror_is_tried_when_one_fails(
        self, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = catalogue.ENTRIES["mnist"]
        mirrors = ("http://127.0.0.1:1", mirror.url)
        replace_entry(monkeypatch, "mnist", downloads=tuple(replace(d, mirrors=mirrors) for d in entry.downloads))
        assert len(fetch("mnist", tmp_path)) == 4

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (gzip.compress(images(7)), "holds more than the 4720 bytes expected"),
            (gzip.compress(images(6)[:-1] + b"!"), "sha256 .* expected"),
            (b"<html>not found</html>", "sha256 .* expected"),
            (gzip.compress(images(6))[:-4], "cut off or damaged"),
            (gzip.compress(bytes(1 << 24)), "holds more than the 4720 bytes expected"),
            (bytes(1 << 21), "it offers 2097152 bytes where at most"),
        ],
        ids=["longer", "wrong-digest", "html", "cut-off", "bomb", "larger-offer"],
    )
    def test_what_is_not_the_official_file_never_gets_its_name(
        self, mirror: Mirror, tmp_path: Path, content: bytes, problem: str
    ) -> None:
        mirror.files[FIRST] = content
        with pytest.raises(FetchFailed, match=problem):
            fetch("mnist", tmp_path, mirror=mirror.url)
        assert list((tmp_path / "mnist").iterdir()) == []

    def test_server_that_keeps_breaking_off_is_given_up(self, mirror: Mirror, tmp_path: Path) -> None:
        mirror.claim = len(GZIPPED[FIRST]) + 1000
        mirror.ranges = False
        with pytest.raises(FetchFailed, match=r"the connection ended after \d+ of \d+ bytes"):
            fetch("mnist", tmp_path, mirror=mirror.url)
        assert len(mirror.asked) <= 4

    def test_absent_file_and_dead_network_are_explained(self, mirror: Mirror, tmp_path: Path) -> None:
        del mirror.files[FIRST]
        with pytest.raises(FetchFailed, match=r"HTTP 404 .*--mirror URL, or put the file into .*/mnist by hand"):
            fetch("mnist", tmp_path, mirror=mirror.url)
        with pytest.raises(FetchFailed, match="Connection refused"):
            fetch("mnist", tmp_path, mirror="http://127.0.0.1:1")

    def test_mirror_must_be_a_web_address(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="mirror 'file:///etc' is not an address"):
            fetch("mnist", tmp_path, mirror="file:///etc")

    def test_folder_that_cannot_be_made_is_explained(self, mirror: Mirror, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(FetchFailed, match="cannot be written"):
            fetch("mnist", tmp_path / "file", mirror=mirror.url)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_full_disk_is_explained(self, mirror: Mirror, tmp_path: Path) -> None:
        part = self.leave_part(mirror, tmp_path, b"")
        part.unlink()
        part.symlink_to("/dev/full")
        with pytest.raises(FetchFailed, match=r"cannot be written \(No space left on device\)"):
            fetch("mnist", tmp_path, mirror=mirror.url)

    def test_name_that_is_taken_by_a_folder_is_explained(self, mirror: Mirror, tmp_path: Path) -> None:
        (tmp_path / "mnist" / FIRST).mkdir(parents=True)
        with pytest.raises(FetchFailed, match="cannot be written"):
            fetch("mnist", tmp_path, mirror=mirror.url)

    @staticmethod
    def leave_part(mirror: Mirror, folder: Path, content: bytes) -> Path:
        """What an interrupted fetch from this mirror leaves behind."""
        digest = hashlib.sha256(f"{mirror.url}/{FIRST}".encode()).hexdigest()[:8]
        path = folder / "mnist" / f".{FIRST}.{digest}.part"
        path.parent.mkdir()
        path.write_bytes(content)
        return path


class TestFetchCifar10:
    NAME = "cifar-10-binary.tar.gz"
    MEMBERS = {f"cifar-10-batches-bin/{name}": content for name, content in CIFAR.items()}  # noqa: RUF012

    def test_expected_members_are_taken_out_and_nothing_else(self, mirror: Mirror, tmp_path: Path) -> None:
        evil = {
            "../evil": b"x",
            "/tmp/evil": b"x",
            "cifar-10-batches-bin/readme.html": b"x",
            "data_batch_1.bin": b"x",
        }
        mirror.files[self.NAME] = tarred(evil | self.MEMBERS, "cifar-10-batches-bin/link")
        assert len(fetch("cifar10", tmp_path / "root", mirror=mirror.url)) == 6
        assert sorted(p.name for p in (tmp_path / "root").rglob("*") if p.is_file()) == sorted(CIFAR)
        assert not (tmp_path / "evil").exists()
        assert load("cifar10", tmp_path / "root").train.labels.tolist() == [1, 2, 3, 4, 5]
        assert {f.status for f in fetch("cifar10", tmp_path / "root", mirror=mirror.url)} == {"already there"}

    @pytest.mark.parametrize("where", ["cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "."])
    def test_damaged_copy_is_mended_wherever_it_lies(self, mirror: Mirror, tmp_path: Path, where: str) -> None:
        (tmp_path / where).mkdir(parents=True, exist_ok=True)
        for name in CIFAR:
            (tmp_path / where / name).write_bytes(b"damaged")
        mirror.files[self.NAME] = tarred(self.MEMBERS)
        fetch("cifar10", tmp_path, mirror=mirror.url)
        assert len(load("cifar10", tmp_path).train) == 5

    @pytest.mark.parametrize(
        ("archive", "problem"),
        [
            (tarred({}), "lacks cifar-10-batches-bin/data_batch_1.bin"),
            (tarred({"cifar-10-batches-bin/data_batch_1.bin": b"short"}), "lacks .*data_batch_1.bin"),
            (tarred({}, "cifar-10-batches-bin/data_batch_1.bin"), "lacks .*data_batch_1.bin"),
            (tarred({"cifar-10-batches-bin/data_batch_1.bin": bytes(3073)}), "sha256 .* expected"),
            (tarred({"bomb": bytes(1 << 23)}), "unpacks to more bytes than expected"),
            (tarred(MEMBERS)[:-40], "archive is damaged"),
            (b"no archive", "archive is damaged"),
            (gzip.compress(b"no tar" * 999), "archive is damaged"),
        ],
        ids=["empty", "short-member", "link", "wrong-digest", "bomb", "cut-off", "no-archive", "no-tar"],
    )
    def test_bad_archive_is_refused(self, mirror: Mirror, tmp_path: Path, archive: bytes, problem: str) -> None:
        mirror.files[self.NAME] = archive
        with pytest.raises(FetchFailed, match=problem):
            fetch("cifar10", tmp_path, mirror=mirror.url)
        assert not parts(tmp_path)


class TestCommand:
    def test_list_shows_every_dataset_and_how_to_get_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert spark_dfl("list") == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in catalogue.ENTRIES)
        assert "embedded" in shown
        assert "spark-dfl data fetch mnist" in shown

    def test_list_as_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert spark_dfl("list", "--json") == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["datasets"]}
        assert list(rows) == list(catalogue.ENTRIES)
        assert rows["cifar10"]["shape"] == [3, 32, 32]
        assert rows["mnist"]["path"] is None
        assert rows["digits"]["embedded"]

    def test_locate_fails_until_the_dataset_is_there(
        self, mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert spark_dfl("locate", "mnist") == 1
        captured = capsys.readouterr()
        assert "cache/spark-dfl/data/mnist" in captured.out
        assert "run: spark-dfl data fetch mnist" in captured.err
        assert spark_dfl("fetch", "mnist", "--folder", tmp_path, "--mirror", mirror.url) == 0
        capsys.readouterr()
        assert spark_dfl("locate", "mnist", "--folder", tmp_path, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["found"] == str(tmp_path / "mnist")
        assert answer["places"][0]["found"]

    def test_fetch_as_json(self, mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
        assert spark_dfl("fetch", "mnist", "--mirror", mirror.url, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["ok"]
        assert [row["status"] for row in answer["files"]] == ["fetched"] * 4
        mirror.files.clear()
        assert spark_dfl("fetch", "cifar10", "--mirror", mirror.url, "--json") == 1
        assert "HTTP 404" in json.loads(capsys.readouterr().out)["error"]

    def test_fetch_that_fails_says_why_and_exits_with_1(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert spark_dfl("fetch", "mnist", "--mirror", "http://127.0.0.1:1") == 1
        assert "no mirror delivered it" in capsys.readouterr().err

    def test_digits_need_no_fetch(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert spark_dfl("fetch", "digits") == 0
        assert "digits is embedded" in capsys.readouterr().out
        assert spark_dfl("locate", "digits") == 0
        assert spark_dfl("verify", "digits") == 0

    def test_femnist_is_left_to_leaf(self) -> None:
        with pytest.raises(DataError, match=r"LEAF's own scripts .* --folder DIR or SPARK_DATA=DIR$"):
            spark_dfl("fetch", "femnist")

    def test_verify_tells_good_files_from_bad(
        self, mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert spark_dfl("verify", "mnist") == 1
        assert "mnist not found" in capsys.readouterr().err
        spark_dfl("fetch", "mnist", "--folder", tmp_path, "--mirror", mirror.url)
        assert spark_dfl("verify", "mnist", "--folder", tmp_path) == 0
        (tmp_path / "mnist" / FIRST).write_bytes(b"damaged")
        capsys.readouterr()
        assert spark_dfl("verify", "mnist", "--folder", tmp_path) == 1
        captured = capsys.readouterr()
        assert "BAD" in captured.out
        assert f"run: spark-dfl data fetch mnist --folder {tmp_path}" in captured.err
        assert spark_dfl("verify", "mnist", "--folder", tmp_path, "--json") == 1
        assert [row["ok"] for row in json.loads(capsys.readouterr().out)["files"]] == [
            False,
            True,
            True,
            True,
        ]

    @pytest.mark.parametrize("words", [[], ["fetch"], ["fetch", "minst"], ["nope"]])
    def test_bad_usage_exits_with_2(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            spark_dfl(*words)
        assert caught.value.code == 2
        assert "usage: spark-dfl data" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [[], ["list"], ["locate"], ["fetch"], ["verify"]])
    def test_help_teaches_by_example(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            spark_dfl(*words, "--help")
        assert caught.value.code == 0
        assert "example" in capsys.readouterr().out
