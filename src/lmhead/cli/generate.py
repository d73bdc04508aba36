"""`lmhead generate`: go on from a prompt, token by token as they come."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._frame import SectionedCommand
from lmhead.cli._model import model_json, model_options, open_model
from lmhead.cli._prompt import Prompt, asked_for, from_chat
from lmhead.cli._sampler import given_options, make_sampler, sampler_options, with_ends
from lmhead.cli._terminal import Progress, clip, cyan, dim, echo, left, printable
from lmhead.cli._tokens import harmless, shown

if TYPE_CHECKING:
    from lmhead.analysis import ScreenedSampler
    from lmhead.models import LanguageModel
    from lmhead.sampling import Generation, Sampler, TokenEvent


@click.command("generate", cls=SectionedCommand)
@click.argument("arguments", nargs=-1, metavar="[MODEL] PROMPT")
@click.option("-p", "--prompt", "more", multiple=True, help="One more prompt; may repeat.")
@click.option("--chat", help="Let the model answer this message, in place of PROMPT.")
@click.option("--system", help="With --chat: who the model is to be.")
@click.option(
    "-n", "--max-new-tokens", type=click.IntRange(0), default=64, show_default=True, help="At most."
)
@click.option("--stop", multiple=True, help="Stop before this text; may repeat.")
@click.option(
    "--logprobs", type=click.IntRange(0), default=0, help="Show the k best words of each."
)
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@click.option("--screen", is_flag=True, help="Certified decode: same tokens, fewer bytes read.")
@click.option("--beams", type=click.IntRange(1, 256), help="Beam search, in place of a sampler.")
@click.option("--length-penalty", type=float, default=1.0, show_default=True, help="Of beams.")
@click.option("--num-return", type=click.IntRange(1), default=1, help="Beams to show.")
@model_options
@_json.json_option
@sampler_options
def command(arguments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Go on from a prompt.

    Without sampler options the most probable word is taken every time; with any of them words are
    drawn (--do-sample or --seed is enough). One text is shown as it comes, several when all are
    done.

    PROMPT is a text, or - for standard input. With --chat there is none: the message is put as the
    model's own chat template has it, and only the answer is shown.

    \b
    Examples:
      lmhead generate "Once upon a time"
      lmhead generate smollm2 "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
      lmhead generate smollm2 "The capital of France is" --screen -n 40
      lmhead generate "One, two," -p "A, b," --stop "." --json
      lmhead generate smollm2 --chat "What is the capital of France?"
      lmhead generate ./model "It was" --logprobs 3
      lmhead generate ./model "It was" --beams 4 --num-return 2
    """
    where, asked = asked_for(arguments, options)
    given = given_options(options)
    _check(options, given)
    if given:
        make_sampler(given)
    model = open_model(where, download=options["download"], threads=options["threads"])
    words = model.head.vocab_size
    if options["logprobs"] > words:
        raise click.UsageError(
            f"--logprobs must be at most {words}, the words of {model.name}; "
            f"got {options['logprobs']}."
        )
    if given and not options["beams"] and given.get("seed") is None:
        import torch

        given["seed"] = int(torch.randint(2**31, ()))
    sampler = with_ends(given, model) if given else None
    prompts = (
        [Prompt(text) for text in asked] if isinstance(asked, list) else [from_chat(model, asked)]
    )
    if options["beams"]:
        _beams(model, prompts, sampler, as_json, options)
        return
    _Run(model, prompts, sampler, as_json, options).go()


def _check(options: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse what does not go together."""
    if options["beams"]:
        for name in ("screen", "stop", "logprobs"):
            if options[name]:
                raise click.UsageError(f"--beams and --{name} do not go together.")
        if options["num_return"] > options["beams"]:
            raise click.UsageError("--num-return must be at most --beams.")
    elif options["num_return"] > 1:
        raise click.UsageError("--num-return needs --beams.")
    if any(stop == "" for stop in options["stop"]):
        raise click.UsageError("--stop must not be empty.")
    for name, asked in (("logprobs", options["logprobs"]), ("mirostat", given.get("mirostat"))):
        if options["screen"] and asked:
            raise click.UsageError(f"--screen and --{name} do not go together: it takes all words.")


class _Run:
    """A generation: what is shown while it comes, and what at the end."""

    def __init__(
        self,
        model: LanguageModel,
        prompts: list[Prompt],
        sampler: Sampler | None,
        as_json: bool,
        options: dict[str, Any],
    ) -> None:
        self.model, self.prompts, self.sampler = model, prompts, sampler
        self.as_json, self.options = as_json, options
        self.live = not as_json and len(prompts) == 1 and not options["logprobs"]
        self.previous = [0] * len(prompts)

    def go(self) -> None:
        """Generate, show, and leave with 130 if it was interrupted."""
        from lmhead.sampling import generate

        chooser, screened = self._chooser()
        if self.live:
            _write(self.prompts[0].shown, bold=True)
        made = generate(
            self.model,
            [prompt.to_read for prompt in self.prompts],
            chooser,
            max_new_tokens=self.options["max_new_tokens"],
            stop=list(self.options["stop"]) or None,
            logprobs=self.options["logprobs"],
            eos_token_ids=() if self.options["ignore_eos"] else None,
            stream=self._event if self.live else None,
        )
        if self.as_json:
            self._json(made, screened)
        elif self.live:
            click.echo()
        else:
            self._texts(made)
        if screened is not None and not self.as_json:
            _report(screened)
        if any(one.finish_reason == "interrupted" for one in made):
            raise click.Abort

    def _chooser(self) -> tuple[Any, ScreenedSampler | None]:
        if not self.options["screen"]:
            return self.sampler, None
        from lmhead.analysis import ScreenedSampler
        from lmhead.screen import ScreenedHead

        with Progress() as progress:
            progress("Making the quantized copy of the head ...")
            screened = ScreenedSampler(ScreenedHead(self.model.head), self.sampler)
        return screened, screened

    def _event(self, event: TokenEvent) -> None:
        _write(event.text)

    def _texts(self, made: Sequence[Generation]) -> None:
        for prompt, one in zip(self.prompts, made, strict=True):
            if len(made) > 1:
                click.echo()
            _write(prompt.shown, bold=True)
            _write(one.text)
            click.echo()
            if self.options["logprobs"]:
                echo(self._table(one))

    def _table(self, one: Generation) -> list[str]:
        lines = ["", dim(f"  {left('token', 16)}     p  best words")]
        before = one.prompt_ids[-1]
        for event in one.events:
            best = [f"{self._word(id, before)} {_p(log_p)}" for id, log_p in event.top]
            word = cyan(left(clip(self._word(event.token, before), 15), 16))
            lines.append(f"  {word}{_p(event.log_prob):>6}  {'  '.join(best)}")
            before = event.token
        return lines

    def _word(self, id: int, before: int) -> str:
        from lmhead.analysis.tokens import piece_of

        return shown(piece_of(self.model, id, before))

    def _json(self, made: Sequence[Generation], screened: ScreenedSampler | None) -> None:
        document: dict[str, Any] = {
            "model": model_json(self.model),
            "sampler": None if self.sampler is None else repr(self.sampler),
            "seed": None if self.sampler is None else self.sampler.seed,
            "screen": None if screened is None else screened.report.to_json(),
            "log_prob_error": 0.0 if screened is None else screened.widest,
        }
        rows = [self._row(p, one) for p, one in zip(self.prompts, made, strict=True)]
        _json.write("generate", lines=4, **document, generations=rows)

    def _row(self, prompt: Prompt, one: Generation) -> dict[str, Any]:
        from lmhead.analysis.tokens import finite, piece_of

        tokens, before = [], one.prompt_ids[-1]
        for event in one.events:
            entry = {
                **piece_of(self.model, event.token, before).to_json(),
                "log_prob": finite(event.log_prob),
                "sampler_log_prob": event.sampler_log_prob,
            }
            if self.options["logprobs"]:
                entry["top"] = [
                    {**piece_of(self.model, id, before).to_json(), "log_prob": finite(log_prob)}
                    for id, log_prob in event.top
                ]
            tokens.append(entry)
            before = event.token
        return {
            **prompt.to_json(),
            "text": one.text,
            "finish_reason": one.finish_reason,
            "stopped_by": one.stopped_by,
            "tokens": tokens,
        }


def _beams(
    model: LanguageModel,
    prompts: list[Prompt],
    sampler: Sampler | None,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    from lmhead.sampling import beam_search
    from lmhead.sampling.arguments import prompt_ids

    ids = [prompt_ids(prompt.to_read, model.tokenizer) for prompt in prompts]
    room = options["max_new_tokens"]
    if model.max_length is not None:
        room = min(room, model.max_length - max(map(len, ids)))
    with Progress() as progress:
        progress("Searching ...")
        found = beam_search(
            model,
            ids,
            num_beams=options["beams"],
            max_new_tokens=room,
            length_penalty=options["length_penalty"],
            num_return_sequences=options["num_return"],
            eos_token_id=[] if options["ignore_eos"] else None,
            processor=sampler,
        )
    rows: list[dict[str, Any]] = []
    for prompt, before, sequences, scores in zip(
        prompts, ids, found.sequences, found.scores, strict=True
    ):
        beams = [
            {"text": _text(model, before, ids_), "score": score, "ids": ids_}
            for ids_, score in zip(sequences, scores, strict=True)
        ]
        rows.append({**prompt.to_json(), "beams": beams})
    if as_json:
        _json.write("generate", lines=4, model=model_json(model), generations=rows)
        return
    for prompt, row in zip(prompts, rows, strict=True):
        for beam in row["beams"]:
            if options["num_return"] > 1 or len(rows) > 1:
                echo(dim(f"score {beam['score']:.4f}"))
            _write(prompt.shown, bold=True)
            _write(str(beam["text"]))
            click.echo()


def _text(model: LanguageModel, before: list[int], ids: list[int]) -> str:
    """The text of new ids behind a prompt."""
    from lmhead.analysis.tokens import piece_of

    pairs = zip([before[-1], *ids], ids, strict=False)
    return b"".join(piece_of(model, id, last).bytes for last, id in pairs).decode(
        "utf-8", "replace"
    )


def _write(text: str, *, bold: bool = False) -> None:
    """Text as it comes: exactly for a file or a pipe, harmless for a terminal."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if terminal:
        text = harmless(text)
        if bold and not os.environ.get("NO_COLOR"):
            text = click.style(text, bold=True)
    click.echo(printable(text), nl=False, color=True)  # True: nothing is taken out of the text


def _p(log_prob: float) -> str:
    import math

    return f"{math.exp(log_prob):.3f}"


def _report(screened: ScreenedSampler) -> None:
    r = screened.report
    click.echo(
        f"\nCertified decode: {r.choices} tokens from {r.bytes_read / 1e6:,.1f} MB in place of "
        f"{r.bytes_full / 1e6:,.1f} MB ({r.share_read:.1%}); {r.rows_rescored:.1f} words rescored "
        f"per token, {r.fell_back} times all of them.",
        err=True,
    )
