"""Corpus, tokenizer and batches: the split, the cache, the order, and bad folders."""

import collections
import dataclasses
import json
import pathlib
import sysconfig

import numpy as np
import pytest

from experiments import config as options
from experiments import corpus, data, harness, prepare, token_file
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once

CONFIG = options.resolve(options.Config(preset="micro", held_out=0.25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dozen files of the standard library, in a folder of their own."""
    root = tmp_path_factory.mktemp("texts")
    source = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in [*source.glob("json/*.py"), *source.glob("wsgiref/*.py")]:
        target = root / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    return root


@pytest.fixture
def config(folder, tmp_path):
    return dataclasses.replace(CONFIG, data=str(folder), cache=str(tmp_path / "cache"))


def refusal(config) -> UserError:
    with pytest.raises(UserError) as caught:
        data.prepare(config)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_split_is_by_file_and_by_path_alone(folder, config):
    found = corpus.load(config)
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*.py")}
    full = {n for n in names if (folder / n).stat().st_size}
    assert not found.train.keys() & found.held.keys()
    assert found.train.keys() | found.held.keys() == full
    assert found.held.keys() == {n for n in full if corpus.is_held_out(n, 0.25)}
    assert found.held[min(found.held)] == (folder / min(found.held)).read_text()


def test_the_held_out_share_is_about_what_was_asked():
    names = [f"package/module{i}.py" for i in range(4000)]
    share = sum(corpus.is_held_out(name, 0.05) for name in names) / len(names)
    # Binomial: one standard deviation of the share is 0.0034.
    assert abs(share - 0.05) < 4 * 0.0034


def test_the_hash_sees_every_byte_and_every_name(folder, config, tmp_path):
    copy = tmp_path / "copy"
    for path in folder.rglob("*.py"):
        target = copy / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    moved = dataclasses.replace(config, data=str(copy))
    before = corpus.load(config).sha256
    assert corpus.load(moved).sha256 == before
    some = copy / "json/decoder.py"
    some.write_text(some.read_text() + "#")
    assert corpus.load(moved).sha256 != before


def test_the_standard_library_is_there_without_its_tests_and_without_packages():
    root, names = corpus.stdlib_files(tests=False)
    assert "json/decoder.py" in names
    assert all((root / name).is_file() for name in names[:50])
    banned = {"site-packages", "test", "tests"}
    assert not any(banned & set(pathlib.PurePath(n).parts) for n in names)
    assert len(corpus.stdlib_files(tests=True)[1]) > len(names)


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_tokens_decode_to_the_very_text(config, tmp_path, tokenizer):
    config = dataclasses.replace(config, tokenizer=tokenizer)
    source = corpus.load(config)
    made = data.make_tokenizer(config, source, tmp_path)
    text = "def f():\n\treturn 'äöü € 漢字'  # \x07\r\n" + min(source.held.values())
    (ids,) = made.encode([text])
    if tokenizer == "bytes":
        assert bytes(ids.astype(np.uint8)).decode() == text
    else:
        assert made.model.decode(ids.tolist(), skip_special_tokens=False) == text
    assert ids.max() < made.vocab <= config.vocab


def test_tokens_are_the_same_when_made_again(config, tmp_path):
    first = data.prepare(config)
    other = dataclasses.replace(config, cache=str(tmp_path / "other"))
    assert data.prepare(other).sha256 == first.sha256


def test_the_cache_is_used_and_a_damaged_one_is_made_again(config, monkeypatch):
    first = data.prepare(config)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_encode", lambda *a: pytest.fail("encoded again"))
        assert data.prepare(config).sha256 == first.sha256
    files = [p for p in pathlib.Path(config.cache).rglob("*") if p.is_file()]
    assert {p.name for p in files} == {
        "tokenizer.json",
        "train.npy",
        "held.npy",
        "ids.json",
    }
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert data.prepare(config).sha256 == first.sha256, path
        assert path.read_bytes() == whole, path


def test_another_split_of_the_same_text_is_not_taken_from_the_cache(config):
    first = data.prepare(config)
    other = data.prepare(dataclasses.replace(config, held_out=0.5))
    assert other.origin["corpus_sha256"] == first.origin["corpus_sha256"]
    assert len(other.held) > len(first.held)
    assert other.sha256 != first.sha256


def test_bytes_stand_in_when_tokenizers_is_missing(config, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    tokens = data.prepare(config)
    assert (tokens.tokenizer, tokens.vocab) == ("bytes", 257)
    assert "tokenizers isn't installed" in capsys.readouterr().out


def test_batches_resume_from_json_and_differ_by_seed_and_epoch(config):
    tokens = data.prepare(config)
    batches = data.train_batches(tokens, config)
    epoch = len(data.Windows(tokens.train, config.seq)) // config.batch
    drawn = []
    for _ in range(2 * epoch + 3):
        state = json.loads(json.dumps(batches.get_state()))
        drawn.append((state, next(batches)))
    for state, batch in drawn[:: max(epoch // 2, 1)]:
        again = data.train_batches(tokens, config)
        again.set_state(state)
        np.testing.assert_array_equal(next(again), batch)
    first = np.stack([batch for _, batch in drawn[:epoch]])
    second = np.stack([batch for _, batch in drawn[epoch : 2 * epoch]])
    assert not np.array_equal(first, second)
    other = data.train_batches(tokens, dataclasses.replace(config, seed=1))
    assert not np.array_equal(next(other), first[0])


def test_an_epoch_shows_each_window_once(config):
    config = dataclasses.replace(config, batch=1)
    tokens = data.prepare(config)
    windows = data.Windows(tokens.train, config.seq)
    batches = data.train_batches(tokens, config)
    seen = sorted(next(batches)[0].tobytes() for _ in range(len(windows)))
    assert seen == sorted(windows[i].tobytes() for i in range(len(windows)))


def test_windows_overlap_by_the_one_token_that_is_only_a_target():
    windows = data.Windows(np.arange(10, dtype=np.int32), 3)
    assert [windows[i].tolist() for i in range(len(windows))] == [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
    ]


@pytest.mark.parametrize(("batch", "count"), [(4, 2), (4, 100), (64, 8)])
def test_held_out_batches_have_one_shape_and_are_of_the_held_out_text(
    config, batch, count
):
    tokens = data.prepare(config)
    config = dataclasses.replace(config, batch=batch, eval_batches=count)
    batches = data.held_batches(tokens, config)
    assert len({b.shape for b in batches}) == 1
    rows = collections.Counter(row.tobytes() for b in batches for row in b)
    windows = data.Windows(tokens.held, config.seq)
    there = collections.Counter(windows[i].tobytes() for i in range(len(windows)))
    assert rows <= there  # none is taken more often than it is there
    assert rows.total() >= min(batch * count, len(windows) - batch)


def test_bad_folders_are_refused_in_a_line(config, tmp_path):
    missing = dataclasses.replace(config, data=str(tmp_path / "nowhere"))
    assert "doesn't exist; give a folder" in str(refusal(missing))
    file = tmp_path / "file"
    file.write_text("text")
    assert "is a file" in str(refusal(dataclasses.replace(config, data=str(file))))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "nothing.txt").touch()
    error = refusal(dataclasses.replace(config, data=str(empty)))
    assert "holds no text: 1 files" in str(error)
    assert error.code == ExitCode.DATA


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"abc\0def", "zero byte at position 3"), (b"ab\xff", "no UTF-8 at position 2")],
)
def test_a_file_that_is_not_text_is_named_or_skipped(config, folder, content, words):
    bad = folder / "bad.bin"
    bad.write_bytes(content)
    try:
        error = str(refusal(config))
        assert str(bad) in error
        assert words in error
        assert "--on_bad_file=skip" in error
        kept = data.prepare(dataclasses.replace(config, on_bad_file="skip"))
        assert kept.facts()["skipped_files"] == 1
    finally:
        bad.unlink()


def test_too_little_text_is_refused_with_the_sizes(config):
    error = str(refusal(dataclasses.replace(config, batch=100_000)))
    assert "but 100000 are needed" in error
    assert "sequences of 32" in error
    error = str(refusal(dataclasses.replace(config, seq=1_000_000)))
    assert "0 sequences of 1000000" in error


def test_a_split_with_an_empty_side_is_refused(config, tmp_path):
    one = tmp_path / "one"
    one.mkdir()
    (one / "a.txt").write_text("some text")
    lone = dataclasses.replace(config, data=str(one))
    error = str(refusal(dataclasses.replace(lone, held_out=1e-9)))
    assert "none of the 1 files" in error
    assert "is held out at --held_out=1e-09; raise it" in error
    assert "is left" in str(refusal(dataclasses.replace(lone, held_out=1 - 1e-9)))


def test_a_table_smaller_than_the_tokenizer_is_refused(config):
    error = refusal(dataclasses.replace(config, tokenizer="bytes", vocab=256))
    assert "--vocab=256 is below the 257 tokens" in str(error)
    assert error.code == ExitCode.CONFIG


def test_an_unwritable_cache_is_refused(config, folder):
    inside = folder / "json/decoder.py/cache"
    assert "can't be written" in str(
        refusal(dataclasses.replace(config, cache=str(inside)))
    )


# --- token files ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    """A token file of the folder, and the tokens that it was written from."""
    root = tmp_path_factory.mktemp("file")
    path = str(root / "tokens.npz")
    cache = {"cache": str(root / "cache"), "held_out": 0.25}
    config = prepare.Config(data=str(folder), vocab=512, out=path, **cache)
    prepare.main(config)
    config = dataclasses.replace(CONFIG, data=str(folder), cache=cache["cache"])
    return path, data.prepare(config)


def test_a_token_file_stands_for_its_corpus(config, written, monkeypatch):
    path, tokens = written
    monkeypatch.setattr(corpus, "load", lambda config: pytest.fail("read the text"))
    again = data.prepare(dataclasses.replace(config, data=path))
    for part in ("train", "held"):
        np.testing.assert_array_equal(getattr(again, part), getattr(tokens, part))
        assert getattr(again, part).dtype == np.int32
    assert again.facts() == tokens.facts()
    assert (again.vocab, again.end) == (tokens.vocab, tokens.end)
    with pytest.raises(UserError, match="--vocab=300 is below"):
        data.prepare(dataclasses.replace(config, data=path, vocab=300))


def test_a_damaged_or_foreign_token_file_is_one_line(config, written, tmp_path):
    whole = pathlib.Path(written[0]).read_bytes()
    contents = {"short": whole[:1000], "text": b"no zip at all"}
    for name, content in contents.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
    np.savez(tmp_path / "foreign.npz", train=np.arange(3))
    for name in ("short", "text", "foreign", "missing"):
        path = str(tmp_path / f"{name}.npz")
        error = refusal(dataclasses.replace(config, data=path))
        assert error.code == ExitCode.DATA
        assert "can't be read as a token file" in str(error)


def test_one_changed_id_is_noticed(config, written, tmp_path):
    with np.load(written[0]) as file:
        arrays = dict(file)
    arrays["train"][7] ^= 1
    np.savez(tmp_path / "changed.npz", **arrays)
    changed = dataclasses.replace(config, data=str(tmp_path / "changed.npz"))
    assert "its sha256 is another" in str(refusal(changed))


def test_a_token_file_holds_16_bits_and_says_so(written, tmp_path):
    wide = dataclasses.replace(written[1], vocab=2**16 + 1)
    with pytest.raises(UserError, match="a vocabulary of 65537; change --out or"):
        token_file.write(tmp_path / "x.npz", wide)
    with pytest.raises(UserError, match="named .*npz"):
        token_file.write(tmp_path / "x.bin", written[1])


def test_a_shortened_set_is_of_whole_files_out_of_all(written):
    _, tokens = written
    files = np.split(tokens.train, np.flatnonzero(tokens.train == tokens.end) + 1)
    short = prepare.shortened(tokens.train, tokens.end, len(tokens.train) // 2)
    assert len(short) == len(tokens.train) // 2
    *drawn, _cut = np.split(short, np.flatnonzero(short == tokens.end) + 1)
    bodies = [file.tobytes() for file in files]
    places = [bodies.index(file.tobytes()) for file in drawn]
    assert len(set(places)) == len(places) > 1
    assert places != list(range(len(places)))  # no prefix
    np.testing.assert_array_equal(
        np.sort(prepare.shortened(tokens.train, tokens.end, 10**9)),
        np.sort(tokens.train),
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--vocab=70000", "--vocab must be from 257 to 65536, got 70000"),
        ("--held_out=0", "--held_out must be between 0 and 1, got 0.0"),
        ("--train_tokens=0", "--train_tokens must be at least 1, got 0"),
    ],
)
def test_prepare_refuses_wrong_options(argument, words, capsys):
    code = harness.run_main(prepare.main, prepare.Config, [argument])
    assert code == ExitCode.CONFIG
    assert words in capsys.readouterr().err
