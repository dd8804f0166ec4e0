"""Dataclass -> command line -> one JSON line, and the exit codes of every experiment.

Nothing here imports JAX: `--help` and a wrong option answer at once.
"""

import argparse
import dataclasses
import difflib
import enum
import importlib.metadata
import inspect
import json
import logging
import math
import pathlib
import platform
import subprocess
import sys
import tempfile
import types
import typing
import warnings
import zipfile
import zlib

# What numpy.load raises of a file that is damaged, or none of ours.
NOT_NPZ = (
    OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class ExitCode(enum.IntEnum):
    """What a job scheduler may conclude: requeue 75, and none of the others."""

    DONE = 0
    NON_FINITE = 3
    CHECKPOINT = 4
    DATA = 5
    CONFIG = 6
    PREEMPTED = 75
    INTERRUPTED = 130


class UserError(Exception):
    """Something that the user can act on: one line and an exit code, no traceback."""

    def __init__(self, code: ExitCode, message: str):
        super().__init__(message)
        self.code = code


def option(default, help: str):
    """A dataclass field with the sentence that --help shows."""
    return dataclasses.field(default=default, metadata={"help": help})


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(ExitCode.CONFIG, message)


def _boolean(text: str) -> bool:
    table = {"true": True, "false": False}
    if text.lower() not in table:
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return table[text.lower()]


def _number(kind):
    noun = {int: "a whole number", float: "a finite number"}[kind]

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):  # results are JSON, which has no such number
            raise argparse.ArgumentTypeError(f"must be {noun}, got {text!r}")
        return value

    return convert


def _one_of(values):
    def convert(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(
                f"must be one of {', '.join(values)}, got {text!r}"
            )
        return text

    return convert


def _options_of(kind) -> dict[str, typing.Any]:
    """What argparse needs to read one annotation: Literal, bool, int, float, str."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        values = typing.get_args(kind)
        return {"type": _one_of(values), "metavar": "{" + ",".join(values) + "}"}
    if kind is bool:
        return {
            "type": _boolean,
            "nargs": "?",
            "const": True,
            "metavar": "{true,false}",
        }
    convert = str if kind is str else _number(kind)
    return {"type": convert, "metavar": kind.__name__.upper()}


def _parser_of(config_class) -> argparse.ArgumentParser:
    parser = _Parser(
        description=inspect.getdoc(config_class),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        default = "the preset's" if field.default is None else field.default
        text = field.metadata["help"] + f" (default: {default})"
        parser.add_argument(
            f"--{field.name}",
            default=field.default,
            help=text.replace("%", "%%"),
            **_options_of(hints[field.name]),
        )
    return parser


def parse(config_class, argv=None):
    """A frozen dataclass filled from `--field=value`.

    Raises:
      UserError: an unknown option (with the closest name), a value that the field
        doesn't take, or what the dataclass itself refuses; exit code 6.
    """
    parser = _parser_of(config_class)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [f"--{field.name}" for field in dataclasses.fields(config_class)]
        close = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        hint = f"did you mean {close[0]}?" if close else "see --help for the options"
        raise UserError(ExitCode.CONFIG, f"unknown option {unknown[0]}; {hint}")
    try:
        return config_class(**vars(known))
    except ValueError as error:
        raise UserError(ExitCode.CONFIG, str(error)) from None


def quiet_failed_saves() -> None:
    """Keeps what libraries print of a failed save from burying the one line of it.

    For a process that is a program: it changes logging and a hook of the interpreter.
    """
    for name in ("absl", "asyncio"):  # orbax's tracebacks, and its abandoned tasks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)

    def hook(raised):
        # tensorstore's threads still report to the event loop that the failure closed.
        if str(raised.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(raised)

    sys.unraisablehook = hook


def run_main(main, config_class, argv=None) -> int:
    """Parses, runs main(config) and returns the exit code; user errors are one line."""
    try:
        main(parse(config_class, argv))
    except UserError as error:
        print(f"error: {error}" if error.code < 64 else str(error), file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print("interrupted before the first step; nothing to save", file=sys.stderr)
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.DONE)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def provenance() -> dict[str, typing.Any]:
    """What a figure depends on besides its config: versions, commit, machine."""
    packages = ("jax", "optax", "flax", "coat-jax", "grain", "tokenizers")
    versions = {name: _version(name) for name in packages}
    versions["python"] = platform.python_version()
    return {"versions": versions, "commit": _commit(), "machine": platform.machine()}


def record(path: str | pathlib.Path, config, metrics: dict) -> pathlib.Path:
    """Appends {config, provenance, metrics} to a file of JSON lines; returns its path.

    One write call a line, so that two runs that end together don't mix their lines.
    """
    row = {"config": dataclasses.asdict(config), **provenance(), **metrics}
    return append(path, row)


def append(path: str | pathlib.Path, row: dict) -> pathlib.Path:
    """Appends a line of JSON, in one write; returns the path."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
    return path


def show_picture(draw, *args) -> None:
    """Prints where draw(*args) wrote a picture, or that there's no matplotlib for it.

    A machine that only trains may lack it, and has its results all the same.
    """
    try:
        print(f"picture: {draw(*args)}")
    except ImportError as error:
        print(f"no picture: {error}; the results are kept")


def results(path: str | pathlib.Path) -> list[dict]:
    """The lines of a results file, asked for before any work that is to go there.

    A last line that a crash cut short is cut off: what is appended next would continue
    it.

    Raises:
      UserError: the file can't be written (exit code 6), or a line of it isn't JSON
        (exit code 5).
    """
    path = pathlib.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
            return []
        with path.open("a+") as file:
            file.seek(0)
            text = file.read()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                file.truncate(len(whole.encode()))
    except (OSError, UnicodeError) as error:
        raise UserError(
            ExitCode.CONFIG, f"--results={path} can't be read and written ({error})"
        ) from None
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(
                ExitCode.DATA,
                f"line {number} of {path} isn't a result ({error}); remove it, or give "
                "another --results",
            ) from None
    return rows
