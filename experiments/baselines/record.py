"""The training run whose gradients every optimizer gets: bytes of text, an MLP, AdamW.

A byte is predicted from the CONTEXT bytes before it: their embeddings side by side, two
hidden layers, softmax. Every leaf of 4096 elements or more is whole blocks of 128 and
256 in memory, so that each optimizer stores the same leaves in 8 bits; the rows of
`w2`, 200 wide, are no whole groups, and most bytes' embeddings are rarely trained.
"""

import functools
import pathlib

import jax
from jax import numpy as jnp
import numpy as np
import optax

from experiments import corpus
from experiments.baselines.exchange import Adam, Recording

CONTEXT = 4  # bytes seen
WIDTH, NARROW = 256, 200  # hidden units; NARROW is no multiple of a group
BATCH = 256
TEXT_BYTES = 4_000_000


def read_text(limit: int = TEXT_BYTES) -> np.ndarray:
    """The first bytes of the standard library's sources, by path, as uint8."""
    root, names = corpus.stdlib_files(tests=False)
    parts, size = [], 0
    for name in names:
        parts.append(pathlib.Path(root, name).read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return np.frombuffer(b"".join(parts)[:limit], np.uint8)


def init_params(seed: int, width: int = WIDTH, narrow: int = NARROW) -> dict:
    """Float32 leaves; weights of variance 1 / fan-in, embeddings of variance 1."""
    shapes = {
        "embed": (256, width),
        "w1": (CONTEXT * width, width),
        "w2": (width, narrow),
        "head": (narrow, 256),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    params = {"b1": jnp.zeros(width)}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True):
        deviation = 1.0 if name == "embed" else shape[0] ** -0.5
        params[name] = deviation * jax.random.normal(key, shape)
    return params


def loss(params, windows) -> jax.Array:
    """Mean cross-entropy of the last byte of each window given those before it."""
    seen, wanted = windows[:, :-1], windows[:, -1]
    x = params["embed"][seen].reshape(len(windows), -1)
    x = jax.nn.silu(x @ params["w1"] + params["b1"][None])
    logits = jax.nn.silu(x @ params["w2"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()


def _batches(text: np.ndarray, steps: int, seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - CONTEXT, BATCH)
        yield text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


@functools.cache  # so that runs of other seeds compile nothing
def _training_step(adam: Adam):
    tx = optax.adamw(
        adam.lr, adam.b1, adam.b2, adam.eps, weight_decay=adam.weight_decay
    )

    @jax.jit
    def step(params, state, windows):
        value, grads = jax.value_and_grad(loss)(params, windows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads, value

    return tx, step


def record(
    params: dict, text: np.ndarray, *, steps: int, seed: int, adam: Adam
) -> tuple[Recording, list[float]]:
    """Trains with float32 `optax.adamw`; the recording and the loss of every step."""
    tx, step = _training_step(adam)
    first, state, rows, losses = params, tx.init(params), [], []
    for windows in _batches(text, steps, seed):
        params, state, grads, value = step(params, state, windows)
        rows.append(jax.tree.map(np.asarray, grads))
        losses.append(float(value))
    plain = lambda tree: {name: np.asarray(leaf) for name, leaf in tree.items()}
    stacked = {name: np.stack([row[name] for row in rows]) for name in first}
    return Recording(plain(first), stacked, plain(params), adam), losses
