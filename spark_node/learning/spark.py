"""SPARK (Algorithm 1). NTK-DFL is SPARK without momentum and distillation."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spark_node.config import Config
from spark_node.learning import distillation, momentum, schedules
from spark_node.learning.algorithm import Stopwatch, no_stopwatch
from spark_node.learning.evolution import LOSSES, KernelOperator, Trajectory, choose_by_loss
from spark_node.learning.jacobian import Form, jacobian
from spark_node.learning.messages import Message, Package, Weights
from spark_node.learning.robust import average, screen
from spark_node.learning.solver import HERE, Solver
from spark_node.learning.state import taken_up
from spark_node.model import ParameterLayout, flatten
from spark_node.package.projection import Projection, ProjectionSpec
from spark_node.seeds import stream


class Spark:
    """One peer: its samples, its weights w_i and its velocity v_i."""

    def __init__(
        self,
        config: Config,
        peer: str,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        stopwatch: Stopwatch = no_stopwatch,
        *,
        projection: Projection | None = None,
        form: Form | None = None,
        solver: Solver = HERE,
    ) -> None:
        self.config, self.peer, self.module = config, peer, module
        self.inputs, self.labels = inputs, labels
        self.layout = ParameterLayout.of(module)
        self.w = flatten(module).to(inputs)
        self.v = torch.zeros_like(self.w)
        self.delta = torch.zeros_like(self.w)
        self.consensus: Tensor | None = None
        """The averaged weights of the last round, which quasi-global momentum follows."""
        self.projection = projection or Projection(self.layout, ProjectionSpec(), config.run.seed)
        self._form = form or config.learning.jacobian
        self._stopwatch = stopwatch
        self._solver = solver
        self._requests: dict[str, Tensor] = {}
        self._own: Package | None = None
        self._facts: dict[str, float] = {}

    @property
    def stages(self) -> Sequence[str]:
        """Receiver mode adds the request: the consensus weights at which neighbours linearise."""
        if self.config.learning.linearize_at == "receiver":
            return ("weights", "consensus", "package")
        return ("weights", "package")

    @property
    def weights(self) -> Tensor:
        return self.w

    @property
    def package_parameters(self) -> int:
        return self.projection.layout.size

    def facts(self) -> dict[str, float]:
        return self._facts

    def state(self) -> dict[str, Tensor]:
        kept = {"w": self.w, "v": self.v}
        return kept if self.consensus is None else {**kept, "consensus": self.consensus}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        found = taken_up(state, self.w, ("v", "consensus"))
        self.w, self.v = found["w"], found.get("v", torch.zeros_like(self.w))
        self.consensus = found.get("consensus")
        self._requests, self._own = {}, None

    def outgoing(self, stage: str, k: int, neighbours: Sequence[str]) -> dict[str, Message]:
        if stage == "weights":
            shared = Weights(self.w, self.v if self.config.momentum.average_velocity else None)
            return dict.fromkeys(neighbours, shared)
        if stage == "consensus":
            return dict.fromkeys(neighbours, Weights(self.w, request=True))
        if self.config.learning.linearize_at == "sender":
            self._own = self._linearise(self.w, k)
            return dict.fromkeys(neighbours, self._own)
        return self._answers(k, {peer: self._requests[peer] for peer in neighbours if peer in self._requests})

    def incorporate(self, stage: str, k: int, arrived: Mapping[str, Message]) -> None:
        if stage == "weights":
            self._average({peer: m for peer, m in arrived.items() if isinstance(m, Weights)})
        elif stage == "consensus":
            self._requests = {peer: m.w for peer, m in arrived.items() if isinstance(m, Weights)}
        else:
            self._update(k, {peer: m for peer, m in arrived.items() if isinstance(m, Package)})
            self._requests, self._own = {}, None

    def _average(self, arrived: Mapping[str, Weights]) -> None:
        """w_i <- Avg of w_j over the neighbours and oneself, added in the order of the peers' names."""
        everyone = {**arrived, self.peer: Weights(self.w, self.v)}
        self.w = average({peer: m.w for peer, m in everyone.items()}, self.peer, self.config.robust)
        if self.config.momentum.average_velocity:
            velocities = {peer: m.v for peer, m in everyone.items() if m.v is not None}
            self.v = average(velocities, self.peer, self.config.robust)
        if self.config.momentum.kind == "quasi-global":
            self.v = momentum.follow(self.config.momentum.mu, self.v, self.consensus, self.w)
            self.consensus = self.w

    def _sample(self, k: int) -> tuple[Tensor, Tensor]:
        """This round's 1/m of the peer's samples."""
        m, n = self.config.learning.subsample, len(self.labels)
        if m == 1:
            return self.inputs, self.labels
        chosen = stream(self.config.run.seed, "subsample", self.peer, k).choice(n, max(1, n // m), replace=False)
        rows = torch.from_numpy(chosen).sort().values.to(self.inputs.device)
        return self.inputs[rows], self.labels[rows]

    def _answers(self, k: int, requests: Mapping[str, Tensor]) -> dict[str, Message]:
        """A package for each request, one for all that ask for the same weights: a cluster shares its consensus."""
        made: list[Package] = []
        answers: dict[str, Message] = {}
        for peer, w in requests.items():
            package = next((p for p in made if p.at is not None and torch.equal(p.at, w)), None)
            if package is None:
                package = replace(self._linearise(w, k), at=w)
                made.append(package)
            answers[peer] = package
            if torch.equal(w, self.w):
                self._own = package
        return answers

    def _linearise(self, w: Tensor, k: int) -> Package:
        """J P and z of the peer's samples at the weights w."""
        x, y = self._sample(k)
        with self._stopwatch("jacobian"):
            found = jacobian(self.module, w, x, form=self._form, chunk=self.config.learning.jacobian_chunk)
        with self._stopwatch("projection"):
            sketched = self.projection.apply(found, k)
        bound = self.config.privacy.logit_bound
        if bound > 0:
            sketched = replace(sketched, logits=sketched.logits.clamp(-bound, bound))
        return Package(sketched, y)

    def _update(self, k: int, arrived: Mapping[str, Package]) -> None:
        """Kernel, target, evolution, weight update, momentum."""
        everyone = {**arrived, self.peer: self._own or self._linearise(self.w, k)}
        refused = self._screen(everyone)
        packages = {peer: everyone[peer] for peer in sorted(everyone) if peer not in refused}
        settings = self.config.learning
        eta = schedules.learning_rate(settings, k)
        alpha, tau = distillation.schedule(self.config.distillation, k, self.config.run.rounds)
        f0 = torch.cat([p.jacobian.logits for p in packages.values()])
        hard = nn.functional.one_hot(torch.cat([p.labels for p in packages.values()]), f0.shape[1]).to(f0)
        with ExitStack() as held:
            with self._stopwatch("kernel"):
                jacobians = [p.jacobian for p in packages.values()]
                kernel = held.enter_context(self._solver.kernel(schedules.kernel(settings, k), jacobians))
            with self._stopwatch("evolution"):
                trajectory = self._solver.evolve(
                    kernel,
                    f0,
                    distillation.target(hard, f0, alpha, tau),
                    eta=eta,
                    timesteps=settings.timesteps,
                    integrator=settings.integrator,
                    tolerance=settings.tolerance,
                    loss=settings.loss,
                )
            with self._stopwatch("back-projection"):
                chosen, loss, self.delta = self._select(k, kernel, trajectory, eta, hard, packages)
        self.w, self.v = momentum.step(self.config.momentum.kind, self.config.momentum.mu, self.w, self.v, self.delta)
        self._facts = {
            "loss": loss,
            "t_star": float(trajectory.times[chosen]),
            "eta": eta,
            "alpha": alpha,
            "tau": tau,
            "kernel_products": float(trajectory.evaluations),
            **{f"left_out_{reason}": float(count) for reason, count in Counter(refused.values()).items()},
        }

    def _screen(self, packages: Mapping[str, Package]) -> dict[str, str]:
        """Neighbours whose packages are left out, and why."""
        if not self.config.robust.packages:
            return {}
        with self._stopwatch("screening"):
            return screen(packages, self.peer, self.config.robust, self.config.learning.loss)

    def _select(
        self,
        k: int,
        kernel: KernelOperator,
        trajectory: Trajectory,
        eta: float,
        hard: Tensor,
        packages: Mapping[str, Package],
    ) -> tuple[int, float, Tensor]:
        """t*, its loss, and Delta w = -(eta / N) J^T S_{t*} (eq. compressed_update)."""
        value = LOSSES[self.config.learning.loss].value

        def update(i: int) -> Tensor:  # and the back-projection (eq. backproject)
            return self.projection.lift(kernel.pull_back(trajectory.residual_sums[i]), k).mul_(-eta / kernel.samples)

        if self.config.learning.select_by == "linearized":
            losses = [float(value(f, hard)) for f in trajectory.predictions]
            chosen = choose_by_loss(losses)
            return chosen, losses[chosen], update(chosen)
        x, y = self._legitimate_inputs(packages, hard.shape[1])
        updates = [update(i) for i in range(len(trajectory.times))]
        losses = [float(value(self._logits(self.w + delta, x), y)) for delta in updates]
        chosen = choose_by_loss(losses)
        return chosen, losses[chosen], updates[chosen]

    def _legitimate_inputs(self, packages: Mapping[str, Package], classes: int) -> tuple[Tensor, Tensor]:
        """The peer's own samples, and those inputs that its neighbours' packages carry anyway."""
        inputs, labels = [self.inputs], [self.labels]
        for peer, package in packages.items():
            raw = package.jacobian.raw_inputs()
            if peer != self.peer and raw is not None and raw[0].numel() == self.inputs[0].numel():
                inputs.append(raw.view(-1, *self.inputs.shape[1:]))
                labels.append(package.labels)
        return torch.cat(inputs), nn.functional.one_hot(torch.cat(labels), classes).to(self.inputs)

    def _logits(self, w: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = functional_call(self.module, self.layout.unflatten(w), (x,))
        return logits


def without_acceleration(config: Config) -> Config:
    """The configuration under which Spark is NTK-DFL."""
    return dataclasses.replace(
        config,
        momentum=dataclasses.replace(config.momentum, kind="off", average_velocity=False),
        distillation=dataclasses.replace(config.distillation, enabled=False),
    )
