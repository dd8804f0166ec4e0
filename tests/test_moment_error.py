"""The remade Table 1: its arithmetic, what the published one adds up to, a run."""

import json

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from coat_jax.formats import E4M3
from experiments import harness, moment_error
from experiments.moment_error import PUBLISHED

pytestmark = pytest.mark.once


def squares(table):
    return np.asarray(table) ** 2


def spread_of_differences(table):
    """How unlike the rows' differences are: 0 where a row and a column term add up."""
    steps = table[:, :1] - table
    return (steps.max(axis=0) - steps.min(axis=0))[1:] / np.abs(steps).max(axis=0)[1:]


def gaussian_moments(shape=(64, 512)):
    """What a run's moments are like: m is Gaussian, v varies by octaves."""
    draw = np.random.default_rng(0)
    v = np.exp2(draw.normal(size=shape))
    m = draw.normal(size=shape) * np.sqrt(v)
    as_tree = lambda x: {"w": jnp.asarray(x.astype(np.float32))}
    return as_tree(m), as_tree(v)


def test_the_published_entries_are_roots():
    """Errors of m and v are independent, so mean squares add; the entries do not.

    The published differences of squares agree to 3 % over the rows (rounding to two
    places alone allows 1 %); those of the entries themselves differ by more than half.
    """
    plain_v = [0, 2]  # the second column of differences is that of E5M2
    assert spread_of_differences(squares(PUBLISHED))[plain_v].max() < 0.03
    assert spread_of_differences(PUBLISHED)[plain_v].min() > 0.5


def test_the_published_table_is_lowered_in_every_comparison():
    assert moment_error.lowered(PUBLISHED) == 16
    assert moment_error.lowered(PUBLISHED[::-1]) < 16
    assert moment_error.lowered(np.ones((4, 4))) == 0
    assert moment_error.summary(PUBLISHED)["furthest_cell"] == 0


@pytest.fixture(scope="module")
def gaussian_table():
    return moment_error.error_table(*gaussian_moments(), group=128)


def test_entries_are_the_roots_of_numpys_mean_squares(gaussian_table):
    """E4M3 without expansion, in NumPy float64 with ml_dtypes' rounding."""
    m, v = (np.asarray(tree["w"], np.float64) for tree in gaussian_moments())

    def stored(x):
        groups = x.reshape(-1, 128)
        scale = np.abs(groups).max(axis=1, keepdims=True) / E4M3.max
        codes = (groups / scale).astype(E4M3.dtype).astype(np.float64)
        return (codes * scale).reshape(x.shape)

    error = stored(m) / np.sqrt(stored(v)) - m / np.sqrt(v)
    want = 1000 * np.sqrt(np.mean(error**2))
    # Few codes fall to the other side of a tie in float32: a thousandth of the error.
    assert gaussian_table[0, 0] == pytest.approx(want, rel=1e-3)


def test_gaussian_moments_give_the_papers_pattern(gaussian_table):
    """Model: on m ~ N(0, v) the factor is 0.58 and the squares add up to 3 %."""
    facts = moment_error.summary(gaussian_table)
    assert facts["lowered"] == 16
    assert 0.5 < facts["factor"] < 0.7
    assert spread_of_differences(squares(gaussian_table))[[0, 2]].max() < 0.05
    ratio = moment_error.ratio_rms(*gaussian_moments())
    assert ratio == pytest.approx(1, abs=0.02)


def test_kept_leaves_are_left_out():
    tree = {"w": np.zeros((64, 128)), "norm": np.zeros(128), "thin": np.zeros((999, 8))}
    assert list(moment_error.large_leaves(tree)) == ["w"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the smallest preset on bytes: its results and what it wrote."""
    folder = tmp_path_factory.mktemp("moment_error")
    config = harness.parse(
        moment_error.Config,
        [
            "--preset=micro",
            "--tokenizer=bytes",
            "--at=4, 12",
            f"--cache={folder}/cache",
            f"--states={folder}/states.npz",
            f"--results={folder}/results.jsonl",
        ],
    )
    return moment_error.main(config), folder


@pytest.mark.soak
def test_a_real_run_gives_the_papers_pattern(run):
    """Model: expansion lowers the error in all 16 comparisons, as in the paper.

    The factor is not held to the paper's 0.612 here: after a few steps on bytes it is
    0.46 to 0.55 over seeds 0 to 2, or 0.12 where one v underflows without expansion.
    The runs in the experiment's header, and Gaussian moments above, are.
    """
    results, _ = run
    assert sorted(results) == [4, 12]
    for facts in results.values():
        assert facts["lowered"] == facts["published_lowered"] == 16
        assert facts["factor"] < 1
        assert 0 < facts["ratio_rms"] < 2
        assert 0 <= facts["lost_second_moments"] < 1e-3


def test_lost_second_moments_are_counted():
    v = np.ones((64, 128), np.float32)
    v[:16, 0] = 1e-9  # below half of E4M3's smallest beside a 1
    share = moment_error.lost_share({"v": jnp.asarray(v)}, group=128)
    assert share == 16 / v.size


@pytest.mark.soak
def test_a_run_records_a_line_a_step_and_keeps_the_moments(run):
    results, folder = run
    lines = (folder / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [4, 12]
    for row in rows:
        assert row["table"] == results[row["step"]]["table"]
        assert row["config"]["preset"] == "micro"
        assert row["versions"]["jax"] == jax.__version__
    with np.load(folder / "states.npz") as states:
        v = [name for name in states.files if name.startswith("12:v:")]
        assert len(v) * 4 == len(states.files)
        assert all((states[name] >= 0).all() for name in v)
        assert all(states[name].dtype == np.float32 for name in v)


@pytest.mark.parametrize(
    "option", ["--at=", "--at=0", "--at=3,x", "--group=0", "--preset=huge"]
)
def test_wrong_options_are_one_sentence(option):
    with pytest.raises(harness.UserError, match="must be"):
        harness.parse(moment_error.Config, [option])
