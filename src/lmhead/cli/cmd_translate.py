"""`lmhead translate`: translate with a model of `lmhead train`, or a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli import _model_arguments as inputs
from lmhead.cli._command_group import FILE, FileError, importing, integer_option
from lmhead.cli._terminal import dim, echo

if TYPE_CHECKING:
    from lmhead.models.translator import Translation, Translator

_LINES_PER_BATCH = 64  # of standard input


@click.command("translate")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@integer_option("--beams", "num_beams", default=4, high=256, help="Beam width; 1 is greedy search.")
@integer_option("--n-best", default=1, high=256, help="Number of translations per sentence.")
@click.option(
    "--length-penalty",
    type=float,
    default=1.0,
    show_default=True,
    help="Values above 1 favour long translations, below 1 short ones.",
)
@click.option(
    "--max-tokens",
    "max_new_tokens",
    type=click.IntRange(1),
    help="Maximum number of tokens per translation.",
)
@click.option(
    "--bleu",
    "pairs",
    type=FILE,
    help="Translate the first column of a file of sentence pairs; print BLEU against the second.",
)
@click.option(
    "--reverse", is_flag=True, help="With --bleu: translate from the second column to the first."
)
@integer_option("--samples", default=10, low=0, help="With --bleu: number of translations to show.")
@inputs.threads_option
@_json.json_option
def command(
    run: Path,
    texts: tuple[str, ...],
    pairs: Path | None,
    reverse: bool,
    samples: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Translate sentences by beam search.

    RUN is the folder of `lmhead train --task translate`, one of its checkpoints, or a Hugging Face
    folder of an encoder and decoder (T5, BART, Marian, ...). Each TEXT is a
    sentence. Without TEXT, or for -, each line of standard input is a sentence.

    \b
    Examples:
      lmhead translate run "I love music."
      lmhead translate run "I love music." --n-best 3 --json
      lmhead translate run < sentences.txt > translations.txt
      lmhead translate run --bleu run/data/held_out.tsv
    """
    beams, n_best = settings["num_beams"], settings["n_best"]
    if n_best > beams:
        raise click.UsageError(f"--n-best must be at most --beams, {beams}; got {n_best}")
    if pairs is not None and texts:
        raise click.UsageError("--bleu reads the sentences from its file; remove TEXT")
    with importing():
        from lmhead.models.translator import load_translator
    inputs.set_threads()
    translator = load_translator(run)
    if pairs is not None:
        _score(translator, pairs, settings, reverse=reverse, samples=samples, as_json=as_json)
    elif as_json:
        sources = list(_sources(texts))
        translations = translator.translate(sources, **settings)
        _json.write(
            "translate",
            model=_model(translator),
            translations=[
                {"source": source, "best": list(map(vars, best))}
                for source, best in zip(sources, translations, strict=True)
            ],
        )
    else:
        # On a terminal, translate each line as it is typed.
        size = 1 if sys.stdin is not None and sys.stdin.isatty() else _LINES_PER_BATCH
        remaining = _sources(texts)
        while batch := list(islice(remaining, size)):
            for best in translator.translate(batch, **settings):
                echo(_lines(best, n_best))


def _sources(texts: tuple[str, ...]) -> Iterator[str]:
    """Yield the sentences of the command line, or the lines of standard input."""
    for text in texts or ("-",):
        if text != "-":
            yield inputs.check_utf8(text, "TEXT")
            continue
        number = 0
        try:
            for number, line in enumerate(inputs.standard_input(), 1):  # noqa: B007 for the message
                yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise FileError(f"standard input must be UTF-8; line {number} is not") from None


def _lines(best: list[Translation], n_best: int) -> list[str]:
    """Return one line for the best translation; for several, one line each, with scores."""
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
    from lmhead.train.sentence_pairs import read_pairs
    from lmhead.train.token_data import CorpusError

    if not installed():
        raise click.ClickException("BLEU needs sacreBLEU: pip install 'lmhead[eval]'")
    try:
        pairs = read_pairs([path], reverse=reverse)
    except CorpusError as error:
        raise FileError(str(error)) from None
    if not pairs:
        raise FileError(f"{path} holds no sentence pairs")
    if sys.stderr.isatty():
        click.echo(dim(f"Translating {len(pairs):,} sentences ..."), err=True)
    translations = translator.translate([pair.source for pair in pairs], **settings)
    texts = [best[0].text if best else "" for best in translations]
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
