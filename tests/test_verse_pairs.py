"""The verse pairs: cleaning, pairing, TF-IDF against NumPy, the file, refusals."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import harness, tf_idf, verse_pairs
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once


def made_up():
    """Two versions of 12 chapters in four books, of invented words; few are changed."""
    rng = np.random.default_rng(0)
    words = [f"w{chr(97 + i // 20)}{chr(97 + i % 20)}" for i in range(200)]
    first, second = {}, {}
    for book in ("Genesis", "Romans", "Acts", "James"):
        for place in [f"{book} {c}:{v}" for c in (1, 2, 3) for v in range(1, 11)]:
            verse = rng.choice(words, rng.integers(5, 14))
            first[place] = " ".join(verse)
            verse[0] = "other"
            second[place] = " ".join(verse)
    return [first, second]


@pytest.fixture(scope="module")
def verses():
    return verse_pairs.build(made_up(), 256)


@pytest.mark.parametrize(
    ("osis", "want"),
    [
        ("a<note n='1'>b <w>c</w>\n</note>d", "a d"),
        ("<title type='psalm'>A Psalm</title> Lord,", "Lord,"),
        ("<w lemma='x'>God</w>’s", "God’s"),
        ("\N{PILCROW SIGN} And\n he<br/>said", "And he said"),
        ("<noted>kept</noted>", "kept"),
        ("", ""),
    ],
)
def test_markup_goes_and_words_stay(osis, want):
    assert verse_pairs.plain(osis) == want


def test_pairs_are_verses_that_both_have_in_chapters_of_two():
    first = {"A 1:1": "x", "A 1:2": "y", "A 2:1": "x", "A 2:2": "", "B 1:1": "z"}
    second = {"A 1:1": "x", "A 1:2": "y", "A 2:1": "x", "A 2:2": "y"}
    assert verse_pairs.paired([first, second]) == ["A 1:1", "A 1:2"]


def test_books_are_held_out_whole(verses):
    places = verse_pairs.paired(made_up())
    found = {"train": set(), "valid": set(), "test": set()}
    for part in verse_pairs.PARTS:
        found[part] = {places[row].split(" ")[0] for row in verses.rows(part)}
    want = {"train": {"Genesis"}, "valid": {"Romans"}, "test": {"Acts", "James"}}
    assert found == want


def numpy_tf_idf(texts, fit):
    words = sorted({word for text in texts for word in text.split()})
    counts = np.array([[text.split().count(w) for w in words] for text in texts])
    df = (counts[fit] > 0).sum(0)
    weight = np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0)
    weight = weight * (np.log((1 + sum(fit)) / (1 + df)) + 1)
    return weight / np.linalg.norm(weight, axis=1, keepdims=True)


def test_tf_idf_is_numpys():
    texts = ["a b b c", "b c", "a a a d", "e a"]
    fit = np.array([True, True, True, False])
    got = tf_idf.rows_of(texts, fit).toarray()
    want = numpy_tf_idf(texts, fit)
    np.testing.assert_allclose(np.sort(got), np.sort(want), rtol=1e-12)
    np.testing.assert_allclose(got @ got.T, want @ want.T, rtol=1e-12)


def test_the_most_similar_others_of_a_group():
    texts = ["a b", "c d", "e f", "g h", "g i"], ["a b", "a c", "e b", "g h", "g i"]
    rows = tf_idf.rows_of([*texts[0], *texts[1]], np.ones(10, bool))
    first, second = rows[:5], rows[5:]
    groups = ["x", "x", "x", "y", "y"]
    similar, near = tf_idf.most_similar(groups, first, second, count=3)
    assert set(similar[0]) == {1, 2}
    assert similar[1].tolist() == [
        0,
        2,
        0,
    ]  # neither has c or d: the first stands first
    assert similar[3].tolist() == [4, 4, 4]
    assert similar.dtype == np.int32
    np.testing.assert_allclose(near[[0, 3], 0], 1, rtol=1e-6)
    cosine = (first @ second.T).toarray()
    np.testing.assert_allclose(near[0, 1], max(cosine[0, 1:3]), rtol=1e-6)


def test_the_threshold_parts_most():
    same, other = np.array([0.2, 0.6, 0.7, 0.9]), np.array([0.1, 0.3, 0.4, 0.65])
    assert tf_idf.threshold(same, other) == 0.6


def test_negatives_are_others_of_the_chapter_and_never_the_verse(verses):
    places = np.array([p.partition(":")[0] for p in verse_pairs.paired(made_up())])
    assert (places[verses.similar] == places[:, None]).all()
    assert (verses.similar != np.arange(len(places))[:, None]).all()
    assert verse_pairs.tf_idf_accuracy(verses, "test") > 0.95


def test_pieces_are_known_and_those_of_the_training_books_alone(verses):
    ids = verses.first
    inside = np.arange(ids.shape[1])[None] < verses.first_length[:, None]
    assert (ids[~inside] == verse_pairs.PAD).all()
    assert (ids[inside] >= 1).all()
    assert ids.max() < verses.vocab <= 256
    twice = verse_pairs.build(made_up(), 256)
    assert twice.sha256 == verses.sha256


def test_a_file_is_what_was_written(verses, tmp_path):
    path = str(verse_pairs.write(str(tmp_path / "deep" / "v.npz"), verses))
    got = verse_pairs.load(path)
    for field in dataclasses.fields(verses):
        np.testing.assert_array_equal(
            getattr(got, field.name), getattr(verses, field.name)
        )


def test_a_changed_file_is_refused(verses, tmp_path):
    other = dataclasses.replace(verses, first=verses.first[:, ::-1])
    path = verse_pairs.write(str(tmp_path / "v.npz"), other)
    with pytest.raises(UserError, match="is damaged") as caught:
        verse_pairs.load(str(path))
    assert caught.value.code == ExitCode.DATA


@pytest.mark.parametrize("content", [None, b"no archive", b"", b"PK\x03\x04cut", "npy"])
def test_no_file_or_another_kind_is_one_line(content, tmp_path):
    path = tmp_path / "v.npz"
    if content == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
        content = path.read_bytes()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match="write it with python -m experiments.verse"):
        verse_pairs.load(str(path))


def test_no_debian_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"apt-get download .* failed .* Debian 12"):
        verse_pairs.fetch(str(tmp_path))


def test_the_command_writes_from_the_cache(tmp_path, capsys):
    facts = {name: {"version": "1", "sha256": "ab"} for name in verse_pairs.PACKAGES}
    cached = {"packages": facts, "texts": made_up()}
    (tmp_path / "verse_pairs.json").write_text(json.dumps(cached))
    out = tmp_path / "out.npz"
    arguments = [f"--cache={tmp_path}", f"--out={out}", "--vocab=256"]
    code = harness.run_main(verse_pairs.main, verse_pairs.Config, arguments)
    assert code == ExitCode.DONE
    assert "train: 30 verses" in capsys.readouterr().out
    assert len(verse_pairs.load(str(out)).part) == 120


def test_a_vocabulary_out_of_range_is_refused():
    code = harness.run_main(verse_pairs.main, verse_pairs.Config, ["--vocab=255"])
    assert code == ExitCode.CONFIG
