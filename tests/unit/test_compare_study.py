"""Studies: grids from files and flags, and complaints that name the key."""

from pathlib import Path

import pytest

from spark_node import config as configuration
from spark_node.cli.main import main
from spark_node.compare.study import (
    StudyError,
    ad_hoc,
    algorithm_axis,
    only_algorithms,
    parse_vary,
    same_run,
    setting_axis,
    slug,
    with_axis,
)
from spark_node.compare.study_file import load_study

STUDIES = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "studies").glob("*.toml"))

MINIMAL = """
title = "A small one"
seeds = [0, 1]
[base]
preset = "demo"
run.rounds = 3
[[vary]]
name = "algorithm"
values = [{ label = "SPARK", run.algorithm = "spark" }, { label = "NTK-DFL", run.algorithm = "ntk-dfl" }]
[[vary]]
name = "partition"
setting = "data.partition"
values = ["iid", "dirichlet:0.1"]
[quick]
seeds = [7]
base.run = { nodes = 6, rounds = 2 }
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "study.toml"
    file.write_text(text)
    return file


def test_cells_are_the_product_of_axes_and_seeds(tmp_path: Path) -> None:
    cells = load_study(write(tmp_path, MINIMAL)).cells()
    assert [cell.title for cell in cells] == [
        f"{algorithm}, {partition}, seed {seed}"
        for algorithm in ("SPARK", "NTK-DFL")
        for partition in ("IID", "α = 0.1")
        for seed in (0, 1)
    ]
    last = cells[-1]
    assert last.name == "ntk-dfl_alpha-0.1_seed1"
    assert (last.config.run.algorithm, last.config.data.partition) == ("ntk-dfl", "dirichlet:0.1")
    assert (last.config.run.seed, last.config.run.rounds, last.config.run.nodes) == (1, 3, 20)


def test_the_quick_size_overrules_the_study_and_flags_overrule_both(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, MINIMAL), quick=True)
    assert study.is_quick
    cell = study.cells({"run.nodes": 9})[0]
    assert (cell.seed, cell.config.run.rounds, cell.config.run.nodes) == (7, 2, 9)


def test_a_quick_axis_takes_the_place_of_the_one_of_its_name(tmp_path: Path) -> None:
    more = '[[quick.vary]]\nname = "partition"\nsetting = "data.partition"\nvalues = ["dirichlet:0.5"]\n'
    study = load_study(write(tmp_path, MINIMAL + more), quick=True)
    assert [cell.config.data.partition for cell in study.cells()] == ["dirichlet:0.5"] * 2


def test_a_value_may_set_several_settings_and_take_the_method_of_a_preset(tmp_path: Path) -> None:
    text = """
title = "x"
[base]
run.nodes = 7
[[vary]]
name = "variant"
values = [
  { label = "plain" },
  { label = "best", preset = "best", momentum.mu = 0.5, package = { bits = 6, weights = "int8" } },
]
"""
    plain, best = (cell.config for cell in load_study(write(tmp_path, text)).cells())
    assert plain.momentum.mu == 0.9
    assert (best.momentum.mu, best.package.bits, best.package.weights) == (0.5, 6, "int8")
    assert best.learning.eta_decay == 0.13, "how the preset learns is taken"
    assert (best.run.nodes, best.data.dataset) == (7, "digits"), "its network and its data are not"


def test_the_environment_is_weaker_than_what_is_varied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_DATA__PARTITION", "dirichlet:9")
    monkeypatch.setenv("SPARK_TOPOLOGY__DEGREE", "3")
    cells = load_study(write(tmp_path, MINIMAL)).cells()
    assert {cell.config.data.partition for cell in cells} == {"iid", "dirichlet:0.1"}
    assert {cell.config.topology.degree for cell in cells} == {3}


def test_two_points_that_are_one_run_are_refused(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, MINIMAL))
    with pytest.raises(StudyError, match="are the same run; flags"):
        study.cells({"data.partition": "iid"})


def test_configurations_are_the_same_run_wherever_they_run() -> None:
    config = configuration.Config()
    assert same_run(config, config.replace(run__workers=3, data__folder="/elsewhere"))
    assert not same_run(config, config.replace(run__seed=3))
    assert not same_run(config, config.replace(momentum__mu=0.8))


def test_flags_make_a_study_too() -> None:
    study = ad_hoc([algorithm_axis(["spark", "ntk-dfl"]), parse_vary("momentum.mu=0.5,0.9")], [0], "demo")
    assert study.title == "SPARK against NTK-DFL, by mu"
    assert [cell.group for cell in study.cells()] == [
        ("SPARK", "0.5"),
        ("SPARK", "0.9"),
        ("NTK-DFL", "0.5"),
        ("NTK-DFL", "0.9"),
    ]
    lists = parse_vary("model.hidden=[[100],[50,20]]")
    assert [value.settings["model.hidden"] for value in lists.values] == [[100], [50, 20]]


def test_an_axis_from_the_command_line_takes_the_place_of_the_study_s(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, MINIMAL))
    changed = with_axis(study, setting_axis("data.partition", ["file:/x.npz"]))
    assert [axis.name for axis in changed.axes] == ["algorithm", "partition"]
    assert {cell.config.data.partition for cell in changed.cells()} == {"file:/x.npz"}
    assert only_algorithms(study, ["ntk-dfl"]).rows.labels == ("NTK-DFL",)
    with pytest.raises(StudyError, match=r"--algorithms nobody: not in .*allowed: ntk-dfl, spark"):
        only_algorithms(study, ["nobody"])


def test_labels_become_names_of_folders() -> None:
    assert slug("α = 0.1") == "alpha-0.1"
    assert slug("SPARK, 6 bits/int8") == "spark-6-bits-int8"
    assert slug("★") == "value"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("title =", "titel ="), "titel: unknown key; allowed: title"),
        (("seeds = [0, 1]", "seeds = [0, 0]"), "seeds = [0, 0]; allowed: a list of different whole numbers"),
        (('preset = "demo"', 'preset = "nope"'), "base.preset = 'nope'; allowed: best, demo"),
        (("run.rounds = 3", "run.rounds = 0"), "run.rounds = 0"),
        (("run.rounds = 3", "run.nonsense = 0"), "run.nonsense = 0"),
        (("run.rounds = 3", "nonsense.x = 0"), "[nonsense]"),
        (('name = "partition"', 'name = ""'), "vary[2].name = ''; allowed: a text"),
        (('values = ["iid", "dirichlet:0.1"]', "values = []"), "vary[2].values = []; allowed: a list of at least one"),
        (('["iid", "dirichlet:0.1"]', '["iid", "iid"]'), "allowed: values with labels of their own"),
        (('setting = "data.partition"\n', ""), "vary[2].values[1] = 'iid'; allowed: { label"),
        (('run.algorithm = "ntk-dfl"', 'run.algorithm = "sgd"'), "run.algorithm = 'sgd'"),
        (('"A small one"', '"x"\ntables = ["rows"]'), "tables = 'rows'; allowed: rounds_to_target"),
        (('"A small one"', '"x"\nplots = ["pie"]'), "plots = 'pie'; allowed: convergence"),
        (('"A small one"', '"x"\nat_round = 0'), "at_round = 0; allowed: a whole number from 1"),
        (("[quick]", "[published.accuracy]\nX = { IID = 1 }\n[quick]"), "published.accuracy = 'X'; allowed: SPARK"),
        (("[base]", "[base"), "not TOML"),
    ],
)
def test_a_bad_study_is_one_line_that_names_file_key_and_what_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], said: str
) -> None:
    assert change[0] in MINIMAL
    file = write(tmp_path, MINIMAL.replace(*change))
    assert main(["compare", str(file), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("spark-dfl: error: ")
    assert error.count("\n") == 1
    assert said in error
    assert "study.toml" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "nothing to compare: give a study file"),
        (["--quick", "--vary", "momentum.mu=0.1,0.2"], "only a study file has a quick size"),
        (["--algorithms", "sgd"], "--algorithms sgd: unknown; allowed: spark"),
        (["--vary", "momentum.mu"], "expected section.key=v1,v2"),
        (["--vary", "momentum.mu=0.1,7"], "momentum.mu = 7"),
        (["--algorithms", "spark", "--seeds", "a"], "--seeds a: allowed: whole numbers"),
        (["--algorithms", "spark", "--jobs", "0"], "allowed: a whole number from 1"),
        (["--algorithms", "spark", "--set", "run.seed=3"], "a comparison takes its seeds from --seeds"),
        (["nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_bad_usage_is_one_line(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_every_study_file_has_valid_configurations_in_both_sizes(file: Path) -> None:
    full, quick = load_study(file), load_study(file, quick=True)
    assert full.question
    assert len(full.seeds) >= 3
    assert len(quick.cells()) <= 60
    assert {cell.config.data.dataset for cell in quick.cells()} == {"digits"}
    assert {cell.config.run.transport for cell in (*full.cells(), *quick.cells())} == {"memory"}


def test_there_is_a_study_for_each_table_and_figure_and_the_page_lists_them() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reproducing.md").read_text()
    assert len(STUDIES) >= 21
    for file in STUDIES:
        assert file.stem in page


def test_the_baselines_of_a_study_train_as_published() -> None:
    study = load_study(next(file for file in STUDIES if file.stem == "table1_rounds"))
    by_label = {cell.group[0]: configuration.to_dict(cell.config) for cell in study.cells()}
    assert by_label["DFedAvg"]["local"]["epochs"] == 20
    assert by_label["D-PSGD"]["local"]["batch_size"] == 10
    assert by_label["NTK-DFL"]["learning"]["eta_decay"] == 0.07
    assert {settings["run"]["nodes"] for settings in by_label.values()} == {300}


def test_an_algorithm_of_ones_own_is_compared_like_any_other() -> None:
    study = ad_hoc([algorithm_axis(["spark", "my_package.mine:Proximal"])], [0], "demo")
    algorithms = [cell.config.run.algorithm for cell in study.cells({})]
    assert algorithms == ["spark", "my_package.mine:Proximal"]
