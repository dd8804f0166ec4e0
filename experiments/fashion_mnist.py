"""Fashion-MNIST from its Debian package or a folder: IDX files to arrays.

60,000 training and 10,000 test images of 28 x 28 grey pixels in ten classes (Xiao et
al., arXiv 1708.07747; MIT licence). The package is fetched by `apt-get download` and
unpacked into the cache, never installed.
"""

import dataclasses
import gzip
import hashlib
import pathlib
import struct
import subprocess
import tempfile
import zlib

import numpy as np

from experiments.harness import ExitCode, UserError

PACKAGE = "dataset-fashion-mnist"
FILES = {
    "train_images": "train-images-idx3-ubyte.gz",
    "train_labels": "train-labels-idx1-ubyte.gz",
    "test_images": "t10k-images-idx3-ubyte.gz",
    "test_labels": "t10k-labels-idx1-ubyte.gz",
}
CLASSES = 10
# Of the four unpacked files, one after the other, as they were published.
SHA256 = "14410854cf7a289477dcfc7df3f8ec24741e281cdcc425ede0d9a748ca630214"
_BELOW = "usr/share/datasets/fashion-mnist"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
    """Images uint8 (count, rows, columns, 1) and labels int32 (count,), in two parts.

    mean and std are of the training pixels, each divided by 255.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    mean: float
    std: float
    sha256: str

    def facts(self) -> dict:
        """For results."""
        return {
            "data_sha256": self.sha256,
            "published_data": self.sha256 == SHA256,
            "train_images": len(self.train_images),
            "test_images": len(self.test_images),
        }


def parse_idx(data: bytes) -> np.ndarray:
    """The uint8 array of an IDX file: 0, 0, 8, axes, then sizes, then the elements.

    Raises:
      ValueError: another type of elements, or a size that isn't the file's.

    Example:
      >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])).tolist()
      [7, 9]
    """
    if data[:3] != b"\0\0\x08" or len(data) < 4 or len(data) < 4 + 4 * data[3]:
        raise ValueError("it doesn't begin as an IDX file of bytes does")
    shape, start = struct.unpack_from(f">{data[3]}I", data, 4), 4 + 4 * data[3]
    wanted = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != wanted:
        raise ValueError(f"{len(data) - start} elements, {wanted} in its header")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read(folder: str | pathlib.Path) -> Images:
    """The data set in a folder that holds the four IDX.gz files.

    Raises:
      UserError: a file is missing, damaged or not of that kind; exit code 5.
    """
    arrays, total = {}, hashlib.sha256()
    for name, file in FILES.items():
        path = pathlib.Path(folder, file)
        try:
            data = gzip.decompress(path.read_bytes())
            arrays[name] = parse_idx(data)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(
                ExitCode.DATA,
                f"{path} can't be read ({error}); give --data a folder that holds "
                f"{', '.join(FILES.values())}",
            ) from None
        total.update(data)
    _check(folder, arrays)
    pixels = arrays["train_images"] / np.float32(255)
    images = {n: a[..., None] for n, a in arrays.items() if n.endswith("images")}
    labels = {n: a.astype(np.int32) for n, a in arrays.items() if n.endswith("labels")}
    facts = {"mean": float(pixels.mean(dtype=np.float64)), "std": float(pixels.std())}
    return Images(**images, **labels, **facts, sha256=total.hexdigest())


def _check(folder, arrays: dict[str, np.ndarray]) -> None:
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        counts = images.ndim == 3 and labels.shape == images.shape[:1] != (0,)
        if not counts or images.shape[1:] != arrays["train_images"].shape[1:]:
            raise UserError(
                ExitCode.DATA,
                f"{folder}: the {part} files must hold one label an image, and images "
                f"of one size, got shapes {images.shape} and {labels.shape}",
            )
        if labels.max() >= CLASSES:
            raise UserError(
                ExitCode.DATA,
                f"{folder}: labels must be below {CLASSES}, got {labels.max()}",
            )


def _call(*command: str, cwd: pathlib.Path) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except OSError as error:
        said = [str(error)]
    if said is not None:
        raise UserError(
            ExitCode.DATA,
            f"{' '.join(command)} failed ({'; '.join(said) or 'nothing was said'}); "
            f"where there's no Debian or no network, give --data the folder of the "
            "four IDX.gz files",
        )


def fetch(cache: str) -> pathlib.Path:
    """The folder of the four files below `cache`, downloaded if it isn't there.

    Raises:
      UserError: no apt-get or dpkg-deb, no network, or no such package; exit code 5.
    """
    target = pathlib.Path(cache, PACKAGE)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"fetching {PACKAGE} (31 MB)", flush=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            work = pathlib.Path(name)
            _call("apt-get", "download", "-q", PACKAGE, cwd=work)
            (package,) = work.glob("*.deb")
            _call("dpkg-deb", "-x", package.name, "tree", cwd=work)
            (work / "tree" / _BELOW).rename(target)  # whole or not there
    return target


def load(data: str, cache: str) -> Images:
    """What --data names: `debian`, or a folder."""
    return read(fetch(cache) if data == "debian" else data)
