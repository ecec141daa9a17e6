"""What a host does once before it forks its peers: a round of two of them, by itself.

Libraries set themselves up when they are first used, and Python specialises the code that it runs. Done here, the peers
share the pages that this writes; left to them, every one of them would write a copy of its own.
"""

import copy
import logging
from collections.abc import Sequence

import torch

from spark_node.launch.peer import PeerJob
from spark_node.learning.algorithms import make_algorithm, make_terms
from spark_node.learning.messages import check
from spark_node.memory import give_back
from spark_node.model import ParameterLayout
from spark_node.package.peer import PeerCodec

log = logging.getLogger(__name__)

_FEW = 32
"""Samples of each peer: enough to go every way, and no delay of the start where a real round takes minutes."""


def rehearse(jobs: Sequence[PeerJob]) -> None:
    """Compute, encode and decode one round of the first two peers, with copies of the model; nothing of it is kept.

    Only on a CPU, in this thread, and with algorithms of ours: a device or a thread does not survive a fork, and what
    is not ours may count how often it is called.
    """
    if len(jobs) < 2 or any(_is_foreign(job) for job in jobs[:2]):
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _round(jobs[0], jobs[1])
    except Exception:  # what is wrong here is wrong in every peer, and each says so in its own log
        log.info("the rehearsal failed", exc_info=True)
    finally:
        torch.set_num_threads(threads)
        give_back()


def _is_foreign(job: PeerJob) -> bool:
    run = job.config.run
    return job.learner is not None or ":" in run.algorithm or job.inputs.device.type != "cpu"


def _round(*jobs: PeerJob) -> None:
    config, module, classes = jobs[0].config, jobs[0].module, jobs[0].classes
    terms = make_terms(config, "rehearsal", ParameterLayout.of(module), classes)
    own = {job.name: (copy.deepcopy(module), job.inputs[:_FEW], job.labels[:_FEW]) for job in jobs}
    players = {name: make_algorithm(config, name, *parts) for name, parts in own.items()}
    codecs = {name: PeerCodec(terms, name, config.run.seed) for name in players}
    here, there = players
    for stage in players[here].stages:
        said = {name: player.outgoing(stage, 1, [_other(name, here, there)]) for name, player in players.items()}
        for name, player in players.items():
            sender = _other(name, here, there)
            wire = b"".join(codecs[sender].encode(said[sender][name], 1, name))
            message = codecs[name].decode(wire, 1, sender)
            check(message, player.weights.numel(), player.package_parameters, classes)
            player.incorporate(stage, 1, {sender: message})


def _other(name: str, here: str, there: str) -> str:
    return there if name == here else here
