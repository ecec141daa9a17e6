"""`spark-dfl compare`: several algorithms or settings side by side, as tables, plots and one page."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_node import config as configuration
from spark_node.cli.run import FLAGS, add_flags, add_sources, given_settings
from spark_node.distributed.place import place_of
from spark_node.errors import UserError

if TYPE_CHECKING:
    from spark_node.compare.results import Results
    from spark_node.compare.study import Study

DONE, FAILED, INTERRUPTED = 0, 1, 130

_DESCRIPTION = """\
Run a grid of algorithms or settings, each point with several seeds and each run as a process of its own, several
side by side; then write the tables and plots that compare them. A grid is a study file (benchmarks/studies has one
for every table and figure of the paper) or is given by --algorithms, --partitions and --vary. Runs that are finished
are not run again: stop it when you like, and give the same command to go on."""

_EPILOG = """\
examples:
  spark-dfl compare benchmarks/studies/table1_rounds.toml --quick
  spark-dfl compare benchmarks/studies/*.toml --quick --out out      all of them, with an index
  spark-dfl compare --preset demo --algorithms spark,ntk-dfl --partitions iid,dirichlet:0.1 --seeds 0,1,2
  spark-dfl compare --preset demo --vary momentum.mu=0.5,0.9,0.99 --vary topology.degree=2,4
  spark-dfl compare benchmarks/studies/table1_rounds.toml --partitions file:a0.1.npz --seeds 0
  torchrun --nproc-per-node 4 -m spark_node compare ... --transport memory --device cuda
                                                     each run spread over four GPUs, one run after the other

DIR gets compare.html, compare.md, compare.csv, compare.json, plots/ and a run folder for each run in cells/.
exit codes: 0 done, 1 a run failed, 2 bad usage or a bad study file, 130 interrupted (what is finished is kept)"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `compare` command."""
    parser = subparsers.add_parser(
        "compare",
        usage="%(prog)s [STUDY.toml ...] [--quick] [--algorithms A,B] [--partitions P,Q] [--vary KEY=V,W] [FLAG ...]",
        help="several algorithms or settings side by side: tables and plots",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", metavar="STUDY.toml", nargs="*", help="study files; several get an index page")
    grid = parser.add_argument_group("the grid")
    grid.add_argument("--algorithms", metavar="A,B,...", help="algorithms; with a study, those of its algorithms")
    grid.add_argument("--partitions", metavar="P,Q,...", help="partitions: iid, dirichlet:ALPHA, writer, file:PATH")
    grid.add_argument(
        "--seeds", "--seed", metavar="S,T,...", help="seeds of every point (default: the study's, else 0)"
    )
    grid.add_argument(
        "--vary", metavar="SECTION.KEY=V,W,...", action="append", default=[], help="any setting; may be repeated"
    )
    grid.add_argument(
        "--quick", action="store_true", help="the study's quick size: embedded digits, few peers, minutes"
    )
    add_sources(parser)
    add_flags(parser, "the network", ("--algorithm", "--nodes", "--rounds", "--topology", "--degree", "--kernel"))
    add_flags(parser, "the data", ("--dataset", "--data-dir", "--partition"))
    add_flags(parser, "the machine", ("--transport", "--device", "--workers"))
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="DIR", help="folder (default: runs/compare-STUDY); the same one goes on")
    output.add_argument("--jobs", metavar="N", type=_positive, help="runs at once (default: as cores and memory allow)")
    output.add_argument("--reuse", metavar="DIR", action="append", default=[], help="take finished runs of DIR/*/cells")
    output.add_argument("--quiet", action="store_true", help="no progress, only the answer, on stderr")
    output.add_argument("--json", action="store_true", help="print compare.json on stdout at the end")
    parser.set_defaults(func=command)


def command(args: argparse.Namespace) -> int:
    """The comparison; under torchrun rank 0 keeps it, and each of its runs is spread over all ranks."""
    place = place_of()
    if place is None:
        return _compare(args)
    from spark_node.distributed.cells import follow_cells, leading_cells

    if place.rank > 0:
        follow_cells(place)
        return DONE
    if args.jobs not in (None, 1):
        raise UserError(f"--jobs {args.jobs}: under torchrun one run at a time is spread over all ranks; leave it out")
    with leading_cells(place) as cells:
        return _compare(args, {"announce": cells.announce, "ranks": place.local_size})


def _compare(args: argparse.Namespace, spread: Mapping[str, Any] | None = None) -> int:
    """Read every study before the first run; then one after the other."""
    studies = _studies(args)
    flags = _flags(args)
    for _, study in studies:
        study.cells(flags)
    several = len(studies) > 1
    root = Path(args.out) if args.out else None
    reuse = [Path(folder) for folder in args.reuse]
    finished: list[tuple[str, Results]] = []
    data: list[dict[str, Any]] = []
    code = DONE
    for name, study in studies:
        folder = (root / name if several else root) if root else Path("runs", f"compare-{name}")
        results, written, interrupted = _one(
            args, study, flags, folder, [*reuse, *([folder.parent] if several else [])], spread
        )
        finished.append((name, results))
        data.append(written)
        code = max(code, FAILED if results.failed else DONE)
        if interrupted:
            code = INTERRUPTED
            break
    if several:
        from spark_node.compare.output import write_index

        index = write_index(root or Path("runs"), [(n if root else f"compare-{n}", r) for n, r in finished])
        print(index, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(data if several else data[0], indent=2, ensure_ascii=False))
    return code


def _one(
    args: argparse.Namespace,
    study: "Study",
    flags: dict[str, Any],
    folder: Path,
    reuse: Sequence[Path],
    spread: Mapping[str, Any] | None,
) -> "tuple[Results, dict[str, Any], bool]":
    """Run one study and write what there is, whether or not it came to its end."""
    from spark_node.compare import output, progress
    from spark_node.compare.results import Results
    from spark_node.compare.runner import Runner

    jobs = 1 if spread else args.jobs or study.jobs
    runner = Runner(folder, study.cells(flags), jobs, reuse, **(spread or {}))
    with progress.choose(study.title, args.quiet) as shown:
        outcomes, interrupted = runner.run(shown)
    results = Results(study, outcomes, runner.jobs)
    command_line = shlex.join(["spark-dfl", *configuration.without_secret_arguments(args.argv)])
    data = output.write_results(results, folder, command_line)
    for outcome in results.failed:
        print(f"spark-dfl: failed: {outcome.cell.title}: {outcome.reason}", file=sys.stderr)
    if interrupted:
        left = len(results.missing)
        print(f"spark-dfl: interrupted with {left} runs to go; the same command goes on", file=sys.stderr)
    print(f"spark-dfl: {study.title}: {data['answer']}", file=sys.stderr)
    if not args.json:
        print(folder / output.PAGE)
    return results, data, interrupted


def _studies(args: argparse.Namespace) -> "list[tuple[str, Study]]":
    """The studies with their names, as files and flags give them."""
    from spark_node.compare.study import StudyError
    from spark_node.compare.study_file import load_study

    if not args.studies:
        if args.quick:
            raise UserError(
                "--quick: only a study file has a quick size; give one, or flags such as --nodes and --rounds"
            )
        return [_from_flags(args)]
    paths = list(dict.fromkeys(Path(name) for name in args.studies))
    names = [path.stem for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise StudyError(f"{twice}: two study files have this name; give them to two commands")
    if args.preset or args.config:
        raise UserError("--preset, --config: a study file has settings of its own; change them with flags or --set")
    return [
        (
            f"{path.stem}-quick" if args.quick and not args.out else path.stem,
            _changed(load_study(path, args.quick), args),
        )
        for path in paths
    ]


def _changed(study: "Study", args: argparse.Namespace) -> "Study":
    """A study of a file with what the grid's flags put in place of its own axes and seeds."""
    from spark_node.compare.study import only_algorithms, parse_vary, setting_axis, with_axis

    algorithms, partitions = _named(args, "algorithm"), _named(args, "partition")
    if algorithms:
        study = only_algorithms(study, algorithms)
    if partitions:
        study = with_axis(study, setting_axis("data.partition", partitions))
    for text in args.vary:
        study = with_axis(study, parse_vary(text))
    return replace(study, seeds=_seeds(args.seeds)) if args.seeds else study


def _from_flags(args: argparse.Namespace) -> "tuple[str, Study]":
    """A study without a file; its name is made of what it varies, so that the same command finds its folder."""
    from spark_node.compare.study import StudyError, ad_hoc, algorithm_axis, parse_vary, setting_axis, slug

    axes = []
    algorithms, partitions = _listed(args.algorithms), _listed(args.partitions)
    if algorithms:
        axes.append(algorithm_axis(algorithms))
    axes += [parse_vary(text) for text in args.vary]
    if partitions:
        axes.append(setting_axis("data.partition", partitions))
    if not axes:
        raise StudyError("nothing to compare: give a study file, or --algorithms, --partitions or --vary")
    base = configuration.file_layer(Path(args.config)) if args.config else {}
    study = ad_hoc(axes, _seeds(args.seeds or "0"), args.preset, base)
    return slug("-".join(f"{axis.name}-{len(axis.values)}" for axis in axes)), study


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of flags and --set; with a study file --algorithm and --partition choose among the grid instead."""
    given = given_settings(args)
    if "run.seed" in given:
        raise UserError("--set run.seed: a comparison takes its seeds from --seeds")
    if args.studies:
        given.pop("run.algorithm", None)
        given.pop("data.partition", None)
    return given


def _named(args: argparse.Namespace, name: str) -> list[str]:
    """--algorithms or --algorithm, --partitions or --partition."""
    key = FLAGS[f"--{name}"]
    single, several = getattr(args, key), getattr(args, f"{name}s")
    if single and several:
        raise UserError(f"--{name} and --{name}s: give one of them")
    return [single] if single else _listed(several)


def _listed(text: str | None) -> list[str]:
    parts = [part.strip() for part in (text or "").split(",")]
    return [part for part in dict.fromkeys(parts) if part]


def _seeds(text: str) -> tuple[int, ...]:
    parts = _listed(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise UserError(f"--seeds {text}: allowed: whole numbers, for example 0,1,2")
    return tuple(int(part) for part in parts)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed: a whole number from 1")
    return int(text)
