"""A cache as plain values, and plain values as a file.

The plain form is a flat dict that `torch.save` and `torch.load(weights_only=True)` take:

    "hf_dynyarn"                           a dict of strings, numbers, bools and tuples: the header
    "positions"                            (B, T) int64
    "layers.<i>.keys", "layers.<i>.values" (B, Hkv, T, D), keys un-rotated

An empty cache has a header only. The file is a safetensors file of these tensors, with the header
as JSON in its metadata (an infinite bound is `Infinity`, as Python writes it) and a CRC-32 of all,
for safetensors itself does not notice a flipped bit.
"""

import contextlib
import json
import numbers
import os
import uuid
import zlib
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .rope_types import SCHEDULE_OF
from .schedules import Schedule

# Raised by whatever a reader of this version would misunderstand.
FORMAT_VERSION = 1

HEADER = "hf_dynyarn"
CHECKSUM = "crc32"

# What the header says beside the version, and of which type.
HEADER_TYPES: dict[str, Any] = {
    "schedule": dict | None,
    "packed": bool,
    "rotated_copy": bool,
    "layers": int,
}


# In the header of a cache of fixed size alone.
FIXED_SIZE = "max_cache_len"


class Contents(NamedTuple):
    """What a cache is made of.

    Attributes:
        schedule: the schedule that filled the cache; None where it is empty.
        packed: whether a row holds several documents.
        rotated_copy: the option of the cache.
        positions: `(B, T)` int64; None where the cache is empty.
        layers: un-rotated keys and values of each layer, `(B, Hkv, T, D)` each.
        max_cache_len: the option of the cache; None where it grows.
    """

    schedule: Schedule | None
    packed: bool
    rotated_copy: bool
    positions: torch.Tensor | None
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    max_cache_len: int | None = None


def to_plain(contents: Contents) -> dict[str, Any]:
    """Gives the plain form, with copies of the tensors on the CPU, without spare room."""
    schedule, packed, rotated_copy, positions, layers, max_cache_len = contents
    header = {
        "version": FORMAT_VERSION,
        "schedule": None if schedule is None else _plain_schedule(schedule),
        "packed": packed,
        "rotated_copy": rotated_copy,
        "layers": len(layers),
    }
    if max_cache_len is not None:
        header[FIXED_SIZE] = max_cache_len
    held = [] if positions is None else [positions, *(part for layer in layers for part in layer)]
    names = _tensor_names(len(layers))
    return {HEADER: header, **{name: _copy(part) for name, part in zip(names, held, strict=True)}}


def from_plain(plain: Any) -> Contents:
    """Checks a plain form and takes it apart; the tensors are those of `plain`.

    Raises:
        TypeError: not a dict.
        ValueError: not the plain form of a cache, or of a newer format.
    """
    if not isinstance(plain, dict):
        raise TypeError(
            f"a saved cache must be a dict, got {type(plain).__name__}. Pass what "
            "DynamicYaRNCache.state_dict() returned."
        )
    header = _checked_header(plain.get(HEADER))
    names = _tensor_names(header["layers"])
    if set(plain) != {HEADER, *names}:
        differing = sorted(set(plain) ^ {HEADER, *names}, key=str)
        raise _misfit(
            f"the tensors of its {header['layers']} layers and no others",
            f"more or fewer: {differing[:4]}",
        )
    tensors = [plain[name] for name in names]
    _check_tensors(dict(zip(names, tensors, strict=True)))
    if FIXED_SIZE in header and tensors:
        _check_fixed_size(tensors[0], header[FIXED_SIZE])
    return Contents(
        schedule=None if header["schedule"] is None else _schedule(header["schedule"]),
        packed=header["packed"],
        rotated_copy=header["rotated_copy"],
        positions=tensors[0] if tensors else None,
        layers=list(zip(tensors[1::2], tensors[2::2], strict=True)),
        max_cache_len=header.get(FIXED_SIZE),
    )


def write(path: str | os.PathLike[str], plain: dict[str, Any]) -> None:
    """Writes a plain form into a file, which is the old one until the new one is whole.

    Raises:
        OSError: it could not be written.
    """
    target = os.path.realpath(path)  # where a link leads, so that it stays a link
    tensors = {name: part for name, part in plain.items() if name != HEADER}
    header = json.dumps(plain[HEADER])
    metadata = {HEADER: header, CHECKSUM: _checksum(header, tensors)}
    # In the same folder, for only there is replacing one step.
    temporary = os.path.join(os.path.dirname(target), f".{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except SafetensorError as error:
        raise OSError(f"the cache could not be written to {os.fspath(path)!r}: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a plain form from a file that `write` wrote.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: the file is damaged, of something else, or of a newer format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _damaged(path, str(error)) from error
    if HEADER not in metadata:
        raise ValueError(
            f"path must be a file that DynamicYaRNCache.save() wrote, got {os.fspath(path)!r}, a "
            f"safetensors file without {HEADER!r} in its metadata. Pass the path of a saved cache."
        )
    try:
        header = json.loads(metadata[HEADER])
    except json.JSONDecodeError as error:
        raise _damaged(path, f"a header that is no JSON ({error})") from error
    _checked_header(header)
    expected, found = metadata.get(CHECKSUM), _checksum(metadata[HEADER], tensors)
    if expected != found:
        raise _damaged(path, f"contents with the checksum {found} where {expected} is written")
    return {HEADER: header, **tensors}


def _plain_schedule(schedule: Schedule) -> dict[str, Any]:
    options = {field.name: _plain(getattr(schedule, field.name)) for field in fields(schedule)}
    return {"kind": type(schedule).__name__, "options": options}


def _plain(value: Any) -> Any:
    """Numbers of NumPy, which options may be, as Python's."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _schedule(plain: dict[str, Any]) -> Schedule:
    kinds: dict[str, Any] = {kind.__name__: kind for kind in SCHEDULE_OF.values()}
    try:
        options = {
            name: tuple(value) if isinstance(value, list) else value  # JSON has no tuples
            for name, value in plain["options"].items()
        }
        schedule: Schedule = kinds[plain["kind"]](**options)
        return schedule
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _misfit(f"a schedule of one of the kinds {sorted(kinds)}", f"{plain}") from error


def _checked_header(header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or "version" not in header:
        raise _misfit(f"a dict with a version under {HEADER!r}", repr(header))
    if header["version"] != FORMAT_VERSION:
        raise ValueError(
            f"the format of a saved cache must be version {FORMAT_VERSION}, which this hf_dynyarn "
            f"reads, got {header['version']!r}. Install the hf_dynyarn that saved it, or save the "
            "cache again."
        )
    complete = set(header) - {FIXED_SIZE} == {"version", *HEADER_TYPES}
    complete = complete and isinstance(header.get(FIXED_SIZE, 0), int)
    if not complete or not all(isinstance(header[n], kind) for n, kind in HEADER_TYPES.items()):
        raise _misfit(f"{list(HEADER_TYPES)} of the right types", repr(header))
    if header["layers"] < 0 or (header["layers"] == 0) != (header["schedule"] is None):
        raise _misfit("a schedule where it has layers, and only there", repr(header))
    return header


def _check_tensors(tensors: dict[str, Any]) -> None:
    others = [name for name, part in tensors.items() if not isinstance(part, torch.Tensor)]
    if others:
        raise _misfit("tensors", f"a {type(tensors[others[0]]).__name__} as {others[0]!r}")
    positions = tensors.get("positions")
    if positions is None:
        return
    if positions.dtype != torch.int64 or positions.dim() != 2 or positions.numel() == 0:
        raise _misfit("positions (B, T) of int64", f"{tuple(positions.shape)} of {positions.dtype}")
    rows, length = positions.shape
    for name, part in tensors.items():
        if part is positions:
            continue
        shape = tuple(part.shape)
        if len(shape) != 4 or shape[0::2] != (rows, length) or not part.is_floating_point():
            raise _misfit(
                f"{name!r} as {(rows, 'Hkv', length, 'D')} of floats", f"{shape} of {part.dtype}"
            )


def _check_fixed_size(positions: torch.Tensor, room: int) -> None:
    text = positions >= 0
    in_order = ((text.cumsum(-1) - 1 == positions) | ~text).all()
    if not in_order or positions.shape[1] > room:
        raise _misfit(
            f"rows that count from 0 on, of at most {FIXED_SIZE} = {room} tokens",
            f"{tuple(positions.shape)}{'' if in_order else ' that do not'}",
        )


def _misfit(expected: str, got: str) -> ValueError:
    return ValueError(
        f"a saved cache must have {expected}, got {got}. Pass what a DynamicYaRNCache saved, "
        "unchanged."
    )


def _damaged(path: str | os.PathLike[str], got: str) -> ValueError:
    return ValueError(
        f"path must be a whole file that DynamicYaRNCache.save() wrote, got {os.fspath(path)!r}, "
        f"which is damaged or something else: {got}. Save the cache again."
    )


def _tensor_names(layers: int) -> list[str]:
    pairs = [f"layers.{index}.{part}" for index in range(layers) for part in ("keys", "values")]
    return ["positions", *pairs] if layers else []


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copied.copy_(tensor.detach())


def _checksum(header: str, tensors: dict[str, torch.Tensor]) -> str:
    """CRC-32 of the header and of every tensor's name, dtype, shape and bytes."""
    crc = zlib.crc32(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
