"""Your own data: hospitals that see different kinds of patients train one model together.

    python examples/own_dataset.py

Each hospital has some patients (30 measurements of a biopsy each; benign or malignant), and not the same kinds of
patients. First everyone learns alone; then all learn together, each with its own file. Mind what that means: by default
a package tells a neighbour as much as the samples themselves, and docs/privacy.md says what can be done about it.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer

import spark_node

HOSPITALS = 6

# Any arrays will do: x [N, ...] of floating-point numbers, standardised, and y [N] of class numbers from 0 on.
x, y = load_breast_cancer(return_X_y=True)
x = (x - x.mean(0)) / x.std(0)
order = np.random.default_rng(0).permutation(len(x))
test, rest = order[:169], order[169:]

# Unequal shares: sorted by the size of the tumour, each hospital sees mostly its own kind.
by_size = rest[np.argsort(x[rest, 0] + np.random.default_rng(1).normal(0, 0.5, len(rest)))]
hospitals = [(x[own], y[own]) for own in np.array_split(by_size, HOSPITALS)]

settings = {"model.hidden": [16]}
print(f"{'hospital':>8}  {'patients':>8}  {'malignant':>9}  alone")
for number, (own_x, own_y) in enumerate(hospitals):
    alone = spark_node.simulate([(own_x, own_y)], test=(x[test], y[test]), rounds=5, settings=settings)
    print(f"{number:>8}  {len(own_y):>8}  {np.mean(own_y == 0):>9.0%}  {alone.accuracy:.1%}")

print("\ntogether, round by round:")
together = spark_node.simulate(
    hospitals,
    test=(x[test], y[test]),
    rounds=5,
    settings=settings,
    on_round=lambda r: print(f"  {r.round}  {'#' * round(40 * r.aggregated_accuracy)} {r.aggregated_accuracy:.1%}"),
)
print(f"\n{together}")

# The same samples as a file for the command line, which deals them out itself:
#   spark-dfl run --dataset file:patients.npz --partition dirichlet:0.5 --nodes 6 --rounds 5
np.savez("patients.npz", x=x[rest].astype(np.float32), y=y[rest], x_test=x[test].astype(np.float32), y_test=y[test])
print("patients.npz is written; try: spark-dfl run --dataset file:patients.npz --nodes 6 --degree 3 --rounds 5")
