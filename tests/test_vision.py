"""The image experiment: its data, its arms, what it writes, what it refuses."""

import dataclasses
import gzip
import json

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax import training
from experiments import fashion_mnist, harness, vision, vision_arm
from experiments.harness import ExitCode, UserError
from tests.helpers import assert_reordered

pytestmark = pytest.mark.once


def idx(array: np.ndarray) -> bytes:
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The four files with 40 and 30 images of 14 x 14, a bright row for each class."""
    root, rng = tmp_path_factory.mktemp("idx"), np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 30)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = rng.integers(0, 100, (count, 14, 14), dtype=np.uint8)
        images[np.arange(count), labels] = 255
        for kind, array in (("images", images), ("labels", labels)):
            name = fashion_mnist.FILES[f"{part}_{kind}"]
            (root / name).write_bytes(gzip.compress(idx(array), 1))
    return root


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy of the folder, to be written to."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def command(folder, tmp_path, *more):
    out = (f"--results={tmp_path / 'r.jsonl'}", f"--image={tmp_path / 'i.png'}")
    small = ("--size=micro", "--epochs=1", "--batch=8", "--epoch_steps=2")
    return [f"--data={folder}", *out, *small, "--dtype=float32", *more]


def test_two_steps_are_recorded_tabled_and_drawn(folder, tmp_path, capsys):
    only = ("--model=vit", "--policy=default", "--optimizer=adamw", "--seeds=1")
    arguments = command(folder, tmp_path, *only)
    assert harness.run_main(vision.main, vision.Config, arguments) == ExitCode.DONE
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["config"]["model"] == "vit"
    assert (row["config"]["epochs"], row["config"]["lr"]) == (1, 1e-3)
    assert (row["seed"], row["train_images"], row["test_images"]) == (0, 40, 30)
    assert row["test_accuracy"] in [n / 30 for n in range(31)]
    assert row["optimizer_bytes_per_parameter"] == pytest.approx(8, abs=0.01)
    assert not row["published_data"]
    assert (tmp_path / "i.png").stat().st_size > 1000
    assert "vit default adamw" in capsys.readouterr().out


def fake_row(config, name, seed, accuracy, sha256):
    (arm,) = (arm for arm in vision.arms(config) if vision.name_of(arm) == name)
    row = {"seed": seed, "test_accuracy": accuracy, "data_sha256": sha256}
    rest = {"optimizer_bytes_per_parameter": 2.0, "kept_bytes_per_image": 1e3}
    harness.record(config.results, arm, {**row, **rest, "step_ms": 1.0})


def test_the_table_is_of_runs_with_these_settings(folder, tmp_path, capsys):
    arguments = command(folder, tmp_path, "--seeds=0")
    config = harness.parse(vision.Config, arguments)
    sha256 = fashion_mnist.read(folder).sha256
    other = dataclasses.replace(config, weight_decay=0.5)
    fake_row(config, "cnn bf16 adamw", 0, 0.1, sha256)
    fake_row(config, "cnn bf16 adamw", 0, 0.5, sha256)  # the later of two counts
    fake_row(config, "cnn bf16 adamw", 1, 0.7, sha256)
    fake_row(config, "vit paper fp8_adamw", 0, 0.25, sha256)
    fake_row(config, "vit paper fp8_adamw", 1, 0.26, "of other data")
    fake_row(other, "vit bf16 adamw", 0, 0.3, sha256)
    found = vision.comparable(config, sha256)
    scores = {
        n: {s: r["test_accuracy"] for s, r in f.items()} for n, f in found.items()
    }
    want = {"cnn bf16 adamw": {0: 0.5, 1: 0.7}, "vit paper fp8_adamw": {0: 0.25}}
    assert scores == want
    assert harness.run_main(vision.main, vision.Config, arguments) == ExitCode.DONE
    assert "0.5000 to 0.7000" in capsys.readouterr().out


def test_all_means_every_arm_with_its_own_recipe():
    arms = vision.arms(vision.Config(lr=0.5))
    assert len({vision.name_of(arm) for arm in arms}) == len(arms) == 12
    assert {(arm.model, arm.epochs, arm.lr) for arm in arms} == {
        ("vit", 20, 0.5),
        ("cnn", 10, 0.5),
    }


def test_augmentation_shifts_and_mirrors_and_does_no_more():
    image = np.zeros((1, 9, 9, 1), np.uint8)
    image[0, 4, 3] = 7
    many = np.repeat(image, 400, axis=0)
    got = np.asarray(vision_arm.augmented(many, jax.random.key(0)))[..., 0]
    assert got.dtype == np.uint8
    assert (got.sum(axis=(1, 2)) == 7).all()
    rows, columns = np.nonzero(got)[1:]
    assert set(rows) == {2, 3, 4, 5, 6}
    assert set(columns) == {1, 2, 3, 4, 5} | {8 - c for c in (1, 2, 3, 4, 5)}


def test_an_epoch_is_the_same_steps_scanned_and_looped():
    images = np.arange(24, dtype=np.float32).reshape(8, 3)
    train = (images, np.arange(8, dtype=np.int32))
    tx = optax.sgd(0.1, momentum=0.5)
    loss = lambda p, batch, key: jnp.mean((p[None] - batch[0]) ** 2) + batch[1][0] / 8
    order = lambda key: jax.random.permutation(key, 8)[:6].reshape(3, 2)
    results = []
    for scan in (True, False):
        step = training.make_train_step(loss, tx)
        run = vision_arm.epoch_of(step, order, train, scan=scan)
        state = training.init_state(jnp.ones(3), tx, jax.random.key(0))
        state, losses = run(state, jax.random.key(7))
        results.append((int(state.step), np.asarray(state.params), np.asarray(losses)))
    (count, params, losses), looped = results
    assert count == looped[0] == 3
    rows = np.asarray(order(jax.random.key(7)))
    first = np.mean((1 - images[rows[0]]) ** 2) + rows[0][0] / 8
    assert_reordered(losses[0], first, 6, first)
    assert_reordered(losses, looped[2], 6, losses.max())
    assert_reordered(params, looped[1], 6, images.max())


def test_padding_of_the_last_test_batch_never_counts(folder, monkeypatch):
    monkeypatch.setattr(vision_arm, "_EVAL_BATCH", 7)  # 30 images: 5 batches, 5 more
    images = fashion_mnist.read(folder)
    bright = lambda params, x: x[:, :10].max(axis=(2, 3)).astype(np.float32)
    assert int(vision_arm._evaluation(bright, images)(None)) == 30
    first = lambda params, x: jax.nn.one_hot(x[:, 0, 0, 0] * 0, 10)
    assert int(vision_arm._evaluation(first, images)(None)) == 3


def test_the_facts_of_the_data(folder):
    images = fashion_mnist.read(folder)
    pixels = images.train_images.astype(np.float64) / 255
    assert images.train_images.shape == (40, 14, 14, 1)
    assert images.test_labels.dtype == np.int32
    assert_reordered(images.mean, pixels.mean(), pixels.size, 1)
    assert_reordered(images.std, pixels.std(), pixels.size, 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "t10k-labels.* can't be read .*No such file"),
        (b"no gzip", "t10k-labels.* can't be read .*gzip"),
        (gzip.compress(b"\0\0\x0d\1\0\0\0\0"), "doesn't begin as an IDX file"),
        (gzip.compress(idx(np.zeros(30, np.uint8))[:-1]), "29 elements, 30 in its"),
        (gzip.compress(idx(np.zeros(29, np.uint8))), "one label an image"),
        (gzip.compress(idx(np.full(30, 10, np.uint8))), "below 10, got 10"),
    ],
    ids=["missing", "no gzip", "another type", "cut", "too few", "no class"],
)
def test_bad_files_are_one_line(damaged, content, words):
    path = damaged / fashion_mnist.FILES["test_labels"]
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        fashion_mnist.read(damaged)
    assert caught.value.code == ExitCode.DATA


def test_no_network_is_one_line_that_says_what_else_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get download .* failed .* give --data"):
        fashion_mnist.fetch(str(tmp_path))
    assert not (tmp_path / fashion_mnist.PACKAGE).exists()


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("--batch=0", ExitCode.CONFIG, "--batch must be at least 1, got 0"),
        ("--seeds=-1", ExitCode.CONFIG, "--seeds must be 0 or more, got -1"),
        ("--lr=0", ExitCode.CONFIG, "--lr must be above 0 and finite, got 0.0"),
        ("--model=rnn", ExitCode.CONFIG, "must be one of all, vit, cnn"),
        ("--batch=41", ExitCode.CONFIG, "--batch=41 is more than 40 images"),
        ("--seeds=0", ExitCode.DATA, "holds no run with these settings"),
    ],
)
def test_wrong_options_are_one_line(folder, tmp_path, capsys, argument, code, words):
    arguments = command(folder, tmp_path, argument)
    assert harness.run_main(vision.main, vision.Config, arguments) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@dataclasses.dataclass
class FakeArm:
    """An arm without a model, whose second epoch's loss is `last`."""

    last: float
    steps: int = 2
    kept: float = 0.0

    def start(self, key):
        return dataclasses.make_dataclass("State", ["params", "opt_state"])(
            np.zeros(4, np.float32), np.zeros(8, np.float32)
        )

    def epoch(self, state, key):
        losses, self.last = np.array([1.0, self.last]), float("nan")
        return state, losses

    def evaluate(self, params):
        return 15


def test_a_loss_that_is_not_finite_stops_the_run(folder):
    images = fashion_mnist.read(folder)
    (config,) = vision.arms(
        vision.Config(model="cnn", policy="paper", optimizer="adamw", epochs=2)
    )
    one = dataclasses.replace(config, epochs=1)
    assert vision.run(one, FakeArm(3.0), 0, images)["train_loss"] == 2.0
    with pytest.raises(UserError, match=r"cnn paper adamw, seed 1: .* nan in epoch 2"):
        vision.run(config, FakeArm(3.0), 1, images)


def test_ctrl_c_says_what_is_kept(folder, tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(vision_arm, "build", interrupted)
    arguments = command(folder, tmp_path)
    code = harness.run_main(vision.main, vision.Config, arguments)
    assert code == ExitCode.INTERRUPTED
    assert "interrupted; 0 finished runs are in" in capsys.readouterr().err
