"""Join a running network from a notebook: each `# %%` is a cell; as a script it runs from top to bottom.

Start the network first, in a terminal (three peers and an orchestrator that waits for a fourth):

    spark-dfl certs init authority
    spark-dfl certs issue authority --role orchestrator --out orchestrator-certs
    spark-dfl certs issue authority --peers 0:3 --out host-certs
    spark-dfl certs issue authority notebook --out my-certs
    spark-dfl orchestrator --certs orchestrator-certs --nodes 4 --degree 3 --port 7000 &
    spark-dfl host --certs host-certs --nodes 4 --count 3 --rounds 8 --orchestrator 127.0.0.1:7000
"""

# %% My own samples. What leaves are weights and packages; docs/privacy.md says what those tell of them.
import os

from sklearn.datasets import load_digits

import spark_node

digits = load_digits()
x = (digits.images.reshape(-1, 1, 8, 8) / 16 - 0.3044) / 0.3757
y = digits.target
mine, test = slice(0, 150), slice(1000, 1797)

# %% Join, as the holder of the certificate in my-certs.
peer = spark_node.Peer(
    x[mine],
    y[mine],
    model="mlp",
    classes=10,
    orchestrator=os.environ.get("ORCHESTRATOR", "127.0.0.1:7000"),
    certs="my-certs",
    test=(x[test], y[test]),
    rounds=8,
).start()
print(peer)

# %% Each round as it ends. Training never waits for this loop.
for done in peer.rounds():
    print(f"round {done.round}: {done.accuracy:.1%} with {done.neighbours} neighbours, {done.bytes_sent:,} bytes sent")

# %% The model is an ordinary torch module.
print(peer.model)
print(f"{peer.accuracy(x[test], y[test]):.1%} on samples that I never trained on")

# %% Leave. The neighbours hear of it through the orchestrator.
peer.stop()
print(peer)
