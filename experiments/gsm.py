"""gsm_symbolic: word problems with worked answers, as token ids of one length.

The generator of reasoning-gym fills 100 templates in the manner of GSM8K's problems
with names and numbers. Held-out problems come from another seed of the same templates,
without those that training has word for word: they ask whether a template's working was
learnt, not whether it carries over to new kinds of problems.
"""

import dataclasses
import hashlib
import json
import pathlib

import numpy as np

from experiments.harness import NOT_NPZ, ExitCode, UserError

SEEDS = {"train": 0, "held": 1}
NAME, VERSION = "gsm_symbolic", "0.1.25"
# The chat format that the model was tuned on, without a system's turn.
QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "{}<|im_end|>\n"


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """N problems: ids (N, T + 1) uint16; the answer of row i is ids[start:stop]."""

    ids: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def batch(self, rows) -> tuple[np.ndarray, np.ndarray]:
        """Windows (B, T + 1) int32, and float32 (B, T): 1 where the target counts."""
        place = np.arange(1, self.ids.shape[1])
        start, stop = self.start[rows][:, None], self.stop[rows][:, None]
        counted = (start <= place) & (place < stop)
        return self.ids[rows].astype(np.int32), counted.astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Problems:
    """Both parts, the ids of the sentence that checks the weights, and their facts."""

    train: Part
    held: Part
    sentence: np.ndarray
    facts: dict


def generate(seed: int, count: int) -> list[tuple[str, str]]:
    """Questions and worked answers, the same in every run.

    Raises:
      UserError: reasoning-gym isn't installed; exit code 5.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            ExitCode.DATA,
            f"the problems come from the package reasoning-gym: pip install "
            f"reasoning-gym=={VERSION}, or copy --data from where --prepare ran with "
            "the same --seq, --train_items and --held_items",
        ) from None
    items = reasoning_gym.create_dataset(NAME, seed=seed, size=count)
    return [
        (items[i]["question"], items[i]["metadata"]["answer_cot"]) for i in range(count)
    ]


def encoded(tokenizer, problems, seq: int) -> tuple[Part, int]:
    """The problems that fit into seq + 1 tokens, and how many didn't."""
    rows, starts, stops = [], [], []
    for question, answer in problems:
        before = tokenizer.encode(QUESTION.format(question)).ids
        whole = before + tokenizer.encode(ANSWER.format(answer)).ids
        if len(whole) <= seq + 1:
            # What stands after the answer is never a target, nor seen by one.
            rows.append(whole + [0] * (seq + 1 - len(whole)))
            starts.append(len(before))
            stops.append(len(whole))
    ids = np.asarray(rows, np.uint16).reshape(-1, seq + 1)
    part = Part(ids, np.asarray(starts, np.int32), np.asarray(stops, np.int32))
    return part, len(problems) - len(rows)


def make(tokenizer, sentence: str, *, seq: int, train: int, held: int) -> Problems:
    """Generates and encodes both parts.

    Raises:
      UserError: no problem of a part fits into `seq`; exit code 5.
    """
    texts = {"train": generate(SEEDS["train"], train)}
    seen = set(texts["train"])
    texts["held"] = [x for x in generate(SEEDS["held"], held) if x not in seen]
    parts, facts = {}, {"problems": f"{NAME} of reasoning-gym {VERSION}"}
    for name, problems in texts.items():
        parts[name], dropped = encoded(tokenizer, problems, seq)
        count = len(parts[name].ids)
        if not count:
            raise UserError(
                ExitCode.DATA, f"no {name} problem fits into --seq={seq}; raise it"
            )
        answers = int((parts[name].stop - parts[name].start).sum())
        facts |= {f"{name}_problems": count, f"{name}_too_long": dropped}
        facts[f"{name}_answer_tokens"] = answers
    ids = np.asarray(tokenizer.encode(sentence).ids, np.int32)
    facts["data_sha256"] = _digest(parts)
    return Problems(parts["train"], parts["held"], ids, facts)


def _digest(parts: dict[str, Part]) -> str:
    total = hashlib.sha256()
    for name in sorted(parts):
        part = parts[name]
        for array, dtype in (part.ids, "<u2"), (part.start, "<i4"), (part.stop, "<i4"):
            total.update(array.astype(dtype).tobytes())
    return total.hexdigest()


def write(path: pathlib.Path, problems: Problems) -> None:
    """One compressed file, written aside and renamed."""
    arrays = {
        f"{name}_{field.name}": getattr(getattr(problems, name), field.name)
        for name in SEEDS
        for field in dataclasses.fields(Part)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    facts = np.array(json.dumps(problems.facts))
    with aside.open("wb") as file:
        np.savez_compressed(file, **arrays, sentence=problems.sentence, facts=facts)
    aside.replace(path)


def read(path: pathlib.Path) -> Problems:
    """What `write` wrote.

    Raises:
      UserError: not such a file, or damaged; exit code 5.
    """
    try:
        # Opened here, as np.load leaves what it opens open where it fails.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            names = [field.name for field in dataclasses.fields(Part)]
            parts = {p: Part(*(file[f"{p}_{n}"] for n in names)) for p in SEEDS}
            facts, sentence = json.loads(str(file["facts"])), file["sentence"]
        if _digest(parts) != facts["data_sha256"]:
            raise ValueError("its sha256 is another")
    except NOT_NPZ as error:
        raise UserError(
            ExitCode.DATA,
            f"{path} can't be read as problems ({error}); delete it, it is made again",
        ) from None
    return Problems(parts["train"], parts["held"], sentence, facts)
