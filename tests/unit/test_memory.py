"""What a round leaves behind is gone after it, where looking for it costs nothing."""

import subprocess
import sys

import pytest

CYCLE = """
import gc, weakref
from spark_node.memory import tidy

class Thing: pass

gc.disable()
gc.collect()
if {frozen}: gc.freeze()
thing = Thing()
thing.itself = thing
gone = weakref.ref(thing)
gc.collect(0), gc.collect(1)  # it is old now
del thing
tidy()
print(gone() is None)
"""


@pytest.mark.parametrize("frozen", [True, False])
def test_what_only_refers_to_itself_ends_with_the_round_where_the_rest_is_frozen(frozen: bool) -> None:
    code = CYCLE.format(frozen=frozen)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(frozen)]
