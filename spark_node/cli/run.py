"""`spark-dfl run`: train a network on this machine, show it live, write a run folder."""

import argparse
import contextlib
import json
import shlex
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_node import config as configuration
from spark_node.config import Config
from spark_node.distributed.place import Place, device_of, place_of
from spark_node.errors import ConfigError, OutOfMemory, UserError
from spark_node.memory import ran_out
from spark_node.privacy import refuse_hidden

if TYPE_CHECKING:
    from spark_node.data.datasets import Dataset
    from spark_node.data.partitions import Partition
    from spark_node.launch.observation import LivePage
    from spark_node.observe.display import Display
    from spark_node.observe.history import Run
    from spark_node.observe.run_folder import RunFolder

EXIT_CODES = {"complete": 0, "failed": 1, "interrupted": 130}
ERROR_LOG = "error.log"
ANY_PORT = -1
"""--dashboard without a port: the usual one, or where that is taken, a free one."""

_GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "the network": {
        "--algorithm": ("run.algorithm", "NAME"),
        "--nodes": ("run.nodes", "N"),
        "--rounds": ("run.rounds", "R"),
        "--topology": ("topology.kind", "KIND"),
        "--degree": ("topology.degree", "K"),
        "--kernel": ("learning.kernel", "KIND"),
        "--seed": ("run.seed", "SEED"),
    },
    "the data": {
        "--dataset": ("data.dataset", "NAME"),
        "--data-dir": ("data.folder", "DIR"),
        "--partition": ("data.partition", "HOW"),
    },
    "the machine": {
        "--transport": ("run.transport", "NAME"),
        "--device": ("run.device", "NAME"),
        "--workers": ("run.workers", "N"),
        "--certs": ("security.certs", "DIR"),
    },
}
FLAGS = {flag: key for group in _GROUPS.values() for flag, (key, _) in group.items()}

_DESCRIPTION = """\
Train a network of peers on this machine, show its progress live and write a run folder: config.toml,
rounds.jsonl, summary.json, plots/ and report.html. Settings come from, weakest first: defaults, --preset,
--config, environment (SPARK_SECTION__KEY=value), flags and --set. The defaults of [local] are those that were
published for the algorithm; --settings lists them."""

_EPILOG = """\
examples:
  spark-dfl run --preset demo
  spark-dfl run --preset paper --data-dir /data/fashion-mnist --rounds 5
  spark-dfl run --algorithm ntk-dfl --nodes 50 --degree 6 --partition dirichlet:0.1
  spark-dfl run --algorithm dfedavg --set local.epochs=5   DFedAvg as published, with fewer epochs
  spark-dfl run --set learning.eta=0.02 --set model.hidden=[200,100] --out runs/wide
  spark-dfl run --config runs/wide/config.toml          the same run again
  spark-dfl run --resume runs/wide                      go on after a crash, a kill or Ctrl-C
  spark-dfl run --preset demo --quiet --json            only the summary, as JSON, on stdout
  torchrun --nproc-per-node 4 -m spark_node run --transport memory --device cuda --preset paper
                                                        the peers spread over four GPUs (docs/operations.md)

exit codes: 0 done, 1 the run failed, 2 bad usage or bad input, 130 interrupted (finished rounds are kept)"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `run` command."""
    parser = subparsers.add_parser(
        "run",
        usage="%(prog)s [--preset NAME] [--config FILE] [--set SECTION.KEY=VALUE ...] [FLAG ...]",
        help="train a network on this machine and write a run folder",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sources = add_sources(parser)
    sources.add_argument("--settings", action="store_true", help="list every setting and exit")
    sources.add_argument(
        "--resume", metavar="RUN", help="go on with the run in this folder, with its own settings, from its checkpoints"
    )
    for title, flags in _GROUPS.items():
        add_flags(parser, title, flags)
    add_output(parser)
    add_dashboard(parser)
    parser.set_defaults(func=command)


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    """The live page, for any command that follows a run."""
    group = parser.add_argument_group("the live page")
    where = "serve a live page of the run to browsers on this machine (default port: 7420; 0 = a free one)"
    group.add_argument("--dashboard", metavar="PORT", nargs="?", type=port, const=ANY_PORT, help=where)
    add_dashboard_host(group)


def add_dashboard_host(group: "argparse._ActionsContainer") -> None:
    """Where the live page listens."""
    host = "serve it there instead of on the loopback; everyone who can connect can look"
    group.add_argument("--dashboard-host", metavar="HOST", default="127.0.0.1", help=host)


def open_page(args: argparse.Namespace, *, stays: bool = False) -> "LivePage | None":
    """The socket of the live page, where one is asked for; says where it is."""
    if args.dashboard is None:
        return None
    from spark_node.launch.observation import LivePage
    from spark_node.observe import dashboard

    listener = dashboard.bind(args.dashboard_host, None if args.dashboard == ANY_PORT else args.dashboard)
    for line in (dashboard.warning(args.dashboard_host), f"live page: {dashboard.address(listener)}"):
        if line:
            print(f"spark-dfl: {line}", file=sys.stderr, flush=True)
    return LivePage(listener, args.dashboard_host, stays)


def port(text: str) -> int:
    """A port as it is given on the command line."""
    if not (text.isascii() and text.isdecimal() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; allowed: 0 (a free one) to 65535")
    return int(text)


def add_output(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """What a command takes that shows a run and writes its folder."""
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="DIR", help="run folder (default: runs/DATASET-ALGORITHM-TIME)")
    output.add_argument("--quiet", action="store_true", help="no live view, only one line with the answer, on stderr")
    output.add_argument("--json", action="store_true", help="print summary.json on stdout at the end")
    output.add_argument(
        "--no-report", action="store_true", help="no plots and no report.html; `spark-dfl report` makes them later"
    )
    return output


def command(args: argparse.Namespace) -> int:
    """Check everything, run, write the run folder, give the answer."""
    if args.settings:
        return _list_settings(as_json=args.json)
    from spark_node import topology
    from spark_node.observe import display
    from spark_node.observe.run_folder import RunFolder, check_is_free

    place = place_of()
    if place is not None and place.rank > 0:
        return _follow(args, place)
    resumed = _to_resume(args)
    config = load_config(args) if resumed is None else _with_secret(resumed.config)
    refuse_hidden(config.privacy.sketch_secret)
    if place is not None:
        from spark_node.distributed.spread import check_spread

        check_spread(config, place)
    path = new_folder(args.out, config) if resumed is None else resumed.path
    if resumed is None:
        check_is_free(path)
    topology.check(config.topology.kind, config.run.nodes, config.topology.degree)
    if args.dashboard is not None and config.run.transport == "memory":
        raise ConfigError("--dashboard shows peers that are processes; leave it out, or --transport memory")
    page = open_page(args)
    with display.choose(config, quiet=args.quiet, silent=args.quiet and args.json) as shown:
        from spark_node.launch.devices import check_device

        check_device(config.run.device if place is None else device_of(config.run.device, place))
        dataset, partition = deal(config)
        counts = label_counts(config, dataset, partition)
        folder = RunFolder(path, config, command=command_line(args), label_counts=counts, resumed=resumed)
        status, failure = _train(config, dataset, partition, folder, shown, page, place)
        return conclude(args, folder, shown, status, failure)


def conclude(
    args: argparse.Namespace, folder: "RunFolder", shown: "Display", status: str, failure: Exception | None
) -> int:
    """Write what is left to write and give the answer; the exit code."""
    shown.note("Writing the report")
    run = folder.finish(status)
    report = None if args.no_report else write_report(run)
    shown.finished(run, report)
    if failure is not None:
        _complain(f"the run failed: {reason(failure)}; {folder.path / ERROR_LOG} has the details")
    if args.json:
        print(json.dumps(run.summary, indent=2))
    return EXIT_CODES[status]


def _to_resume(args: argparse.Namespace) -> "Run | None":
    """The run that --resume names. It keeps its settings: another setting would be another run."""
    if args.resume is None:
        return None
    from spark_node.observe.run_folder import load_resumable

    given = [flag for flag, key in FLAGS.items() if getattr(args, key, None) is not None]
    given += [f"--{name}" for name in ("preset", "config", "set", "out") if getattr(args, name)]
    if given:
        raise ConfigError(f"--resume takes the settings of its run; leave out {', '.join(given)}")
    return load_resumable(Path(args.resume))


def _with_secret(config: Config) -> Config:
    """A run's own settings, with the secret that its folder does not hold from the environment."""
    given = configuration.environment_layer().get("privacy.sketch_secret")
    return config if given is None else config.replace(privacy__sketch_secret=given)


def load_config(args: argparse.Namespace) -> Config:
    """The effective configuration of the given flags, of whichever a command has; ConfigError where they are wrong."""
    return configuration.load(args.preset, args.config and Path(args.config), flags=given_settings(args))


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What flags and --set set, as {"section.key": value}; ConfigError where a setting is given twice."""
    types = {setting.key: setting.type for setting in configuration.settings()}
    given: dict[str, Any] = {}
    for key in FLAGS.values():
        raw = getattr(args, key, None)
        if raw is not None:
            given[key] = raw if types[key] == "str" else configuration.parse_assignment(f"{key}={raw}")[1]
    for assignment in args.set:
        key, value = configuration.parse_assignment(assignment)
        flag = next((flag for flag, its in FLAGS.items() if its == key), None)
        if flag is not None and getattr(args, key, None) is not None:
            raise ConfigError(f"{key} is given twice, by {flag} and by --set {assignment}; give it once")
        given[key] = value
    return given


def reason(error: BaseException) -> str:
    """The first cause of a failure on one line; groups of concurrent failures are looked into."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = " ".join(str(error).split())
    if isinstance(error, (UserError, OutOfMemory)):
        return said
    if ran_out(error):
        less = "fewer peers at once (run.workers), fewer samples (data.samples_per_node) or a smaller model take less"
        return f"out of memory ({said or type(error).__name__}); {less}"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def add_sources(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """--preset, --config and --set, for any command that takes a configuration."""
    sources = parser.add_argument_group("where settings come from")
    sources.add_argument("--preset", metavar="NAME", help=f"one of: {', '.join(configuration.presets())}")
    sources.add_argument("--config", metavar="FILE", help="a TOML file, for example the config.toml of another run")
    sources.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="any setting; may be repeated"
    )
    return sources


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[str]) -> None:
    """Some of the flags that set one setting each, as a group; `load_config` reads them."""
    known = {setting.key: setting for setting in configuration.settings()}
    group = parser.add_argument_group(title)
    for flag in flags:
        key, metavar = _GROUPS[title][flag]
        group.add_argument(flag, metavar=metavar, dest=key, help=_help(known[key]))


def _help(setting: configuration.Setting) -> str:
    default = f"default: {setting.default}" if setting.default != "" else ""
    allowed = "" if setting.allowed == "text" else f"allowed: {setting.allowed}"
    notes = "; ".join(note for note in (allowed, default) if note)
    return f"{setting.help} ({notes})".replace("%", "%%") if notes else setting.help.replace("%", "%%")


def new_folder(out: str | None, config: Config) -> Path:
    if out is not None:
        return Path(out)
    stem = f"{config.data.title}-{config.run.algorithm.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = Path("runs", stem), 1
    while path.exists():
        count += 1
        path = Path("runs", f"{stem}-{count}")
    return path


def deal(config: Config) -> "tuple[Dataset, Partition]":
    """The dataset, and who holds which of its samples."""
    from spark_node.data.datasets import load
    from spark_node.data.partitions import partition

    settings = config.data
    dataset = load(settings.dataset, Path(settings.folder) if settings.folder else None)
    dealt = partition(
        settings.partition,
        dataset,
        config.run.nodes,
        samples_per_node=settings.samples_per_node,
        disjoint=settings.disjoint,
        seed=config.run.seed,
    )
    return dataset, dealt


def command_line(args: argparse.Namespace) -> str:
    """The command as it was given, for whoever wants to repeat it."""
    return shlex.join(["spark-dfl", *configuration.without_secret_arguments(args.argv)])


def label_counts(config: Config, dataset: "Dataset", partition: "Partition") -> list[list[int]]:
    """How many samples of each label each peer holds; nothing where labels are private."""
    import numpy as np

    if config.privacy.label_epsilon:
        return []
    labels = dataset.train.labels
    return [np.bincount(labels[own], minlength=dataset.classes).tolist() for own in partition.indices]


def _follow(args: argparse.Namespace, place: Place) -> int:
    """Every other rank of a run under torchrun: train this rank's peers; rank 0 shows and writes."""
    from spark_node.distributed.spread import check_spread, run_spread
    from spark_node.launch.devices import check_device
    from spark_node.observe.run_folder import CONFIG

    file = Path(args.resume, CONFIG) if args.resume else None
    config = load_config(args) if file is None else _with_secret(configuration.load(file=file, environment={}))
    check_spread(config, place)
    check_device(device_of(config.run.device, place))
    dataset, partition = deal(config)
    try:
        run_spread(config, dataset, partition, place)
    except KeyboardInterrupt:
        return EXIT_CODES["interrupted"]
    except UserError:
        raise
    except Exception as error:
        _complain(f"rank {place.rank}: {reason(error)}")
        return EXIT_CODES["failed"]
    return EXIT_CODES["complete"]


def _train(
    config: Config,
    dataset: "Dataset",
    partition: "Partition",
    folder: "RunFolder",
    shown: "Display",
    page: "LivePage | None",
    place: Place | None,
) -> tuple[str, Exception | None]:
    """How the run ended, and why if it failed; an error from before its start is raised as it is."""
    from spark_node.checkpoint import keep_newest
    from spark_node.observe.run_folder import CHECKPOINTS
    from spark_node.observe.watchers import Together

    watchers = Together(folder, shown)
    try:
        if place is not None:
            from spark_node.distributed.spread import run_spread

            kept = folder.path, folder.run_id, folder.recorded
            run_spread(config, dataset, partition, place, watchers, *kept)
        elif config.run.transport == "memory":
            from spark_node.launch.memory import run_in_memory

            run_in_memory(config, dataset, partition, watchers, folder.path, folder.run_id, folder.recorded)
        else:
            from spark_node.launch.network import run_network

            run_network(
                config,
                dataset,
                partition,
                watchers,
                folder.path,
                run_id=folder.run_id,
                recorded=folder.recorded,
                page=page,
            )
    except KeyboardInterrupt:
        if not folder.has_started:
            raise
        return "interrupted", None
    except Exception as error:
        if not folder.has_started:
            raise
        log_failure(error, folder.path)
        return "failed", error
    keep_newest(folder.path / CHECKPOINTS)
    return "complete", None


def write_report(run: "Run") -> Path | None:
    """The report; a run that went well is not lost to a plot that did not."""
    try:
        from spark_node.observe import report

        return report.write_report(run)
    except (Exception, KeyboardInterrupt) as error:
        _complain(f"no report: {reason(error)}; try again with: spark-dfl report {shlex.quote(str(run.path))}")
        return None


def log_failure(error: Exception, folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / ERROR_LOG).write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def _complain(message: str) -> None:
    print(f"spark-dfl: error: {message}", file=sys.stderr)


def _list_settings(as_json: bool) -> int:
    known = configuration.settings()
    if as_json:
        print(json.dumps([vars(setting) for setting in known], indent=2))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 200
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True, style="cyan")
    table.add_column("default", overflow="fold")
    table.add_column("allowed", overflow="fold", style="dim")
    table.add_column("meaning")
    for index, setting in enumerate(known):
        section = setting.key.partition(".")[0]
        if index and not known[index - 1].key.startswith(f"{section}."):
            table.add_section()
        table.add_row(setting.key, _shown(setting.default), setting.allowed, setting.help)
    console.print(table, markup=False)
    how = "Set one with --set KEY=VALUE, in a TOML file as [section] key = VALUE (--config FILE), or as"
    console.print(how, markup=False)
    console.print("SPARK_SECTION__KEY=VALUE in the environment.", markup=False)
    console.print("\nDefaults that are an algorithm's own, as published:")
    for algorithm, own in configuration.PUBLISHED.items():
        console.print(f"  {algorithm}: {', '.join(f'{key} = {value}' for key, value in own.items())}", markup=False)
    return 0


def _shown(default: configuration.Value) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return str(list(default))
    return '""' if default == "" else str(default)
