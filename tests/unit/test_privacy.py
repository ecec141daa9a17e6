"""Noise at the source: the mechanisms, their accountant, and that all else only ever sees privatised samples."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from spark_node.cli.main import main
from spark_node.config import Config, ConfigError, PrivacySettings, load, to_dict, to_toml, without_secret_arguments
from spark_node.data.datasets import load as load_dataset
from spark_node.data.partitions import Partition, partition
from spark_node.launch.memory import MemoryRun
from spark_node.launch.network import peer_jobs
from spark_node.launch.samples import peer_samples
from spark_node.learning.algorithms import make_projection, make_terms, signature
from spark_node.learning.messages import Package
from spark_node.learning.spark import Spark
from spark_node.model import ParameterLayout, build
from spark_node.observe.records import RoundRecord, RunInfo
from spark_node.privacy import (
    clipped,
    gaussian_delta,
    gaussian_epsilon,
    guarantee,
    noised,
    privatise,
    randomised_response,
    randomness,
    sketch_seed,
    truthful,
)

DIGITS = load_dataset("digits")
SECRET = "correct horse battery staple"
SEEDED = PrivacySettings(noise=2.0, clip=5.0, label_epsilon=2.0, noise_seed=3)
BYTES = np.random.Generator(np.random.Philox(key=1)).bytes


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# The mechanisms


def test_clipping_shortens_long_inputs_and_leaves_short_ones() -> None:
    x = normal(50, 1, 4, 4)
    x[0], x[1] = 0, x[1] * 1e-3
    found = clipped(x, 2.0)
    norms = np.linalg.norm(found.reshape(50, -1).astype(np.float64), axis=1)
    assert norms.max() <= 2.0
    assert np.array_equal(found[:2], x[:2])
    scale = found[2:] / x[2:]
    assert np.allclose(scale, scale[:, :, :1, :1])


def test_noise_has_the_moments_and_tails_it_should_have() -> None:
    found = (noised(np.full((200, 500), 7, np.float32), 3.0, BYTES) - 7) / 3
    assert stats.kstest(found.ravel()[:50_000], "norm").pvalue > 1e-4
    assert abs(found.mean()) < 4 / math.sqrt(found.size)
    assert abs(found.var() - 1) < 4 * math.sqrt(2 / found.size)


def test_randomised_response_has_the_frequencies_of_its_definition() -> None:
    classes, epsilon, count = 5, 1.3, 200_000
    truth = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    assert truthful(classes, epsilon) == pytest.approx(truth)
    for label in (0, 4):
        found = randomised_response(np.full(count, label), classes, epsilon, BYTES)
        expected = np.full(classes, count * (1 - truth) / (classes - 1))
        expected[label] = count * truth
        assert stats.chisquare(np.bincount(found, minlength=classes), expected).pvalue > 1e-4
    # The definition: no answer is more than e^epsilon times as likely under one label as under another.
    assert truth / ((1 - truth) / (classes - 1)) == pytest.approx(math.exp(epsilon))


def test_zero_settings_change_nothing() -> None:
    x, y = normal(4, 3), np.arange(4)
    same_x, same_y = privatise(x, y, PrivacySettings(), 10, BYTES)
    assert same_x is x
    assert same_y is y


def test_noise_comes_from_the_operating_system_unless_a_seed_is_given() -> None:
    x, y = normal(4, 3), np.arange(4)

    def drawn(settings: PrivacySettings, peer: str = "a") -> np.ndarray:
        return privatise(x, y, settings, 10, randomness(settings, peer))[0]

    private = dataclasses.replace(SEEDED, noise_seed=-1)
    assert not np.array_equal(drawn(private), drawn(private))
    assert np.array_equal(drawn(SEEDED), drawn(SEEDED))
    assert not np.array_equal(drawn(SEEDED), drawn(SEEDED, "b"))


# The accountant


@pytest.mark.parametrize(("sensitivity", "noise", "epsilon"), [(1.0, 1.0, 0.5), (2.0, 1.5, 1.0), (4.0, 1.0, 6.0)])
def test_delta_is_the_integral_of_its_definition(sensitivity: float, noise: float, epsilon: float) -> None:
    """delta = integral of max(0, p - e^epsilon q) for p, q normal and a sensitivity apart."""

    def excess(t: float) -> float:
        p, q = stats.norm.pdf(t, sensitivity, noise), stats.norm.pdf(t, 0, noise)
        return float(max(0.0, p - math.exp(epsilon) * q))

    begins = epsilon * noise**2 / sensitivity + sensitivity / 2  # where p = e^epsilon q
    integral = integrate.quad(excess, begins, begins + 20 * noise)[0]
    assert gaussian_delta(sensitivity, noise, epsilon) == pytest.approx(integral, rel=1e-6)


def test_delta_agrees_with_a_simulation_in_many_dimensions() -> None:
    """The mechanism itself: E[max(0, 1 - e^(epsilon - loss))] over what it releases for two inputs 2 clip apart."""
    clip, noise, epsilon, rng = 1.5, 2.0, 0.7, np.random.default_rng(5)
    direction = rng.standard_normal(6)
    x = clip * direction / np.linalg.norm(direction)
    released = x + noise * rng.standard_normal((400_000, 6))
    loss = (((released + x) ** 2).sum(1) - ((released - x) ** 2).sum(1)) / (2 * noise**2)
    each = np.maximum(0.0, -np.expm1(epsilon - loss))
    error = each.std() / math.sqrt(len(each))
    assert abs(each.mean() - gaussian_delta(2 * clip, noise, epsilon)) < 5 * error


@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0, 3.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_epsilon_is_the_least_one_of_its_delta(ratio: float, delta: float) -> None:
    epsilon = gaussian_epsilon(1.0, ratio, delta)
    assert gaussian_delta(1.0, ratio, epsilon) <= delta
    if epsilon > 1e-4:
        assert gaussian_delta(1.0, ratio, epsilon * (1 - 1e-6) - 1e-8) > delta


def shares(*held: list[int]) -> list[np.ndarray]:
    return [np.array(own) for own in held]


def test_the_guarantee_adds_label_and_input_and_says_what_it_covers() -> None:
    settings = PrivacySettings(noise=30.0, clip=10.0, label_epsilon=2.0)
    found = guarantee(settings, shares([0, 1], [2]), 10)
    assert found is not None
    assert found.input_epsilon == gaussian_epsilon(20.0, 30.0, 1e-5)
    assert (found.epsilon, found.covers) == (found.input_epsilon + 2.0, "input and label")
    in_clear = guarantee(dataclasses.replace(settings, label_epsilon=0.0), shares([0]), 10)
    assert in_clear is not None
    assert in_clear.covers == "input"
    assert "labels in clear" in in_clear.in_words()
    only_labels = guarantee(dataclasses.replace(settings, noise=0.0), shares([0]), 10)
    assert only_labels is not None
    assert (only_labels.epsilon, only_labels.delta, only_labels.covers) == (2.0, 0.0, "label")
    assert guarantee(PrivacySettings(), shares([0]), 10) is None


def test_a_sample_that_several_peers_hold_is_promised_less() -> None:
    settings = PrivacySettings(noise=30.0, clip=10.0, label_epsilon=2.0)
    found = guarantee(settings, shares([0, 1], [1, 2], [1], [3]), 10)
    assert found is not None
    assert (found.copies, found.label_epsilon) == (3, 6.0)
    assert found.input_epsilon == gaussian_epsilon(20.0 * math.sqrt(3), 30.0, 1e-5)


def test_noise_from_a_seed_is_called_not_private() -> None:
    found = guarantee(SEEDED, shares([0]), 10)
    assert found is not None
    assert not found.private
    assert "NOT private" in found.in_words()


# Where a peer's samples are made


def small(**settings: object) -> Config:
    base: dict[str, object] = {
        "run__nodes": 4, "run__rounds": 2, "run__workers": 1, "run__transport": "memory", "model__hidden": [8],
        "topology__degree": 2, "data__samples_per_node": 20,
    }  # fmt: skip
    return load(environment={}).replace(**{**base, **settings})


NOISY = {f"privacy__{key}": getattr(SEEDED, key) for key in ("noise", "clip", "label_epsilon", "noise_seed")}


def dealt(config: Config) -> Partition:
    return partition("iid", DIGITS, config.run.nodes, samples_per_node=config.data.samples_per_node, seed=0)


class Watching:
    def __init__(self) -> None:
        self.info: list[RunInfo] = []
        self.records: list[RoundRecord] = []

    def started(self, info: RunInfo) -> None:
        self.info.append(info)

    def progress(self, round: int, done: int, total: int) -> None: ...

    def round_done(self, record: RoundRecord) -> None:
        self.records.append(record)


def test_a_memory_run_learns_from_privatised_samples_and_is_judged_on_clean_ones() -> None:
    config = small(**NOISY)
    given = dealt(config)
    run, watching = MemoryRun(config, DIGITS, given), Watching()
    for node, indices in zip(run.nodes, given.indices, strict=True):
        assert isinstance(node.algorithm, Spark)
        clean = DIGITS.standardise(DIGITS.train.pixels[indices])
        noise = node.algorithm.inputs - torch.from_numpy(clipped(clean.numpy(), 5.0))
        assert 1.8 < float(noise.std()) < 2.2
        labels = torch.from_numpy(DIGITS.train.labels[indices])
        assert 0 < int((node.algorithm.labels != labels).sum()) < len(labels)
    assert torch.equal(run.test_x, DIGITS.standardise(DIGITS.test.pixels))
    assert torch.equal(run.test_y, torch.from_numpy(DIGITS.test.labels))
    run.run(watching)
    assert watching.info[0].privacy == guarantee(config.privacy, given.indices, DIGITS.classes)


def test_the_network_s_peers_hold_the_same_privatised_samples_as_those_in_memory() -> None:
    config = small(**NOISY, network__own_test=5)
    given = dealt(config)
    module = build(config.model, DIGITS.shape, DIGITS.classes, 0)
    for job, node in zip(peer_jobs(config, DIGITS, given, module), MemoryRun(config, DIGITS, given).nodes, strict=True):
        assert isinstance(node.algorithm, Spark)
        assert torch.equal(job.inputs, node.algorithm.inputs)
        assert torch.equal(job.labels, node.algorithm.labels)
        assert job.test is not None
        assert torch.equal(job.test[0], DIGITS.standardise(DIGITS.test.pixels[:5]))


def test_noise_is_drawn_once_also_by_a_peer_that_starts_again(tmp_path: Path) -> None:
    config = small(**{**NOISY, "privacy__noise_seed": -1})
    given = dealt(config).indices[0]
    first = peer_samples(config, "a", DIGITS, given, tmp_path)
    first.keep()
    again = peer_samples(config, "a", DIGITS, given, tmp_path)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.labels, again.labels)
    other = peer_samples(config.replace(privacy__noise=3.0), "a", DIGITS, given, tmp_path)
    assert not torch.equal(first.inputs, other.inputs)


def test_logits_that_travel_are_cut_at_the_bound() -> None:
    config = small(privacy__logit_bound=0.01)
    node = MemoryRun(config, DIGITS, dealt(config)).nodes[0].algorithm
    assert isinstance(node, Spark)
    package = node._linearise(node.w, 1)
    assert isinstance(package, Package)
    assert float(package.jacobian.logits.abs().max()) == pytest.approx(0.01)


def test_cut_logits_and_checks_of_logits_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"robust\.packages"):
        load(environment={}, flags={"privacy.logit_bound": 1.0, "robust.packages": True})


# The secret of the sketches


def test_a_secret_changes_the_projection_for_who_does_not_know_it() -> None:
    config = small(package__projection="axis", package__sketch_size=16)
    module = build(config.model, DIGITS.shape, DIGITS.classes, 0)
    layout = ParameterLayout.of(module)
    vector = torch.ones(make_projection(config, layout).layout.size)

    def lifted(secret: str) -> torch.Tensor:
        return make_projection(config.replace(privacy__sketch_secret=secret), layout).lift(vector, 1)

    assert torch.equal(lifted(SECRET), lifted(SECRET))
    assert not torch.equal(lifted(SECRET), lifted(""))
    assert not torch.equal(lifted(SECRET), lifted(SECRET + "!"))
    assert sketch_seed(5, "") == 5
    assert sketch_seed(5, SECRET) != sketch_seed(6, SECRET)


def test_an_observer_without_the_secret_knows_the_sizes_but_no_projection() -> None:
    config = small(package__projection="axis", package__sketch_size=16, privacy__sketch_secret="...")
    module = build(config.model, DIGITS.shape, DIGITS.classes, 0)
    assert make_terms(config, "run", ParameterLayout.of(module), 10).sketched.size > 0
    with pytest.raises(ConfigError, match="never written down"):
        make_projection(config, ParameterLayout.of(module))


def test_the_signature_tells_that_there_is_a_secret_and_nothing_of_it() -> None:
    module = build(small().model, DIGITS.shape, DIGITS.classes, 0)
    plain, one, other = (signature(small(privacy__sketch_secret=text), module) for text in ("", "one", "other"))
    assert plain != one
    assert one == other


def test_a_configuration_never_shows_its_secret() -> None:
    config = small(privacy__sketch_secret=SECRET)
    for text in (to_toml(config), json.dumps(to_dict(config)), repr(config), str(config.privacy)):
        assert SECRET not in text
    assert 'sketch_secret = "..."' in to_toml(config)
    with pytest.raises(ConfigError) as caught:
        load(environment={"SPARK_PRIVACY__SKETCH_SECRET": "123456"})
    assert "123456" not in str(caught.value)
    given = ["run", "--set", f"privacy.sketch_secret={SECRET}", f"--set=privacy.sketch_secret={SECRET}"]
    assert without_secret_arguments(given)[2:] == ["privacy.sketch_secret=...", "--set=privacy.sketch_secret=..."]


def test_no_file_of_a_run_holds_the_secret_and_its_summary_states_the_guarantee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    given = {
        "run.nodes": 4, "run.rounds": 1, "run.workers": 1, "topology.degree": 2, "data.samples_per_node": 20,
        "model.hidden": "[8]", "package.projection": "axis", "package.sketch_size": 16, "privacy.noise": 30.0,
        "privacy.label_epsilon": 3.0, "privacy.sketch_secret": SECRET,
    }  # fmt: skip
    flags = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    assert main(["run", "--transport", "memory", *flags, "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "privacy: epsilon" in said
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in said
    found = json.loads((out / "summary.json").read_text())["privacy"]
    assert found["epsilon"] == pytest.approx(found["input_epsilon"] + found["label_epsilon"])
    assert found["private"]
    assert not (out / "partition.json").exists()  # it would count the true labels
    assert main(["run", "--config", str(out / "config.toml"), "--out", str(tmp_path / "again")]) == 2
    assert "SPARK_PRIVACY__SKETCH_SECRET" in capsys.readouterr().err


def test_a_run_without_noise_promises_nothing(tmp_path: Path) -> None:
    flags = ["--set", "model.hidden=[8]", "--nodes", "3", "--degree", "2", "--rounds", "1", "--no-report"]
    assert main(["run", "--transport", "memory", "--quiet", *flags, "--out", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"] is None
