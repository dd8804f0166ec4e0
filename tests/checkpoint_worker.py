"""A process that saves one step after another until it is killed.

python -m tests.checkpoint_worker DIRECTORY: a line "saved N" when N is committed.
"""

import itertools
import sys

import jax
from jax import numpy as jnp
import ml_dtypes
import numpy as np

from coat_jax.checkpoint import Checkpointer

ROWS = 512  # 2 MiB: long enough to write for a kill to fall into it


def state_at(step):
    """The state of a step, so that whoever restores it can tell whether it is whole."""
    draw = np.random.default_rng(step).integers
    leaves = {f"w{i}": draw(2**31, size=(ROWS, 128), dtype=np.int32) for i in range(8)}
    codes = draw(256, size=(ROWS, 256), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return jax.tree.map(jnp.asarray, {**leaves, "codes": codes}) | {"step": step}


def main(directory):
    with Checkpointer(directory, max_to_keep=2) as checkpointer:
        newest = checkpointer.latest_step()
        for step in itertools.count(0 if newest is None else newest + 1):
            checkpointer.save(step, state_at(step), extra={"next_index": 7 * step})
            if step > 0:  # a save waits for the one before it
                print(f"saved {step - 1}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
