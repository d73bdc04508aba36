"""`score_files`: score any number of texts into one file, one row per token, resumable.

Rows are appended to OUT.partial; OUT.partial.json has the settings and the totals of the texts that
are done. A run that was stopped continues there. OUT appears only when it is complete. Memory is
that of one window, however long the texts are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import IO, Any

from lmhead.analysis.score import Score, ScoredToken, Spread, default_window, stream_scores
from lmhead.analysis.token_text import finite
from lmhead.models import LanguageModel

try:
    import fcntl
except ImportError:  # not on Windows: no lock
    fcntl = None  # type: ignore[assignment]

FORMATS = (".jsonl", ".parquet")
_ROWS = 1 << 14  # rows per group of a Parquet file


def score_files(
    model: LanguageModel,
    texts: Mapping[str, Callable[[], Iterable[str]]],
    out: Path,
    *,
    window: int | None = None,
    stride: int | None = None,
    top_k: int = 0,
    restart: bool = False,
    on_token: Callable[[str, ScoredToken], object] | None = None,
    on_resume: Callable[[int], object] | None = None,
    spread: Spread | None = None,
) -> dict[str, Score]:
    """Score texts into a file with one row per token; return the totals of each text.

    A row has `file`, `position` (from 0), `id`, `text`, `logit`, `log_prob`, `rank` (from 0),
    `entropy`, and with top_k `top_ids` and `top_log_probs`. A text of fewer than two tokens has no
    rows, and totals with `tokens` 0.

    Args:
        model: any `LanguageModel` with a tokenizer.
        texts: by name, a function that returns the pieces of the text. A name that is a file is
            checked for changes when a run continues.
        out: file to write, .jsonl or .parquet (needs pyarrow).
        window: as for `score`.
        stride: as for `score`.
        top_k: number of most probable tokens per row.
        restart: discard an unfinished run, and replace `out` if it exists.
        on_token: called with the name of the text and every newly scored token.
        on_resume: called with the number of rows that are kept from an unfinished run.
        spread: as for `score`.

    Raises:
        FileExistsError: `out` exists.
        ValueError: an unfinished run with other settings or other texts.
        BlockingIOError: another process is writing `out`.
    """
    if out.suffix not in FORMATS:
        raise ValueError(f"out must end in {' or '.join(FORMATS)}; got {out.name!r}")
    if out.exists() and not restart:
        raise FileExistsError(17, "File exists", str(out))
    window = default_window(model) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    settings = {
        "model": model.name,
        "vocab_size": model.head.vocab_size,
        "window": window,
        "stride": stride,
        "top_k": top_k,
        "files": {name: _signature(name) for name in texts},
    }
    partial, state = (out.with_name(out.name + end) for end in (".partial", ".partial.json"))
    names = list(texts)
    with _locked(partial) as file:
        done: list[Score] = []
        if restart:
            file.truncate(0)
        elif state.exists():
            saved = _read_state(state)
            _check_settings(saved["settings"], settings, partial)
            done = [Score(**entry) for entry in saved["done"]]
        elif partial.stat().st_size:
            raise ValueError(
                f"{partial} exists, but is not of an unfinished run ({state.name} is missing); "
                "move it elsewhere, or replace it with --restart"
            )
        started = _kept_rows(file, names, done, Score(window, stride))
        if on_resume is not None and (rows := started.tokens + sum(s.tokens for s in done)):
            on_resume(rows)
        options: dict[str, Any] = {"window": window, "stride": stride, "top_k": top_k}
        rest = names[len(done) :]
        skips = [started.tokens, *[0] * len(rest)]
        pairs = ((texts[name](), skip) for name, skip in zip(rest, skips, strict=False))
        _write_state(state, settings, done)
        for entry, tokens in stream_scores(model, pairs, spread=spread, **options):
            name = names[len(done)]
            for token in tokens:
                file.write(_encode(name, token))
                if on_token is not None:
                    on_token(name, token)
            file.flush()
            if entry.ended:
                done.append(started + entry.result)
                started = Score(window, stride)
                _write_state(state, settings, done)
        file.flush()
        os.fsync(file.fileno())
        if out.suffix == ".parquet":
            _convert(file, out, settings)
            partial.unlink()
        else:
            partial.replace(out)
        state.unlink()
    return dict(zip(names, done, strict=True))


def _encode(name: str, scored: ScoredToken) -> bytes:
    """Return the row of a token of the text `name`."""
    token = scored.token
    row = {
        "file": name,
        "position": scored.position,
        "id": token.piece.id,
        "text": token.piece.text if token.piece.special is None else token.piece.special,
        "logit": finite(token.logit),
        "log_prob": finite(token.log_prob),
        "rank": token.rank,
        "entropy": finite(scored.entropy),
    }
    if scored.top:
        row["top_ids"] = [id for id, _ in scored.top]
        row["top_log_probs"] = [finite(log_prob) for _, log_prob in scored.top]
    return json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"


def _kept_rows(file: IO[bytes], names: Sequence[str], done: list[Score], started: Score) -> Score:
    """Keep the complete rows of an unfinished run; return the totals of the text in progress.

    Everything from the first damaged or missing row on is removed, in the file and in `done`.
    """
    file.seek(0)
    end, index = 0, 0
    totals = [Score(started.window, started.stride)]
    for line in file:
        row = _row(line)
        if row is None:
            break
        while (
            index < len(done)
            and index + 1 < len(names)
            and totals[index].tokens == done[index].tokens
            and row["file"] != names[index]
        ):
            index += 1
            totals.append(Score(started.window, started.stride))
        if row["file"] != names[index] or row["position"] != totals[index].tokens + 1:
            break
        log_prob = -float("inf") if row["log_prob"] is None else row["log_prob"]
        totals[index].add(log_prob, row["entropy"], row["rank"])
        end += len(line)
    file.seek(end)
    file.truncate()
    complete = 0
    while complete < len(done):
        rows = totals[complete].tokens if complete < len(totals) else 0
        if rows != done[complete].tokens:
            break
        complete += 1
    del done[complete:]
    return totals[complete] if complete < len(totals) else started


def _row(line: bytes) -> dict[str, Any] | None:
    """Parse a row; None if it is damaged."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"file", "position", "rank"} <= row.keys() else None


def _signature(name: str) -> list[int] | None:
    """Return size and time of change of a file; None if it is not a regular file."""
    path = Path(name)
    if not path.is_file():
        return None
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _check_settings(old: dict[str, Any], new: dict[str, Any], partial: Path) -> None:
    for name, value in new.items():
        if name != "files" and old.get(name) != value:
            raise ValueError(
                f"{partial} was started with {name} {old.get(name)!r}, not {value!r}; use the same "
                "settings to continue, or start over with --restart"
            )
    files = old.get("files", {})
    if list(files) != list(new["files"]):
        raise ValueError(f"{partial} was started with other files; start over with --restart")
    for name, signature in new["files"].items():
        if signature is None or files[name] != signature:
            raise ValueError(
                f"{name} may have changed since {partial} was started; start over with --restart"
            )


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state["settings"], dict) and isinstance(state["done"], list):
            return dict(state)
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"{path} is not of an unfinished run; move it elsewhere, or replace it with --restart"
    )


def _write_state(path: Path, settings: dict[str, Any], done: list[Score]) -> None:
    text = json.dumps({"settings": settings, "done": [asdict(score) for score in done]})
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for appending, for one process only."""
    with path.open("a+b") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BlockingIOError(
                    11, "another process is writing this file", str(path)
                ) from None
        yield file


def _convert(file: IO[bytes], out: Path, settings: dict[str, Any]) -> None:
    """Write the rows as Parquet, group by group."""
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "file": pa.dictionary(pa.int32(), pa.string()),
        "position": pa.int64(),
        "id": pa.int32(),
        "text": pa.string(),
        "logit": pa.float64(),
        "log_prob": pa.float64(),
        "rank": pa.int32(),
        "entropy": pa.float64(),
    }
    if settings["top_k"]:
        columns |= {"top_ids": pa.list_(pa.int32()), "top_log_probs": pa.list_(pa.float64())}
    schema = pa.schema(columns, metadata={"lmhead": json.dumps(settings)})
    new = out.with_name(out.name + ".new")
    file.seek(0)
    with parquet.ParquetWriter(new, schema) as writer:
        while lines := list(islice(file, _ROWS)):
            rows = [json.loads(line) for line in lines]
            arrays = [
                pa.array([row.get(name) for row in rows], type=kind)
                for name, kind in columns.items()
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    new.replace(out)
