"""Make the bundled model `tiny` from a training run: weights in 16 bits, and a card with figures.

In:  the folder of a run of `lmhead train`, and the corpus it learned from.
Out: src/lmhead/models/tiny: config.json, model.safetensors, tokenizer.json, README.md.

The figures on the card are those of the packed files, opened as a user opens them.

    python scripts/tiny_pack.py build/tiny/run build/tiny/corpus.txt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import string
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import lmhead
from lmhead.analysis import Score, score
from lmhead.models import LanguageModel, open_model
from lmhead.models.checkpoint import CONFIG, MODEL, TOKENIZER
from lmhead.sampling import Sampler
from lmhead.train import export

PLACE = Path(__file__).parents[1] / "src" / "lmhead" / "models" / "tiny"
CARD = Path(__file__).with_name("tiny_card.md")
PROMPTS = {"english": "In the beginning", "chinese": "蝶恋花\n"}
NEW_TOKENS = 60


def pack(run: Path, place: Path) -> dict[str, Any]:
    """Put the best checkpoint of a run there, in 16 bits and without what is only for training."""
    made = export(run, place.with_name(f"{place.name}.new"), dtype="float16")
    for file in made.iterdir():
        file.chmod(0o644)
    shutil.rmtree(place, ignore_errors=True)
    made.rename(place)
    about: dict[str, Any] = json.loads((place / CONFIG).read_text(encoding="utf-8"))
    return about


def held_out(corpus: Path, fraction: float) -> tuple[str, str]:
    """Return the complete texts at the end of the corpus that the run has not seen."""
    text = corpus.read_text(encoding="utf-8")
    texts = text[int(len(text) * (1 - fraction)) :].strip().split("\n\n")[1:]
    english = [text for text in texts if text.isascii()]
    chinese = [text for text in texts if not text.isascii()]
    return "\n\n".join(english), "\n\n".join(chinese)


def card(
    about: dict[str, Any], place: Path, texts: tuple[str, str], corpus: Path, note: str
) -> str:
    """Return the model card, with the figures of the packed files."""
    model = open_model(place)
    english, chinese = (score(model, text) for text in texts)
    training, sizes = about["training"], about["model"]
    parameters = sum(tensor.numel() for tensor in load_file(place / MODEL).values())
    batch = training["batch"] * training["accumulate"] * training["block"]
    files = [place / name for name in (CONFIG, MODEL, TOKENIZER)]
    return string.Template(CARD.read_text(encoding="utf-8")).substitute(
        parameters=f"{parameters:,}",
        vocabulary=f"{sizes['vocab_size']:,}",
        layers=training["layers"],
        heads=training["heads"],
        width=training["width"],
        block=training["block"],
        steps=f"{about['step']:,}",
        batch=f"{batch:,}",
        tokens=f"{about['step'] * batch:,}",
        megabytes=f"{sum(file.stat().st_size for file in files) / 1e6:.1f}",
        corpus_sha=hashlib.sha256(corpus.read_bytes()).hexdigest(),
        model_sha=hashlib.sha256((place / MODEL).read_bytes()).hexdigest(),
        **_figures("english", english),
        **_figures("chinese", chinese),
        note=f" {note}" if note else "",
        english_text=_sample(model, PROMPTS["english"]),
        chinese_text=_sample(model, PROMPTS["chinese"]),
    )


def _figures(language: str, result: Score) -> dict[str, str]:
    return {
        f"{language}_tokens": f"{result.tokens:,}",
        f"{language}_perplexity": f"{result.perplexity:.1f}",
        f"{language}_bits": f"{result.bits_per_byte:.3f}",
        f"{language}_first": f"{result.first_choices / result.tokens:.1%}",
    }


def _sample(model: LanguageModel, prompt: str) -> str:
    sampler = Sampler(temperature=0.7, top_p=0.9, seed=1)
    made = lmhead.generate(model, prompt, sampler, max_new_tokens=NEW_TOKENS, eos_token_ids=())
    return (prompt + made.text).strip()


def main() -> None:
    """Pack a run, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("corpus", type=Path, help="text that it learned from")
    parser.add_argument("--out", type=Path, default=PLACE, help="folder [default: the package]")
    parser.add_argument("--note", default="", help="how this run differs from the recipe")
    given = parser.parse_args()
    about = pack(given.run, given.out)
    texts = held_out(given.corpus, about["training"]["valid_fraction"])
    text = card(about, given.out, texts, given.corpus, given.note)
    (given.out / "README.md").write_text(text, encoding="utf-8", newline="\n")
    print(f"{given.out}: step {about['step']:,}")


if __name__ == "__main__":
    main()
