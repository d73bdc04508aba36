"""`lmhead translate`: sentences through a model of `lmhead train --task translate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._frame import Unreadable
from lmhead.cli._model import checked_text
from lmhead.cli._terminal import dim, echo
from lmhead.interrupt import leaving_at_once

if TYPE_CHECKING:
    from lmhead.models.translator import Translation, Translator

_TOGETHER = 64  # lines of standard input that are translated before the next are read


@click.command("translate")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "--beams", type=click.IntRange(1, 256), default=4, show_default=True, help="1 is greedy."
)
@click.option(
    "--n-best",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Translations of each.",
)
@click.option(
    "--length-penalty",
    type=float,
    default=1.0,
    show_default=True,
    help="Above 1 favours long translations, below 1 short ones.",
)
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of a translation.")
@click.option(
    "--bleu",
    "pairs",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Translate the first column of a file of pairs, and score it with the second.",
)
@click.option("--reverse", is_flag=True, help="With --bleu: from the second column to the first.")
@click.option(
    "--samples",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    help="With --bleu: translations to show.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads; torch's choice otherwise.")
@_json.json_option
def command(
    run: Path,
    texts: tuple[str, ...],
    pairs: Path | None,
    reverse: bool,
    samples: int,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Translate sentences by beam search.

    RUN is the folder of `lmhead train --task translate`, or one of its checkpoints. Each TEXT is a
    sentence; without any, or with -, the lines of standard input are.

    \b
    Examples:
      lmhead translate run "I love music."
      lmhead translate run "I love music." --n-best 3 --json
      lmhead translate run < sentences.txt > translations.txt
      lmhead translate run --bleu run/data/held_out.tsv
    """
    if options["n_best"] > options["beams"]:
        raise click.UsageError(
            f"--n-best must be at most --beams, {options['beams']}; got {options['n_best']}"
        )
    if pairs is not None and texts:
        raise click.UsageError("--bleu takes the sentences from its file, not from the command")
    with leaving_at_once():
        import torch

        from lmhead.models.translator import load_translator
    if threads is not None:
        torch.set_num_threads(threads)
    translator = load_translator(run)
    settings = {
        "num_beams": options["beams"],
        "n_best": options["n_best"],
        "length_penalty": options["length_penalty"],
        "max_new_tokens": options["max_tokens"],
    }
    if pairs is not None:
        _score(translator, pairs, settings, reverse=reverse, samples=samples, as_json=as_json)
    elif as_json:
        sources = list(_sources(texts))
        found = translator.translate(sources, **settings)
        _json.write(
            "translate",
            model=_model(translator),
            translations=[
                {"source": source, "best": [_entry(one) for one in best]}
                for source, best in zip(sources, found, strict=True)
            ],
        )
    else:
        # Someone who types sees each answer at once.
        size = 1 if sys.stdin.isatty() else _TOGETHER
        sources_left = _sources(texts)
        while together := list(islice(sources_left, size)):
            for best in translator.translate(together, **settings):
                echo(_lines(best, options["n_best"]))


def _sources(texts: tuple[str, ...]) -> Iterator[str]:
    """The sentences of the command, or the lines of standard input."""
    for text in texts or ("-",):
        if text != "-":
            yield checked_text(text, "TEXT")
            continue
        number = 0
        try:
            for number, line in enumerate(sys.stdin.buffer, 1):  # noqa: B007 for the message
                yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise Unreadable(f"standard input must be UTF-8; line {number} is not") from None


def _lines(best: list[Translation], n_best: int) -> list[str]:
    """One line for the best alone, so that lines out are lines in; else one each, with scores."""
    if n_best == 1:
        return [best[0].text if best else ""]
    return [f"{one.score:8.4f}  {one.text}" for one in best] or [""]


def _model(translator: Translator) -> dict[str, Any]:
    sizes = translator.model.config
    return {
        "name": translator.name,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "max_length": sizes.max_length,
    }


def _entry(one: Translation) -> dict[str, Any]:
    return {"text": one.text, "score": one.score, "ids": list(one.ids)}


def _score(
    translator: Translator,
    path: Path,
    settings: dict[str, Any],
    *,
    reverse: bool,
    samples: int,
    as_json: bool,
) -> None:
    from lmhead.train.bleu import bleu, installed
    from lmhead.train.corpus import CorpusError
    from lmhead.train.pairs import read_pairs

    if not installed():
        raise click.ClickException("BLEU needs sacreBLEU: pip install sacrebleu")
    try:
        pairs = read_pairs([path], reverse=reverse)
    except CorpusError as error:
        raise Unreadable(str(error)) from None
    if not pairs:
        raise Unreadable(f"{path} holds no pairs")
    if sys.stderr.isatty():
        click.echo(dim(f"Translating {len(pairs):,} sentences ..."), err=True)
    found = translator.translate([pair.source for pair in pairs], **settings)
    texts = [best[0].text if best else "" for best in found]
    score = bleu(texts, [pair.target for pair in pairs])
    shown = list(zip(pairs, texts, strict=True))[:samples]
    if as_json:
        _json.write(
            "translate",
            model=_model(translator),
            bleu=score.score,
            signature=score.signature,
            pairs=len(pairs),
            samples=[
                {"source": pair.source, "translation": text, "reference": pair.target}
                for pair, text in shown
            ],
        )
        return
    for pair, text in shown:
        echo([pair.source, f"  {text}", dim(f"  {pair.target}")])
    echo(f"BLEU {score.score:.2f} over {len(pairs):,} pairs, {settings['num_beams']} beams")
    echo(dim(score.signature))
