"""One arm of `experiments.comera_codebert`: model, masks and compiled functions.

The tokens lie on the device and an epoch is one `lax.scan` there. Both stages of tensor
trains are that one program; only truncation, which changes shapes, compiles another.
Optimizers and stages are those of `experiments.comera_pairs`.

Shape letters: B windows, T tokens, P masked places of a window, H hidden, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import numpy as jnp
import numpy as np
import optax

from coat_jax import policy as policies
from coat_jax import rank_control, truncation
from coat_jax.models import encoder
from experiments import comera_pairs_arm as pairs

# Hidden size, encoders, heads, ffn.
SIZES = {"full": (768, 6, 12, 3072), "micro": (32, 1, 2, 64)}
_EVAL_BATCH = 256
_STD = 0.02  # of embeddings, as in BERT


class Masked(NamedTuple):
    """ids: int32 (B, T), some replaced. places, targets: int32 (B, P)."""

    ids: Any
    places: Any
    targets: Any


def masked(ids_BT, key, *, share: float, vocab: int) -> Masked:
    """`share` of each window's places, drawn without repetition, to be guessed.

    Of those 80 % show the mask, whose id is `vocab`, 10 % a random token and 10 % what
    is there: BERT's rule. Every window has equally many, so that shapes are static.
    """
    B, T = ids_BT.shape
    of_places, of_kind, of_token = jax.random.split(key, 3)
    P = max(1, round(share * T))
    places = jax.lax.top_k(jax.random.uniform(of_places, (B, T)), P)[1]
    targets = jnp.take_along_axis(ids_BT, places, axis=1)
    kind = jax.random.uniform(of_kind, (B, P))
    random = jax.random.randint(of_token, (B, P), 0, vocab, jnp.int32)
    shown = jnp.where(kind < 0.8, vocab, jnp.where(kind < 0.9, random, targets))
    rows = jnp.arange(B)[:, None]
    return Masked(ids_BT.at[rows, places].set(shown), places, targets)


class MaskedEncoder(nnx.Module):
    """Encoder blocks under a head that guesses tokens, its table that of the input."""

    def __init__(
        self, config: encoder.EncoderConfig, layers: encoder.Layers, *, rngs: nnx.Rngs
    ):
        H, types = config.hidden, {"dtype": config.dtype}
        normal = {"embedding_init": nnx.initializers.normal(_STD), "rngs": rngs}
        norm = lambda: nnx.LayerNorm(H, epsilon=1e-6, rngs=rngs, **types)
        self.embed = nnx.Embed(config.vocab, H, **normal, **types)
        self.position = nnx.Embed(config.positions, H, **normal, **types)
        self.norm, self.final_norm = norm(), norm()
        self.blocks = nnx.List(
            [
                encoder.EncoderBlock(config, layers, rngs=rngs)
                for _ in range(config.layers)
            ]
        )
        self.turn = nnx.Linear(H, H, rngs=rngs, **types)
        self.bias = nnx.Param(jnp.zeros(config.vocab))

    def __call__(self, ids_BT, places_BP):
        """Logits (B, P, V) at the places, float32."""
        B, T = ids_BT.shape
        x_BTH = self.embed(ids_BT) + self.position(jnp.arange(T))[None]
        x_BTH, all_of_them = self.norm(x_BTH), jnp.ones((B, T), jnp.bool)
        for block in self.blocks:
            x_BTH = block(x_BTH, all_of_them, None)
        x_BPH = jnp.take_along_axis(x_BTH, places_BP[..., None], axis=1)
        x_BPH = self.final_norm(jax.nn.gelu(self.turn(x_BPH)))
        return self.embed.attend(x_BPH).astype(jnp.float32) + self.bias[...][None, None]


def model_of(config, vocab: int) -> tuple[encoder.EncoderConfig, encoder.Layers]:
    """The sizes and layers that a config asks for; the table has room for the mask."""
    hidden, count, heads, ffn = SIZES[config.size]
    sizes = encoder.EncoderConfig(
        vocab=-(-(vocab + 1) // 64) * 64,
        hidden=hidden,
        ffn=ffn,
        layers=count,
        heads=heads,
        classes=1,  # has no such head
        positions=config.seq,
        dropout=0.0,
        norm_eps=1e-6,
        dtype=jnp.dtype(config.dtype),
    )
    policy = policies.PRESETS[config.policy]
    if pairs.is_tensor_train(config):
        how = {"rank": config.rank, "embed_rank": None, "policy": policy}
        return sizes, encoder.tensor_train_layers(**how)
    return sizes, encoder.Layers() if policy.plain else encoder.fp8_layers(policy)


def functions_of(config, vocab: int):
    """init(key) -> params, apply(params, ids, places) -> logits."""
    sizes, layers = model_of(config, vocab)
    build = lambda key: MaskedEncoder(sizes, layers, rngs=nnx.Rngs(key))
    graph, _ = nnx.split(nnx.eval_shape(lambda: build(jax.random.key(0))))
    init = lambda key: nnx.to_pure_dict(nnx.state(build(key)))
    return init, lambda params, *given: nnx.merge(graph, params)(*given)


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """Functions of an arm, the same for all its seeds.

    start: key -> State. epoch: (State, key) -> State, figures by step, for `compiled`.
    evaluate: params -> {"loss", "accuracy"} at the held-out text's masked places.
    """

    start: Any
    epoch: Any
    evaluate: Any
    windows: Any
    steps: int


def windows_of(ids: np.ndarray, seq: int) -> np.ndarray:
    """Consecutive windows, uint16 (n, seq); what is left over is dropped."""
    count = len(ids) // seq
    return ids[: count * seq].reshape(count, seq).astype(np.uint16)


def objective_of(config) -> rank_control.Objective:
    """What tensor trains minimise.

    While only tokens' frequencies are learnt, the loss defends no rank: hence delay.
    """
    how = {"gamma": config.gamma, "beta": config.beta, "delay": config.delay}
    return rank_control.Objective(kind=config.objective, **how)


def build(config, tokens) -> Arm:
    """The arm's functions; nothing is compiled yet."""
    windows = jax.device_put(windows_of(tokens.train, config.seq))
    most = len(windows) // config.batch
    steps = min(most, config.epoch_steps or most)
    tx = pairs.optimizer_of(config, steps)
    init, apply = functions_of(config, tokens.vocab)
    step = _step_of(config, apply, tx, tokens.vocab)

    def start(key):
        params, control = init(key), None
        if pairs.is_tensor_train(config):
            control = objective_of(config).init(params)
        key = jax.random.fold_in(key, 1)
        with jax.numpy_dtype_promotion("standard"):
            return pairs.State(jnp.int32(0), params, tx.init(params), control, key)

    def epoch(state, key, windows):
        order = jax.random.permutation(key, len(windows))[: steps * config.batch]
        body = lambda state, rows: step(state, windows[rows].astype(jnp.int32))
        with jax.numpy_dtype_promotion("standard"):
            return jax.lax.scan(body, state, order.reshape(steps, config.batch))

    return Arm(
        start=jax.jit(start),
        epoch=jax.jit(epoch, donate_argnums=0),
        evaluate=_evaluation(config, apply, tokens),
        windows=windows,
        steps=steps,
    )


def _loss_of(config, apply, vocab: int):
    """(params, ids, key) -> cross-entropy of each masked place, and whether right."""

    def loss(params, ids_BT, key):
        given = masked(ids_BT, key, share=config.mask, vocab=vocab)
        logits_BPV = apply(params, given.ids, given.places)
        entropy = optax.softmax_cross_entropy_with_integer_labels
        right = jnp.argmax(logits_BPV, axis=-1) == given.targets
        return entropy(logits_BPV, given.targets), right

    return loss


def _step_of(config, apply, tx, vocab: int):
    """(state, ids) -> state, figures: one update."""
    tensor_trains = pairs.is_tensor_train(config)
    of_places = _loss_of(config, apply, vocab)

    def whole(params, objective, ids_BT, key):
        loss = jnp.mean(of_places(params, ids_BT, key)[0])
        if not tensor_trains:
            return loss, ({"loss": loss, "pressure": jnp.float32(1)}, objective)
        return objective_of(config)(loss, params, objective)

    def step(state, ids_BT):
        key = jax.random.fold_in(state.key, state.step)
        grads, (figures, objective) = jax.grad(whole, has_aux=True)(
            state.params, state.objective, ids_BT, key
        )
        extra = {"pressure": figures.pop("pressure")} if tensor_trains else {}
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra)
        params = optax.apply_updates(state.params, updates)
        new = pairs.State(state.step + 1, params, opt_state, objective, state.key)
        return new, figures

    return step


def _evaluation(config, apply, tokens):
    """params -> loss and accuracy on held-out windows, masked the same each time."""
    held = windows_of(tokens.held, config.seq)[: config.eval_windows]
    size = min(_EVAL_BATCH, len(held))
    batches = jax.device_put(
        held[: len(held) // size * size].reshape(-1, size, config.seq)
    )
    of_places = _loss_of(config, apply, tokens.vocab)

    @jax.jit
    def sums(params, batches):
        def body(_, numbered):
            number, ids = numbered
            key = jax.random.fold_in(jax.random.key(0), number)
            losses, right = of_places(params, ids.astype(jnp.int32), key)
            return None, (jnp.mean(losses), jnp.mean(right.astype(jnp.float32)))

        with jax.numpy_dtype_promotion("standard"):
            numbered = jnp.arange(len(batches)), batches
            means = jax.lax.scan(body, None, numbered)[1]
        return jax.tree.map(jnp.mean, means)

    def evaluate(params):
        loss, accuracy = sums(params, batches)
        return {"loss": float(loss), "accuracy": float(accuracy)}

    return evaluate


def compiled(arm: Arm, state, key):
    """(state, key) -> state, figures, for these shapes; and its peak in bytes."""
    made = arm.epoch.lower(state, key, arm.windows).compile()
    run = lambda state, key: made(state, key, arm.windows)
    found = made.memory_analysis()
    if found is None:
        return run, None
    size = found.argument_size_in_bytes + found.output_size_in_bytes
    return run, int(size + found.temp_size_in_bytes - found.alias_size_in_bytes)


def sizes(params) -> dict[str, int]:
    """Parameters of everything, and of the blocks' matrices or the cores for them."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = lambda path: {getattr(key, "key", None) for key in path}
    is_matrix = lambda path: (
        "blocks" in names(path) and bool({"kernel", "cores"} & names(path))
    )
    return {
        "parameters": sum(leaf.size for _, leaf in leaves),
        "matrices": sum(leaf.size for path, leaf in leaves if is_matrix(path)),
    }


def end_stage(arm: Arm, config, state):
    """The state without dead ranks; bytes, and the loss before and after."""
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    facts = {"held_out": arm.evaluate(state.params)}
    if pairs.is_tensor_train(config):
        fp8 = not policies.PRESETS[config.policy].plain
        how = {"multiple_of": 16 if fp8 else None}
        small = truncation.truncate(state.params, state.opt_state, **how)
        state = state._replace(params=small.params, opt_state=small.opt_state)
        facts["held_out_truncated"] = arm.evaluate(state.params)
        facts["ranks"] = {
            k: [*r[1:-1]] for k, r in rank_control.ranks(state.params).items()
        }
    facts |= {
        "parameter_bytes": nbytes(state.params),
        "optimizer_bytes": nbytes(state.opt_state),
        **sizes(state.params),
    }
    return state, facts
