"""Your own algorithm: average with the neighbours, then train as you like.

    python examples/own_algorithm.py
    spark-dfl run --preset demo --algorithm own_algorithm:Proximal        (from the folder examples)

`spark_node.Gossip` has everything but `train`. For other messages than weights, or several exchanges a round, write a
class with the methods of `spark_node.Algorithm` (spark_node/learning/spark.py is one).
"""

import torch
from sklearn.datasets import load_digits
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

import spark_node


class Proximal(spark_node.Gossip):
    """FedProx without a server: local gradient descent that is held back to the average it started from."""

    STEPS, RATE, PULL = 30, 0.3, 0.1

    def train(self, k: int) -> dict[str, float]:
        start = self.w.clone()

        def loss(w: torch.Tensor) -> torch.Tensor:
            parameters = self.layout.unflatten(w)
            fit = cross_entropy(functional_call(self.module, parameters, (self.inputs,)), self.labels)
            return fit + self.PULL / 2 * (w - start).square().sum()

        for _ in range(self.STEPS):
            self.w = self.w - self.RATE * grad(loss)(self.w)
        return {"loss": float(loss(self.w)), "eta": self.RATE}


def main() -> None:
    x, y = load_digits(return_X_y=True)
    x = (x - x.mean(0)) / (x.std(0) + 0.1)
    for algorithm in (Proximal, "dfedavg", "spark"):
        result = spark_node.simulate(
            (x[:1000], y[:1000]),
            test=(x[1000:], y[1000:]),
            algorithm=algorithm,
            nodes=8,
            degree=3,
            partition="dirichlet:0.3",
            rounds=6,
        )
        bars = "".join("▁▂▃▄▅▆▇█"[min(int(8 * a), 7)] for a in result.curve)
        print(f"{getattr(algorithm, '__name__', algorithm):>10}  {bars}  {result.accuracy:.1%}")


if __name__ == "__main__":
    main()
