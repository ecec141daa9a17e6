"""Your own model: any torch module that gives one logit a class.

    python examples/own_model.py

A small residual convolutional network reads handwritten digits; eight peers train it, with some 50 images each.
On the command line the same model is: spark-dfl run --set model.kind=own_model:Net   (from the folder examples).
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import spark_node


class Net(nn.Module):
    """Convolutions with a shortcut. Linear and plain convolutional layers travel in factored form, all else densely."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = avg_pool2d(torch.relu(self.first(x)), 2)
        h = h + torch.relu(self.second(h))
        logits: Tensor = self.head(avg_pool2d(h, 2).flatten(1))
        return logits


def main() -> None:
    digits = load_digits()
    x = torch.tensor(digits.images).float().div(16).sub(0.3).div(0.38).unsqueeze(1)
    y = torch.tensor(digits.target)
    result = spark_node.simulate(
        (x[:400], y[:400]),
        model=Net,
        test=(x[400:900], y[400:900]),
        nodes=8,
        degree=3,
        partition="dirichlet:1",
        rounds=5,
        settings={"learning.kernel": "full"},  # worth its time for convolutions
        on_round=lambda r: print(f"round {r.round}: {r.aggregated_accuracy:.1%}"),
    )
    print(result)

    net = result.model  # an ordinary torch module: predict, save, train on
    with torch.no_grad():
        shares = net(x[900:903]).softmax(1)
    for image, share in zip(digits.images[900:903], shares, strict=True):
        print("\n".join("".join(" .:oO@"[min(int(v / 3), 5)] * 2 for v in row) for row in image))
        print(f"is a {int(share.argmax())}, it says, and is {float(share.max()):.0%} sure\n")


if __name__ == "__main__":
    main()
