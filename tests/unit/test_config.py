"""One configuration: which layer wins, what is refused and how, and that it survives being written down."""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from spark_node.config import (
    PUBLISHED,
    Config,
    LocalSettings,
    Setting,
    load,
    parse_assignment,
    presets,
    settings,
    to_dict,
    to_toml,
)
from spark_node.errors import ConfigError

LAYERS = ("file", "environment", "flags")
FREE_TEXT = [setting for setting in settings() if setting.allowed == "text"]
NUMBERS = [setting for setting in settings() if setting.type in ("int", "float")]
KEYS = [setting.key for setting in settings()]

every_setting = pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.key)
every_layer = pytest.mark.parametrize("layer", LAYERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def literal(value: Any) -> str:
    """A value as TOML, written independently of the code under test."""
    return repr(value) if isinstance(value, float) else json.dumps(value)


def load_through(layer: str, key: str, value: Any, folder: Path) -> Config:
    section, _, name = key.partition(".")
    if layer == "file":
        file = folder / "spark.toml"
        file.write_text(f"[{section}]\n{name} = {literal(value)}\n", encoding="utf-8")
        return load(file=file, environment={})
    if layer == "environment":
        return load(environment={f"SPARK_{section}__{name}".upper(): literal(value)})
    return load(environment={}, flags={key: value})


def refusal(action: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message
    return message


def shown(setting: Setting, value: Any) -> str:
    """A value as a refusal repeats it; a secret is not repeated."""
    return "..." if setting.key in ("privacy.sketch_secret", "security.token") else repr(value)


def value_of(loaded: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(loaded, section), name)


def bounds(setting: Setting) -> tuple[Any, Any]:
    found = re.search(r"from (\S+) to (\S+)$", setting.allowed)
    assert found is not None, setting
    number = float if setting.type == "float" else int
    return number(found[1]), number(found[2])


def of_wrong_type(setting: Setting) -> list[Any]:
    return {
        "bool": ["yes", 1, [True]],
        "int": ["many", 1.5, True, [1]],
        "float": ["much", True, [1.0]],
        "str": [7, 0.5, True, ["text"]],
        "list of int": ["1, 2", 5, [1.5], [True], ["1"]],
    }[setting.type]


def out_of_range(setting: Setting) -> list[Any]:
    if setting.type == "bool" or setting.allowed == "text":
        return []
    if setting.type == "str":
        return ["no-such-option", "", str(setting.default).upper()]
    low, high = bounds(setting)
    if setting.type == "float":
        return [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), math.inf, math.nan, 10**400]
    numbers = [low - 1, high + 1, -(10**400)]
    return numbers if setting.type == "int" else [[low, number] for number in numbers]


def values(setting: Setting) -> st.SearchStrategy[Any]:
    """Every value the setting allows, and that the rules between settings allow, too."""
    if setting.key == "model.kind":
        return st.sampled_from(["mlp", "cnn"]) | st.text().map(lambda name: f"package.module:{name}")
    if setting.key == "model.channels":
        return st.lists(st.integers(*bounds(setting)), min_size=1, max_size=4)
    if setting.key == "learning.timesteps":
        return st.lists(st.integers(*bounds(setting)), min_size=1, max_size=6, unique=True).map(sorted)
    if setting.key.endswith("bits"):
        return st.integers(*bounds(setting)).filter(lambda bits: bits != 1)
    if setting.key in ("security.tls", "security.token"):
        return st.just(
            setting.default
        )  # plaintext is for the loopback only; a token is for plaintext, and never written
    if setting.key == "package.max_error":
        return st.just(0.0)  # allowed with package.bits = 0 only
    if setting.key == "privacy.logit_bound":
        return st.just(0.0)  # not allowed with robust.packages
    if setting.key == "privacy.sketch_secret":
        return st.just("")  # not written
    if setting.allowed == "text":
        return st.text()
    if setting.type == "str":
        return st.sampled_from(setting.allowed.split(", "))
    if setting.type == "bool":
        return st.booleans()
    if setting.type == "float":
        return st.floats(*bounds(setting))
    numbers = st.integers(*bounds(setting))
    return numbers if setting.type == "int" else st.lists(numbers, max_size=4)


configurations = st.fixed_dictionaries({}, optional={setting.key: values(setting) for setting in settings()}).map(
    lambda flags: load(environment={}, flags=flags)
)


def written_and_read(loaded: Config, folder: Path) -> Config:
    file = folder / "config.toml"
    file.write_text(to_toml(loaded), encoding="utf-8")
    return load(file=file, environment={})


# Layers


@pytest.mark.parametrize(
    "present", [layers for size in range(5) for layers in combinations(("preset", *LAYERS), size)], ids=str
)
def test_the_strongest_layer_present_wins(present: tuple[str, ...], folder: Path) -> None:
    file = folder / "spark.toml"
    file.write_text("[run]\nrounds = 101\n")
    rounds = {"preset": load(preset="demo", environment={}).run.rounds, "file": 101}
    rounds |= {"environment": 102, "flags": 103}
    assert len({Config().run.rounds, *rounds.values()}) == 5
    loaded = load(
        preset="demo" if "preset" in present else None,
        file=file if "file" in present else None,
        environment={"SPARK_RUN__ROUNDS": "102"} if "environment" in present else {},
        flags={"run.rounds": 103} if "flags" in present else None,
    )
    assert loaded.run.rounds == (rounds[present[-1]] if present else Config().run.rounds)


def test_a_layer_changes_only_what_it_names(folder: Path) -> None:
    file = folder / "spark.toml"
    file.write_text("[run]\nnodes = 7\n[topology]\n")
    loaded = load(file=file, environment={"SPARK_TOPOLOGY__DEGREE": "4"}, flags={"model.hidden": [3, 4]})
    assert loaded == Config().replace(run__nodes=7, topology__degree=4, model__hidden=(3, 4))


def test_the_process_environment_is_read_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPARK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARK_LEARNING__ETA", "0.5")
    monkeypatch.setenv("SPARK_HOME", "/opt/another/program")
    assert load() == Config().replace(learning__eta=0.5)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_loads(preset: str) -> None:
    assert load(preset=preset, environment={}) != Config()


# An algorithm's published settings

LOCAL = {
    "dpsgd": {"epochs": 1, "batch_size": 10, "lr": 0.1},
    "dfedavg": {"epochs": 20, "batch_size": 25, "lr": 0.1},
    "dfedavgm": {"epochs": 20, "batch_size": 50, "lr": 0.01, "momentum": 0.9},
    "dfedsam": {
        "epochs": 5,
        "batch_size": 32,
        "lr": 0.01,
        "lr_decay": 0.95,
        "momentum": 0.99,
        "weight_decay": 5e-4,
        "sam_rho": 0.01,
        "sam_adaptive": True,
    },
}


@pytest.mark.parametrize("algorithm", LOCAL)
def test_an_algorithm_brings_its_published_settings(algorithm: str, folder: Path) -> None:
    expected = replace(LocalSettings(), **LOCAL[algorithm])
    for layer in LAYERS:
        assert load_through(layer, "run.algorithm", algorithm, folder).local == expected
    assert load(preset=algorithm, environment={}).local == expected
    assert load(preset="paper", environment={}, flags={"run.algorithm": algorithm}).local == expected
    assert Config().replace(run__algorithm=algorithm).local == expected


def test_any_layer_is_stronger_than_the_published_settings(folder: Path) -> None:
    file = folder / "spark.toml"
    file.write_text("[local]\nepochs = 7\nlr = 0.3\n")
    loaded = load("dfedavg", file, {"SPARK_LOCAL__LR": "0.4"}, {"local.momentum": 0.5})
    assert loaded.local == LocalSettings(epochs=7, batch_size=25, lr=0.4, momentum=0.5)
    assert Config().replace(run__algorithm="dfedavg", local__epochs=3).local.epochs == 3


def test_another_algorithm_than_the_presets_own_brings_its_own_settings() -> None:
    loaded = load("dfedavg", environment={}, flags={"run.algorithm": "dfedsam"})
    assert (loaded.local.lr_decay, loaded.local.batch_size) == (0.95, 32)


def test_what_is_written_of_a_baseline_holds_even_if_its_published_settings_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("dfedsam", environment={})
    monkeypatch.setitem(PUBLISHED, "dfedsam", {"local.epochs": 99})
    assert written_and_read(loaded, folder) == loaded


@pytest.mark.parametrize("preset", ["dpsgd", "dfedavg", "dfedavgm", "dfedsam", "ntk-dfl"])
def test_the_presets_of_other_algorithms_have_the_papers_network(preset: str) -> None:
    paper, loaded = load(preset="paper", environment={}), load(preset=preset, environment={})
    assert loaded.run.algorithm == preset
    assert (loaded.run.nodes, loaded.data, loaded.model) == (paper.run.nodes, paper.data, paper.model)
    assert (loaded.topology, loaded.run.target_accuracy) == (paper.topology, paper.run.target_accuracy)


@pytest.mark.parametrize(("k", "evaluated"), [(1, False), (3, True), (6, True), (7, False), (8, True)])
def test_clients_are_evaluated_every_nth_round_and_in_the_last(k: int, evaluated: bool) -> None:
    assert Config().replace(run__rounds=8, run__clients_every=3).run.evaluates_clients(k) is evaluated


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    message = refusal(load, preset="papre", environment={})
    assert "preset = 'papre'" in message
    assert all(preset in message for preset in presets())


# Values


@every_setting
def test_the_default_given_explicitly_is_the_default(setting: Setting, folder: Path) -> None:
    default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    for layer in LAYERS:
        assert load_through(layer, setting.key, default, folder) == Config()


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.key)
def test_the_bounds_themselves_are_allowed(setting: Setting, folder: Path) -> None:
    for layer, bound in product(LAYERS, bounds(setting)):
        assert value_of(load_through(layer, setting.key, bound, folder), setting.key) == bound


@every_setting
def test_an_unknown_key_is_refused(setting: Setting, folder: Path) -> None:
    section, _, name = setting.key.partition(".")
    for layer in LAYERS:
        message = refusal(load_through, layer, f"{setting.key}_", "x", folder)
        assert f"{setting.key}_ = 'x'" in message
        assert "unknown key" in message
        assert name in message.partition(f"[{section}] has: ")[2].split(", ")


@every_setting
def test_a_wrong_type_is_refused(setting: Setting, folder: Path) -> None:
    for layer, value in product(LAYERS, of_wrong_type(setting)):
        message = refusal(load_through, layer, setting.key, value, folder)
        assert f"{setting.key} = {shown(setting, value)} " in message
        assert message.endswith(f"allowed: {setting.allowed}")


@every_setting
def test_a_value_out_of_range_is_refused(setting: Setting, folder: Path) -> None:
    for layer, value in product(LAYERS, out_of_range(setting)):
        message = refusal(load_through, layer, setting.key, value, folder)
        assert f"{setting.key} = {value!r}" in message
        assert message.endswith(f"allowed: {setting.allowed}")


@pytest.mark.parametrize(
    ("layer", "origin"), [("file", "spark.toml"), ("environment", "(environment)"), ("flags", "(flags)")]
)
def test_a_refusal_says_where_the_value_came_from(layer: str, origin: str, folder: Path) -> None:
    assert origin in refusal(load_through, layer, "run.nodes", 0, folder)


@every_layer
def test_an_unknown_section_is_refused(layer: str, folder: Path) -> None:
    message = refusal(load_through, layer, "learnin.eta", 0.1, folder)
    assert "learnin" in message
    assert "unknown section" in message
    assert all(section in message for section in to_dict(Config()))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("learning.timesteps", [], "a rising list"),
        ("learning.timesteps", [100, 100], "a rising list"),
        ("learning.timesteps", [200, 100], "a rising list"),
        ("model.kind", "transformer", "mlp, cnn, or package.module:factory"),
    ],
)
def test_what_no_single_range_can_say_is_refused_too(key: str, value: Any, said: str) -> None:
    message = refusal(load, environment={}, flags={key: value})
    assert f"{key} = {value!r}" in message
    assert said in message


def test_a_cnn_without_convolutions_is_refused() -> None:
    message = refusal(load, environment={}, flags={"model.kind": "cnn", "model.channels": []})
    assert "model.channels = []" in message


@pytest.mark.parametrize("setting", FREE_TEXT, ids=lambda setting: setting.key)
def test_text_that_no_file_can_hold_is_refused(setting: Setting) -> None:
    undecodable = os.fsdecode(b"/data/\xff")
    message = refusal(load, environment={}, flags={setting.key: undecodable})
    assert f"{setting.key} = {shown(setting, undecodable)} " in message


def test_replace_checks_like_any_layer() -> None:
    assert Config().replace(run__nodes=3).run.nodes == 3
    assert "run.nodes = 0" in refusal(Config().replace, run__nodes=0)
    assert "run.node = 3" in refusal(Config().replace, run__node=3)


# Files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 5", "nodes = 5"),
        ("[[run]]\nnodes = 5", "settings stand in a section"),
        ("[runn]", "[runn]"),
        ("[run.nodes]\nmany = 5", "run.nodes = {'many': 5}"),
        ("[run]\nnodes = ", "not TOML"),
        ("[run]\nnodes = " + "9" * 5000, "not TOML"),
        ("[run]\nnodes = " + "[" * 100_000, "not TOML"),
        ("[run]\nnodes = 5\nnodes = 6", "not TOML"),
    ],
    ids=["bare", "array", "empty-section", "subsection", "cut", "huge", "deep", "twice"],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, said: str, folder: Path) -> None:
    file = folder / "spark.toml"
    file.write_text(text)
    message = refusal(load, file=file, environment={})
    assert said in message
    assert str(file) in message


@pytest.mark.parametrize("name", ["bits", "input_bits", "hidden_bits", "signal_bits", "logit_bits"])
def test_one_bit_a_number_is_refused(name: str) -> None:
    message = refusal(load, environment={}, flags={f"package.{name}": 1})
    assert f"package.{name} = 1" in message


def test_bits_and_an_error_that_chooses_them_contradict_each_other() -> None:
    message = refusal(load, environment={}, flags={"package.bits": 6, "package.max_error": 0.1})
    assert "package.max_error" in message
    assert load(environment={}, flags={"package.max_error": 0.1}).package.max_error == 0.1


def test_a_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    binary = folder / "model.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "No such file" in refusal(load, file=folder / "missing.toml", environment={})
    assert "directory" in refusal(load, file=folder, environment={})
    assert "not TOML" in refusal(load, file=binary, environment={})


@given(configurations)
@effort(max_examples=60, deadline=None)
def test_what_is_written_reads_back_equal(folder: Path, loaded: Config) -> None:
    assert written_and_read(loaded, folder) == loaded


@given(text=st.text(st.characters(codec="utf-8", max_codepoint=0x2100) | st.sampled_from("\\\"'\r\n\t\x00\x7f")))
@effort(max_examples=100, deadline=None)
def test_any_text_survives_being_written(folder: Path, text: str) -> None:
    loaded = Config().replace(data__folder=text)
    assert written_and_read(loaded, folder).data.folder == text


def test_every_control_character_survives_being_written(folder: Path) -> None:
    text = "".join(map(chr, range(0xA1))) + "\\u0041\u2028\ufeff\U0001f525"
    assert written_and_read(Config().replace(data__folder=text), folder).data.folder == text


@given(configurations)
@effort(max_examples=20, deadline=None)
def test_a_configuration_goes_into_json(loaded: Config) -> None:
    assert set(json.loads(json.dumps(to_dict(loaded)))) == {key.partition(".")[0] for key in KEYS}


# --set and the environment


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("run.nodes=5", ("run.nodes", 5)),
        (" learning.eta = 2e-2 ", ("learning.eta", 0.02)),
        ("model.hidden=[64, 32]", ("model.hidden", [64, 32])),
        ("topology.fresh=false", ("topology.fresh", False)),
        ("data.partition=dirichlet:0.1", ("data.partition", "dirichlet:0.1")),
        ('data.folder="2024"', ("data.folder", "2024")),
        ("data.folder=", ("data.folder", "")),
        ("data.partition=file:a=b.json", ("data.partition", "file:a=b.json")),
        ("data.folder='a'\nmore = 1", ("data.folder", "'a'\nmore = 1")),
        ("run.nodes=" + "9" * 5000, ("run.nodes", "9" * 5000)),
    ],
)
def test_an_assignment_is_a_key_and_a_toml_value_or_plain_text(text: str, parsed: tuple[str, Any]) -> None:
    assert parse_assignment(text) == parsed


def test_an_assignment_without_a_value_is_refused_with_an_example() -> None:
    message = refusal(parse_assignment, "run.nodes")
    assert "--set run.nodes" in message
    assert "section.key=value" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SPARK_RUN__NODE", "run.node = 5 (environment): unknown key"),
        ("SPARK_RUNS__NODES", "runs.nodes = 5 (environment): unknown section"),
        ("SPARK_RUN__", "run. = 5 (environment): unknown key"),
        ("SPARK___NODES", "unknown section"),
    ],
)
def test_an_environment_variable_that_names_no_setting_is_refused(name: str, said: str) -> None:
    assert said in refusal(load, environment={name: "5"})


def test_plain_text_needs_no_quotes_in_the_environment() -> None:
    environment = {"SPARK_DATA__PARTITION": "dirichlet:0.1", "SPARK_RUN__DEVICE": "cuda:1"}
    loaded = load(environment=environment)
    assert (loaded.data.partition, loaded.run.device) == ("dirichlet:0.1", "cuda:1")


# What help pages see


def test_every_setting_has_help_and_its_default_is_allowed() -> None:
    assert len(set(KEYS)) == len(KEYS)
    for setting in settings():
        assert setting.help, setting.key
        assert value_of(Config(), setting.key) == setting.default
