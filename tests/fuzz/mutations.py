"""Mutations of model files: of bytes, of JSON values, of GGUF fields, of whole files."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

INTEGERS = [0, 1, -1, 2, 3, 7, 255, 2**15, 2**16, 10**6, 10**9, 2**30, 2**31 - 1, 2**31]
INTEGERS += [2**32 - 1, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30, -(2**31), -(2**63)]
STRINGS = [
    "",
    "a",
    "llama",
    "gpt2",
    "t5",
    "../x",
    "/etc/passwd",
    "\0",
    "é" * 50,
    "x" * 5000,
    "{{ 1 }}",
]
OTHERS: list[Any] = [
    None,
    True,
    False,
    0.0,
    -1.5,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
]


def interesting(draw: Random) -> Any:
    """A value that is likely to be forgotten by a check."""
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(INTEGERS)
    if kind == 3:
        return draw.choice(STRINGS)
    if kind < 6:
        return draw.choice(OTHERS)
    if kind == 6:
        return [interesting(draw) for _ in range(draw.randrange(1, 5))]
    return {draw.choice(["a", "type", "factor", "name"]): interesting(draw)}


# --- bytes ----------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, draw: Random) -> bytes:
    """Change a few bytes, mostly in the header."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        end = (
            len(changed) if draw.random() < 0.3 else min(len(changed), draw.choice([64, 512, 4096]))
        )
        at = draw.randrange(end + 1)
        size = draw.choice([1, 4, 8, 16, 100])
        match draw.randrange(8):
            case 0 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                value = draw.choice(INTEGERS) % 2**64
                changed[at : at + 8] = struct.pack("<Q", value)[: draw.choice([4, 8])]
            case 2:
                del changed[at : at + size]
            case 3:
                changed[at:at] = draw.randbytes(size)
            case 4:
                changed[at : at + size] = bytes(size)
            case 5:
                changed[at:at] = changed[at : at + size]
            case 6:
                del changed[draw.randrange(len(changed) + 1) :]
            case 7:
                changed[at : at + size] = draw.randbytes(size)
    return bytes(changed)


# --- JSON -----------------------------------------------------------------------------------------


def mutate_json(value: Any, draw: Random) -> Any:
    """Replace, remove or add one value somewhere inside."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any, depth: int = 0) -> None:
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        # Of a long list or vocabulary, a few: else nothing else would ever be chosen.
        chosen = list(entries)
        for key, child in draw.sample(chosen, min(len(chosen), 40)):
            places.append((node, key))
            if isinstance(child, dict | list):
                walk(child, depth + 1)

    walk(value)
    if not places or draw.random() < 0.02:
        return interesting(draw)
    node, key = draw.choice(places)
    match draw.randrange(8):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[draw.choice(["extra", "rope_scaling", "quantization_config", "dtype"])] = (
                interesting(draw)
            )
        case 2:
            deep: Any = 0
            for _ in range(draw.choice([50, 200, 900])):
                deep = [deep] if draw.random() < 0.5 else {"a": deep}
            node[key] = deep
        case 3 if isinstance(node[key], int | float) and not isinstance(node[key], bool):
            change = draw.choice([-1, 1, node[key], -2 * node[key], 10**6])
            node[key] += change
        case _:
            node[key] = interesting(draw)
    return value


def mutate_json_file(data: bytes, draw: Random) -> bytes:
    if draw.random() < 0.15:
        return mutate_bytes(data, draw)
    if draw.random() < 0.02:
        return b'{"a":' * 100_000
    return json.dumps(mutate_json(json.loads(data), draw)).encode()


def mutate_safetensors(data: bytes, draw: Random) -> bytes:
    """Change the JSON of the header, or bytes."""
    if draw.random() < 0.5:
        return mutate_bytes(data, draw)
    (length,) = struct.unpack("<Q", data[:8])
    header = mutate_json(json.loads(data[8 : 8 + length]), draw)
    for tensor in header.values() if isinstance(header, dict) else ():
        if draw.random() < 0.1 and isinstance(tensor, dict) and "dtype" in tensor:
            tensor["dtype"] = draw.choice(["I32", "F8_E4M3", "BOOL", "U8", "F64", "BF16", "C64"])
    made = json.dumps(header).encode()
    return struct.pack("<Q", len(made)) + made + data[8 + length :]


# --- GGUF -----------------------------------------------------------------------------------------

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _skip(data: bytes, at: int, kind: int) -> int:
    if kind == 8:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind == 9:
        inner, count = struct.unpack_from("<IQ", data, at)
        at += 12
        if inner in _SIZES:
            return at + int(count) * _SIZES[inner]
        for _ in range(count):
            at = _skip(data, at, inner)
        return at
    return at + _SIZES[kind]


def gguf_fields(data: bytes) -> list[tuple[int, int]]:
    """Begin of the type and end of the value of every field of a valid file."""
    (count,) = struct.unpack_from("<Q", data, 16)
    at, found = 24, []
    for _ in range(count):
        at = _skip(data, at, 8)
        end = _skip(data, at + 4, struct.unpack_from("<I", data, at)[0])
        found.append((at, end))
        at = end
    return found


def _gguf_value(draw: Random) -> bytes:
    """A typed value of a field."""
    kind = draw.choice([0, 1, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12, 13, 255])
    number = draw.choice(INTEGERS) % 2**64
    if kind == 8:
        text = draw.choice(STRINGS).encode()
        return struct.pack("<IQ", 8, len(text)) + text
    if kind == 9 and draw.random() < 0.3:
        depth = draw.choice([3, 100, 990, 5000])
        return struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)
    if kind == 9:
        inner = draw.choice([0, 4, 6, 8, 9, 12])
        count = draw.choice([0, 1, 2, number])
        return struct.pack("<IIQ", 9, inner, count) + draw.randbytes(8 * min(count, 4))
    if kind in (6, 12):
        value = draw.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 0.5])
        return struct.pack("<If" if kind == 6 else "<Id", kind, value)
    return struct.pack("<I", kind) + struct.pack("<Q", number)[: _SIZES.get(kind, 8)]


def mutate_gguf(data: bytes, draw: Random) -> bytes:
    """Give fields other values, or change bytes."""
    if draw.random() < 0.4:
        return mutate_bytes(data, draw)
    for _ in range(draw.choice([1, 1, 2])):
        begin, end = draw.choice(gguf_fields(data))
        value = _gguf_value(draw)
        if draw.random() < 0.4:  # of the same type
            kind = struct.unpack_from("<I", data, begin)[0]
            if kind in _SIZES:
                number = draw.choice(INTEGERS) % 2**64
                value = struct.pack("<I", kind) + struct.pack("<Q", number)[: _SIZES[kind]]
        # The data keeps its alignment, so that only the field is wrong.
        value += b"" if draw.random() < 0.5 else bytes(-len(value) % 32)
        changed = data[:begin] + value + data[end:]
        try:
            gguf_fields(changed)
        except Exception:  # it cannot be changed a second time in this way
            return changed
        data = changed
    return data


# --- whole files ----------------------------------------------------------------------------------


def _replace_file(path: Path, draw: Random) -> None:
    path.unlink()
    match draw.randrange(6):
        case 0:
            path.write_bytes(b"")
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/dev/tty", str(path)]))
        case 3:
            os.mkfifo(path)
        case 4:
            others = [other for other in path.parent.iterdir() if other.is_file()]
            if others:
                shutil.copyfile(draw.choice(others), path)
        case _:
            pass  # missing


MUTATORS: dict[str, Callable[[bytes, Random], bytes]] = {
    ".json": mutate_json_file,
    ".safetensors": mutate_safetensors,
    ".gguf": mutate_gguf,
    ".bin": mutate_bytes,
}


def mutate_folder(folder: Path, draw: Random) -> str:
    """Damage one or two files of a sample; return what was done."""
    done = []
    for _ in range(draw.choice([1, 1, 1, 2])):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            break
        path = draw.choice(files)
        if draw.random() < 0.04:
            _replace_file(path, draw)
            done.append(f"replace {path.name}")
            continue
        data = path.read_bytes()
        try:
            path.write_bytes(MUTATORS[path.suffix](data, draw))
        except Exception:  # it was damaged before
            path.write_bytes(mutate_bytes(data, draw))
        done.append(f"damage {path.name}")
    return ", ".join(done)
