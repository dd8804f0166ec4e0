"""What the states of optax's transformations hold, field by field."""

# What each field of a state holds:
#   "m"     a signed average of gradients that decays in some ten to a hundred steps;
#   "v"     a non-negative average that decays; rounded stochastically, it may be slow;
#   "keep"  float arrays that stay as they are;
#   "state" states of other transformations, looked into;
#   "gated" the same, but an update may leave them untouched;
#   "fp8"   already in FP8, by this library.
# Fields that are not listed hold scalars, integers or random keys only.
FIELDS: dict[str, dict[str, str]] = {
    "AccumulateAvgUpdatesState": {"avg_grad": "keep"},
    "AddNoiseState": {},
    # A sum over up to k steps, not an average.
    "ApplyEvery": {"grad_acc": "keep"},
    "ApplyIfFiniteState": {"inner_state": "gated"},
    # Sums of gradients and their maxima: nothing here decays.
    "COCOBState": dict.fromkeys(
        "init_particles cumulative_gradients scale subgradients reward".split(), "keep"
    ),
    "ConditionallyMaskState": {"inner_state": "gated"},
    "ConditionallyTransformState": {"inner_state": "gated"},
    # grad_sum decays by sqrt(b2) a step, so nearest rounding would freeze it, and its
    # norm sets the learning rate.
    "DAdaptAdamWState": {"exp_avg": "m", "exp_avg_sq": "v", "grad_sum": "keep"},
    "DifferentiallyPrivateAggregateState": {},
    "DoGState": {"init_params": "keep"},
    "DoWGState": {"init_params": "keep"},
    # May average parameters or metrics as well as gradients, at any decay. adafactor's
    # and signum's momentum is one: name it in `select`.
    "EmaState": {"ema": "keep"},
    "EmptyState": {},
    # Rows and columns are a thousandth of the bytes, and each scales a whole row.
    "FactoredState": {"v_row": "keep", "v_col": "keep", "v": "v"},
    "Fp8State": {"inner_state": "fp8"},
    # A basis used for hundreds of steps: an error in it would not average out.
    "GaLoreState": {"base_optimizer_state": "state", "projector": "keep"},
    "HutchinsonState": {},
    "InjectHyperparamsState": {"hyperparams": "keep", "inner_state": "state"},
    "InjectStatefulHyperparamsState": {
        "hyperparams": "keep",
        "hyperparams_states": "state",
        "inner_state": "state",
    },
    "LookaheadState": {"fast_state": "state"},
    # Weights and sums over the whole run.
    "MadgradState": {"grad_sum_sq": "keep", "s": "keep", "x0": "keep"},
    "MaskedNode": {},
    "MaskedState": {"inner_state": "state"},
    # m and v here are one number for each of a few decays.
    "MechanicState": {
        "base_optimizer_state": "state",
        **dict.fromkeys("r m v s x0".split(), "keep"),
    },
    "MomoAdamState": {"exp_avg": "m", "exp_avg_sq": "v"},
    "MomoState": {"exp_avg": "m"},
    "MonitorState": {"measurements": "keep", "measure_states": "keep"},
    "MultiStepsState": {
        "inner_opt_state": "gated",
        "acc_grads": "keep",
        "skip_state": "keep",
    },
    "MuonState": {"mu": "m", "ns_coeffs": "keep"},
    "PartitionState": {"inner_states": "state"},
    "PerElementMeanAndSumSqDiffGradsState": dict.fromkeys(
        "mean_grads sum_sq_diff_grads".split(), "keep"
    ),
    "PerElementMeanAndVarianceEMAState": dict.fromkeys(
        "mean_grads_ema variance_grads_ema".split(), "keep"
    ),
    # As DAdaptAdamWState; params0 are weights.
    "ProdigyState": {
        **{"exp_avg": "m", "exp_avg_sq": "v"},
        **{"grad_sum": "keep", "params0": "keep"},
    },
    # A diagonal has some ten entries.
    "RankControlState": {"mu": "keep", "nu": "keep"},
    "ReduceLROnPlateauState": {},
    # cache holds weights.
    "SAMState": {"opt_state": "gated", "adv_state": "gated", "cache": "keep"},
    # Average squares of gradients and of updates.
    "ScaleByAdaDeltaState": {"e_g": "v", "e_x": "v"},
    # Also adamax's (nu: a decaying maximum), yogi's and adopt's.
    "ScaleByAdamState": {"mu": "m", "nu": "v"},
    # m2 decays over ten thousand steps: nearest rounding would freeze it.
    "ScaleByAdemamixState": {"m1": "m", "m2": "keep", "nu": "v"},
    # v averages signed differences of gradients, n is the second moment, g the last
    # gradient.
    "ScaleByAdanState": {"m": "m", "v": "m", "n": "v", "g": "keep"},
    # A maximum over the whole run.
    "ScaleByAmsgradState": {"mu": "m", "nu": "v", "nu_max": "keep"},
    "ScaleByBacktrackingLinesearchState": {"grad": "keep", "info": "keep"},
    "ScaleByBeliefState": {"mu": "m", "nu": "v"},
    "ScaleByDistanceOverGradientsState": dict.fromkeys(
        "max_dist grad_sum_of_squares init_params".split(), "keep"
    ),
    "ScaleByFp8AdamState": {"mu": "fp8", "nu": "fp8"},
    # Curvature is read from small differences of these.
    "ScaleByLBFGSState": dict.fromkeys(
        "params updates diff_params_memory diff_updates_memory weights_memory".split(),
        "keep",
    ),
    "ScaleByLionState": {"mu": "m"},
    # nu is one number a parameter array.
    "ScaleByNovogradState": {"mu": "m", "nu": "keep"},
    "ScaleByOptimisticGradientState": {"previous_gradient": "keep"},
    # It takes the root of nu - mu^2: rounding either makes that negative.
    "ScaleByRStdDevState": {"mu": "keep", "nu": "keep"},
    "ScaleByRStdDevWithCountState": {"mu": "keep", "nu": "keep"},
    "ScaleByRmsState": {"nu": "v"},
    "ScaleByRmsWithCountState": {"nu": "v"},
    # Step sizes are multiplied by constants, and prev_updates holds their signs.
    "ScaleByRpropState": {"step_sizes": "keep", "prev_updates": "keep"},
    # A sum over the whole run.
    "ScaleByRssState": {"sum_of_squares": "keep"},
    # Here nu is the first moment, and mu the maxima over rows and columns.
    "ScaleBySM3State": {"mu": "keep", "nu": "m"},
    "ScaleByScheduleState": {},
    "ScaleBySimplifiedAdEMAMixState": {"m": "m", "n": "v"},
    "ScaleByZoomLinesearchState": {"grad": "keep", "info": "keep"},
    # z are the weights.
    "ScheduleFreeState": {"base_optimizer_state": "state", "z": "keep"},
    "SnapshotState": {"measurement": "keep"},
    # nu is the diagonal of the Hessian, which has signs, averaged very slowly.
    "SophiaState": {"mu": "m", "nu": "keep", "hessian_fn_state": "state"},
    "SplitRealAndImaginaryState": {"inner_state": "state"},
    # Momentum; of a decay of 1, which makes it a sum, it says nothing.
    "TraceState": {"trace": "m"},
    "WeightDecaySchedule": {},
    "WrappedScheduleState": {},
    "ZeroNansState": {},
}
