"""Read model files that may be damaged or hostile.

Every failure is a `ModelError` that names the file, the field, what it must be and what it was.
Numbers from a file are checked before anything is allocated or looped over:

    read_bytes, read_json     regular files of bounded size
    Fields                    typed, bounded fields of a JSON object or a GGUF header
    read_tensor_headers       shapes and dtypes in a safetensors file, without its data
    read_tensors              its data, with a report of the progress
    reject_panics             errors of Rust libraries, as a `ModelError`
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmhead.errors import ModelError
from lmhead.progress import report_read

StrPath = str | PathLike[str]

MAX_LAYERS = 4096  # far more than any model has
MAX_INTEGER = 2**31 - 1
_LAYERS = {  # names of the number of layers, in config.json and GGUF
    "block_count",
    "decoder_layers",
    "encoder_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_hidden_layers",
    "num_layers",
}
_MAX_FILE = 2**28  # bytes of a JSON file or vocabulary; the largest are about 2**25
_DTYPES = ("F64", "F32", "F16", "BF16")  # of weights
_LARGE_FILE = 2**19  # bytes; reading and parsing it takes a noticeable time

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    if not S_ISREG(status.st_mode):  # a pipe or a device may never end
        raise ModelError(f"{path} must be a regular file; got a folder, pipe or device")
    return status.st_size


def exists(path: Path) -> bool:
    """Return whether a path exists; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file of at most 256 MiB."""
    size = file_size(path)
    if size > _MAX_FILE:
        raise ModelError(f"{path} must have at most {_MAX_FILE:,} bytes; got {size:,}")
    if size >= _LARGE_FILE:
        report_read(path.name, 0, size)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} cannot be read: it must be UTF-8; {error}") from error


def read_json(path: Path) -> Fields:
    """Return the object in a JSON file."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply to be a model's JSON file") from None
    except ValueError as error:
        raise ModelError(
            f"{path} is not valid JSON ({error}): it is damaged. Download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; got {type(value).__name__}")
    return Fields(path, value)


class Fields:
    """The fields of a JSON object or a GGUF header, with their file for errors.

    A field that is absent or null has its default; without a default it is an error. `prefix` comes
    before the names in errors, for an object inside another.

    >>> Fields(Path("config.json"), {"num_hidden_layers": 0}).integer("num_hidden_layers", low=1)
    Traceback (most recent call last):
    ...
    lmhead.errors.ModelError: config.json: num_hidden_layers must be an integer of at least 1; got 0
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self.prefix = path, values, prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, wanted: str) -> ModelError:
        """Return the error for a field that is not what it must be."""
        got = _short.repr(self.values[name]) if name in self.values else "nothing"
        return ModelError(f"{self.path}: {self.prefix}{name} must be {wanted}; got {got}")

    def integer(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = MAX_INTEGER
    ) -> int:
        """Return an integer in [low, high]."""
        value = self._value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        bounds = f"of at least {low}" if high == MAX_INTEGER else f"in [{low}, {high}]"
        raise self.error(name, f"an integer {bounds}")

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._value(name, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:  # an integer beyond float64
                value = math.inf
            if 0 < value < math.inf:
                return value
        raise self.error(name, "a finite number above 0")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(name, default)
        if isinstance(value, str):
            return value
        raise self.error(name, "a string")

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._value(name, default)
        if isinstance(value, bool):
            return value
        raise self.error(name, "true or false")

    def list_of(self, kind: type, name: str, length: int | None = None) -> list[Any]:
        """Return a list of one type of value, [] if it is absent; of `length` if that is given."""
        value = self._value(name, [])
        kinds = (int, float) if kind is float else (kind,)
        if (
            isinstance(value, list)
            and all(type(entry) in kinds for entry in value)
            and (length is None or len(value) == length)
        ):
            return value
        count = "" if length is None else f"{length} "
        raise self.error(name, f"a list of {count}values of type {kind.__name__}")

    def object(self, name: str) -> Fields:
        """Return an object inside this one; an empty one if it is absent."""
        value = self._value(name, {})
        if isinstance(value, dict):
            return Fields(self.path, value, f"{self.prefix}{name}.")
        raise self.error(name, "an object")

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def check_numbers(config: Fields, tensors: int) -> None:
    """Validate the integers of a configuration, which a model is built from in loops.

    Numbers of layers are at most the number of tensors; no integer is above 2^31 - 1, except the
    base of rotary angles.
    """
    for name, value in config.values.items():
        high = MAX_LAYERS if "layer" in name or "expert" in name else MAX_INTEGER
        if name.rpartition(".")[2] in _LAYERS:
            high = min(MAX_LAYERS, tensors)
        elif "theta" in name:
            high = 2**63 - 1
        low = 1 if name.rpartition(".")[2] in _LAYERS else -MAX_INTEGER
        if isinstance(value, int) and not low <= value <= high:
            raise config.error(name, f"an integer in [{low}, {high}]")
        if isinstance(value, list) and len(value) > 2**16:
            raise config.error(name, f"a list of at most {2**16} entries")
        if isinstance(value, dict):
            check_numbers(Fields(config.path, value, f"{config.prefix}{name}."), tensors)


class TensorHeader(NamedTuple):
    """A tensor in a file: where it is, its shape, and the name of its dtype, such as "BF16"."""

    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def read_tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a safetensors file by name, after checking that it is complete."""
    file_size(path)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(path, tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is not a complete safetensors file ({one_line(error)}): it is damaged or was "
            "not downloaded to the end. Download it again"
        ) from error


def read_tensors(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return tensors of a safetensors file by name, memory-mapped, and report the progress."""
    tensors, done, total = {}, 0, file_size(path)
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()) if names is None else names:
            tensors[name] = file.get_tensor(name)
            done += tensors[name].nbytes
            report_read(path.name, done, total)
    report_read(path.name, total, total)
    return tensors


def check_tensors(
    where: Path, headers: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Validate that all expected tensors are present, with their shapes and a floating dtype."""
    for name, shape in expected.items():
        if name not in headers:
            raise ModelError(
                f"the weights in {where} are not complete: {name} is missing. Download the files "
                "again"
            )
        header = headers[name]
        if header.shape != shape:
            raise ModelError(
                f"the weights in {where} have other shapes than its configuration says: {name} "
                f"must be {shape}; got {header.shape}. Download both from one source again"
            )
        if header.dtype not in _DTYPES:
            raise ModelError(
                f"the weights in {where} must be {', '.join(_DTYPES)}; {name} is {header.dtype}"
            )


@contextmanager
def reject_panics(message: str) -> Iterator[None]:
    """Turn any error of a library on a damaged file into a `ModelError`.

    Rust libraries raise bare Exceptions, and panics, which derive from BaseException.
    """
    try:
        yield
    except (ModelError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ModelError(f"{message}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return the message of another library's error, in one line of at most 300 characters."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = " ".join(str(text).split())
    return (text if len(text) <= 300 else text[:300] + " ...").rstrip(".")
