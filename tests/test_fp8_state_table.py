"""fp8_state over all of optax: what it stores and keeps, and steps that stay close."""

import sys

import numpy as np
import pytest

from coat_jax.fp8_state import fp8_state
from coat_jax.moments import Storage
from coat_jax.optax_fields import FIELDS
from tests import optax_cases
from tests.helpers import assert_same_bits, assert_sqnr

pytestmark = [pytest.mark.usefixtures("optax_promotion"), pytest.mark.once]

SMALL = Storage(min_size=1024)  # the cases' matrices are small
# Updates of three steps against float32: a model's tolerance, in dB. A stored moment is
# off by some 3 %, which leaves 30 dB.
CLOSE = 20.0
# Updates that are signs, quotients of nearly equal numbers, or step lengths from small
# differences amplify the error of a moment.
LOOSE = 12.0
AMPLIFIES = {"contrib.momo", "contrib.momo_adam", "contrib.mechanize"}
# No field is stored: nothing in the state decays, or it is a scalar.
STATELESS = set(
    "adaptive_grad_clip add_decayed_weights add_noise apply_every centralize clip"
    " clip_by_block_rms clip_by_global_norm fromage freeze identity"
    " keep_params_nonnegative noisy_sgd normalize_by_update_norm polyak_sgd scale"
    " scale_by_learning_rate scale_by_param_block_norm scale_by_param_block_rms"
    " scale_by_polyak scale_by_schedule scale_by_sign scale_by_trust_ratio set_to_zero"
    " sign_sgd snapshot stateless stateless_with_tree_map zero_nans"
    " contrib.differentially_private_aggregate contrib.normalize"
    " contrib.reduce_on_plateau".split()
) | {"weight decay by a schedule"}
KEPT = set(
    "adagrad ema lbfgs optimistic_gradient_descent rprop signum scale_by_rss"
    " scale_by_backtracking_linesearch scale_by_distance_over_gradients scale_by_lbfgs"
    " scale_by_optimistic_gradient scale_by_rprop scale_by_stddev"
    " scale_by_zoom_linesearch contrib.cocob contrib.dog contrib.dowg contrib.madgrad"
    " contrib.scale_by_cocob contrib.scale_by_madgrad contrib.schedule_free_sgd".split()
) | {"rmsprop, centered", "stddev, corrected", "scale_by_factored_rms"}


@pytest.mark.parametrize("name", optax_cases.CASES)
# optax's own: noisy_sgd has no argument for the key that it asks for, dpsgd neither.
@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')
@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning")
def test_every_optax_transformation_stays_close(name):
    stores = name not in STATELESS | KEPT
    steps = 3 if stores else 1
    want, plain = optax_cases.run(name, optax_cases.build(name), steps)
    tx = fp8_state(optax_cases.build(name), storage=SMALL)
    got, state = optax_cases.run(name, tx, steps)
    assert bool(optax_cases.in_fp8(state)) == stores
    if not stores:
        if not optax_cases.expanded(state):
            assert_same_bits(state.inner_state, plain)
        assert_same_bits(got, want)
        return
    decibels = LOOSE if name in AMPLIFIES else CLOSE
    found = assert_sqnr(optax_cases.flat(got), optax_cases.flat(want), decibels)
    updates_before_rounding = {"MultiSteps", "contrib.sam"}  # one real step of three
    assert np.isfinite(found) or name in updates_before_rounding
    assert optax_cases.size(state) < optax_cases.size(plain)


def optax_classes() -> dict[str, type]:
    """Each NamedTuple class that optax defines, by name."""
    found = {}
    modules = [m for name, m in sys.modules.items() if name.startswith("optax.")]
    for module in modules:
        for cls in vars(module).values():
            named_tuple = isinstance(cls, type) and hasattr(cls, "_fields")
            if named_tuple and cls.__module__.startswith("optax."):
                found[cls.__name__] = cls
    return found


# NamedTuples of optax that are no states, or only live inside a line search's loop.
NOT_STATES = set(
    "BacktrackingLineSearchState BacktrackingLinesearchInfo GaLoreDimensionNumbers"
    " GradientTransformation GradientTransformationExtraArgs LookaheadParams"
    " MuonDimensionNumbers SplitRealAndImaginaryArrays ZoomLinesearchInfo"
    " ZoomLinesearchState Aggregator Aux _ProjectionState _UpdateResult".split()
)
# Fields that hold a scalar, an integer, a bool or a random key in every class.
SCALARS = set(
    "avg_value b1 barf best_value cooldown_count count count_m2 ema_decay estim_lr"
    " estim_sq_dist found_nan gamma gradient_step is_init_step is_initial_step key"
    " last_finite lb learning_rate max_dist max_lr micro_step mini_step notfinite_count"
    " numerator_weighted plateau_count ready rng_key scale step step_count"
    " steps_since_sync sum_sq_norm_grads t total_notfinite value weight_sum"
    " weighted_sq_norm_grads".split()
)


def test_the_table_knows_each_state_class_of_optax_and_all_its_fields():
    classes = optax_classes()
    ours = {"Fp8State", "RankControlState", "ScaleByFp8AdamState"}
    assert set(FIELDS) - ours == set(classes) - NOT_STATES
    for name in set(FIELDS) - ours:
        listed, fields = set(FIELDS[name]), set(classes[name]._fields)
        assert listed <= fields, name
        assert fields - listed <= SCALARS, name
