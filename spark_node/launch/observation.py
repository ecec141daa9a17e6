"""Watching a network, whoever runs it: what is known of it beforehand, and the observer that follows it."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from spark_node.config import Config, without_sketch_secret
from spark_node.data.datasets import Dataset
from spark_node.data.partitions import Partition
from spark_node.learning.algorithms import make_terms
from spark_node.model import ParameterLayout
from spark_node.observe.history import Round
from spark_node.observe.observer import Observer
from spark_node.observe.records import RunInfo, Watcher
from spark_node.privacy import guarantee


def describe(config: Config, dataset: Dataset, partition: Partition, module: nn.Module) -> RunInfo:
    """What watchers are told before the first round."""
    samples = tuple(len(indices) for indices in partition.indices)
    privacy = guarantee(config.privacy, partition.indices, dataset.classes)
    parameters = ParameterLayout.of(module).size
    return RunInfo(parameters, config.run.nodes, samples, len(dataset.test.labels), privacy)


def make_observer(
    config: Config,
    orchestrator: str,
    dataset: Dataset,
    module: nn.Module,
    watcher: Watcher,
    recorded: Sequence[Round] = (),
) -> Observer:
    """The observer of the run at an orchestrator; it knows no secret of the peers."""
    layout, classes = ParameterLayout.of(module), dataset.classes
    config = without_sketch_secret(config)
    terms = cache(lambda run: make_terms(config, run, layout, classes))
    test = dataset.standardise(dataset.test.pixels), torch.from_numpy(dataset.test.labels)
    return Observer(config, orchestrator, terms, module, test, watcher, recorded=recorded)
