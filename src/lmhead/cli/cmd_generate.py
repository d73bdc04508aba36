"""`lmhead generate`: generate text from a prompt, shown token by token."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli import _terminal as term
from lmhead.cli._command_group import SectionedCommand, as_usage_errors, integer_option
from lmhead.cli._model_arguments import model_json, model_options, open_model, read_text
from lmhead.cli._prompt_arguments import Prompt, chat_prompt, parse_prompts
from lmhead.cli._sampler_arguments import (
    given_sampler_options,
    make_sampler,
    sampler_for_model,
    sampler_options,
)
from lmhead.progress import Progress
from lmhead.sampler_options import Options

if TYPE_CHECKING:
    from lmhead.models import LanguageModel
    from lmhead.sampling import Generation, Sampler, TokenEvent
    from lmhead.sampling.grammar import Grammar
    from lmhead.screen import ScreenedHead

# Options that change which tokens are drawn, not which sequence is the most probable.
_SAMPLING_ONLY = [f.name for f in fields(Options) if f.name.startswith(("dynatemp", "mirostat"))]
_SAMPLING_ONLY += ["do_sample", "temperature", "xtc_probability", "xtc_threshold", "seed"]


@click.command("generate", cls=SectionedCommand)
@click.argument("arguments", nargs=-1, metavar="[MODEL] PROMPT")
@click.option("-p", "--prompt", "more", multiple=True, help="Another prompt; may be repeated.")
@click.option(
    "--chat", help="Answer this message, with the model's chat template, instead of PROMPT."
)
@click.option("--system", help="With --chat: system prompt.")
@integer_option("-n", "--max-new-tokens", default=64, low=0, help="Maximum number of new tokens.")
@click.option("--stop", multiple=True, help="Stop before this text; may be repeated.")
@click.option(
    "--logprobs", type=click.IntRange(0), default=0, help="Show the k best tokens at each position."
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at end-of-text tokens.")
@click.option(
    "--json-schema", help="Generate JSON that matches this schema: its text, or the name of a file."
)
@click.option("--regex", help="Generate text that matches this regular expression as a whole.")
@click.option("--screen", is_flag=True, help="Certified decode: same tokens, fewer bytes read.")
@click.option(
    "--beams",
    type=click.IntRange(1, 256),
    help="Number of beams; beam search instead of a sampler.",
)
@click.option(
    "--length-penalty",
    type=float,
    default=1.0,
    show_default=True,
    help="With --beams: above 1 favours long texts, below 1 short ones.",
)
@click.option(
    "--num-return", type=click.IntRange(1), default=1, help="With --beams: number of texts to show."
)
@model_options
@_json.json_option
@sampler_options
def command(arguments: tuple[str, ...], **options: Any) -> None:
    """Generate text from a prompt.

    Without sampler options decoding is greedy; with any of them tokens are sampled (--do-sample or
    --seed is enough). A single text is shown as it is generated, several when all are done.

    PROMPT is a text, or - for standard input. With --chat there is none: the message is rendered
    with the model's chat template, and only the answer is shown.

    \b
    Examples:
      lmhead generate "Once upon a time"
      lmhead generate smollm2 "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 1
      lmhead generate smollm2 "The capital of France is" --screen -n 40
      lmhead generate "One, two," -p "A, b," --stop "." --json
      lmhead generate smollm2 --chat "What is the capital of France?"
      lmhead generate smollm2 --chat "Invent a person." --json-schema person.json
      lmhead generate smollm2 "My phone number is " --regex "[0-9]{3}-[0-9]{4}"
      lmhead generate ./model "It was" --logprobs 3
      lmhead generate ./model "It was" --beams 4 --num-return 2
    """
    where, inputs = parse_prompts(arguments, options)
    given = given_sampler_options(options)
    _check(options, given)
    if given:
        make_sampler(given)
    options["grammar"] = _grammar(options)
    model = open_model(where)
    vocab = model.head.vocab_size
    if options["logprobs"] > vocab:
        raise click.UsageError(
            f"--logprobs must be at most {vocab}, the vocabulary size; got {options['logprobs']}."
        )
    if given and not options["beams"] and given.get("seed") is None:
        import torch

        given["seed"] = int(torch.randint(2**31, ()))
    sampler = sampler_for_model(given, model) if given else None
    if isinstance(inputs, tuple):
        prompts = [chat_prompt(model, inputs)]
    else:
        prompts = [Prompt(text) for text in inputs]
    if options["beams"]:
        _beams(model, prompts, sampler, options)
        return
    _Run(model, prompts, sampler, options).go()


def _grammar(options: dict[str, Any]) -> Grammar | None:
    """Return the grammar that the text must match; None for any text."""
    schema, regex = options["json_schema"], options["regex"]
    if schema is None and regex is None:
        return None
    if schema is not None and regex is not None:
        raise click.UsageError("--json-schema and --regex cannot be combined.")
    from lmhead.sampling.grammar import Grammar

    try:
        with as_usage_errors():
            if schema is None:
                return Grammar.regex(regex)
            if not schema.lstrip().startswith(("{", "true", "false")):
                schema = "".join(read_text(schema))
            return Grammar.json_schema(schema)
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from None


def _check(options: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse options that cannot be combined."""
    if options["beams"]:
        for name in ("screen", "stop", "logprobs", "json_schema", "regex"):
            if options[name]:
                option = name.replace("_", "-")
                raise click.UsageError(f"--beams and --{option} cannot be combined.")
        for name in _SAMPLING_ONLY:
            if name in given and given[name] is not False:
                option = name.replace("_", "-")
                raise click.UsageError(
                    f"--beams and --{option} cannot be combined: beam search does not sample."
                )
        if options["num_return"] > options["beams"]:
            raise click.UsageError("--num-return must be at most --beams.")
    elif options["num_return"] > 1:
        raise click.UsageError("--num-return needs --beams.")
    if any(stop == "" for stop in options["stop"]):
        raise click.UsageError("--stop must not be empty.")
    for name, value in (("logprobs", options["logprobs"]), ("mirostat", given.get("mirostat"))):
        if options["screen"] and value:
            raise click.UsageError(
                f"--screen and --{name} cannot be combined: --{name} needs all logits."
            )


@dataclass(frozen=True)
class _Run:
    """A generation and its output, during and after."""

    model: LanguageModel
    prompts: list[Prompt]
    sampler: Sampler | None
    options: dict[str, Any]

    def go(self) -> None:
        """Generate and print; exit with code 130 if interrupted."""
        from lmhead.sampling import generate

        chooser, screened = self._chooser()
        as_json = self.options["as_json"]
        # Whether tokens are shown as they come.
        live = not as_json and len(self.prompts) == 1 and not self.options["logprobs"]
        if live:
            _write(self.prompts[0].shown, bold=True)
        generations = generate(
            self.model,
            [prompt.input for prompt in self.prompts],
            chooser,
            max_new_tokens=self.options["max_new_tokens"],
            stop=list(self.options["stop"]) or None,
            logprobs=self.options["logprobs"],
            eos_token_ids=() if self.options["ignore_eos"] else None,
            grammar=self.options["grammar"],
            stream=self._event if live else None,
        )
        if as_json:
            self._json(generations, screened)
        elif live:
            click.echo()
        else:
            self._texts(generations)
        if screened is not None and not as_json:
            _report(screened)
        if self.model.engine == "llama.cpp" and not as_json:
            click.echo("\nEngine: llama.cpp, in its own precision.", err=True)
        if any(generation.finish_reason == "interrupted" for generation in generations):
            raise click.Abort

    def _chooser(self) -> tuple[Any, ScreenedHead | None]:
        if not self.options["screen"]:
            return self.sampler, None
        from lmhead.sampling import Sampler

        sampler = Sampler(do_sample=False) if self.sampler is None else self.sampler
        with Progress() as progress:
            progress("Making the quantized copy of the head ...")
            screened = self.model.head.screen(cache=True)
        return sampler, screened

    def _event(self, event: TokenEvent) -> None:
        _write(event.text)

    def _texts(self, generations: Sequence[Generation]) -> None:
        for prompt, generation in zip(self.prompts, generations, strict=True):
            if len(generations) > 1:
                click.echo()
            _write(prompt.shown, bold=True)
            _write(generation.text)
            click.echo()
            if self.options["logprobs"]:
                term.echo(self._table(generation))

    def _table(self, generation: Generation) -> list[str]:
        lines = ["", term.dim(f"  {term.left('token', 16)}     p  best tokens")]
        before = generation.prompt_ids[-1]
        for event in generation.events:
            best = [f"{self._label(id, before)} {_p(log_p)}" for id, log_p in event.top]
            label = term.cyan(term.left(term.clip(self._label(event.token, before), 15), 16))
            lines.append(f"  {label}{_p(event.log_prob):>6}  {'  '.join(best)}")
            before = event.token
        return lines

    def _label(self, id: int, before: int) -> str:
        from lmhead.analysis.token_text import piece_of

        return term.token_label(piece_of(self.model, id, before))

    def _json(self, generations: Sequence[Generation], screened: ScreenedHead | None) -> None:
        sampler = self.sampler
        _json.write(
            "generate",
            lines=4,
            model=model_json(self.model),
            sampler=None if sampler is None else repr(sampler),
            seed=None if sampler is None else sampler.seed,
            screen=None if screened is None else screened.report.to_json(),
            log_prob_error=max((each.log_prob_error for each in generations), default=0.0),
            generations=list(map(self._row, self.prompts, generations)),
        )

    def _row(self, prompt: Prompt, generation: Generation) -> dict[str, Any]:
        from lmhead.analysis.token_text import finite, piece_of

        tokens, before = [], generation.prompt_ids[-1]
        for event in generation.events:
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
            "text": generation.text,
            "finish_reason": generation.finish_reason,
            "stopped_by": generation.stopped_by,
            "tokens": tokens,
        }


def _beams(
    model: LanguageModel, prompts: list[Prompt], sampler: Sampler | None, options: dict[str, Any]
) -> None:
    from lmhead.analysis.token_text import text_of
    from lmhead.sampling import beam_search
    from lmhead.sampling.arguments import prompt_ids

    ids = [prompt_ids(prompt.input, model.tokenizer) for prompt in prompts]
    count = options["max_new_tokens"]
    if model.max_length is not None:
        count = min(count, model.max_length - max(map(len, ids)))
    with Progress() as progress:
        progress("Searching ...")
        result = beam_search(
            model,
            ids,
            num_beams=options["beams"],
            max_new_tokens=count,
            length_penalty=options["length_penalty"],
            num_return_sequences=options["num_return"],
            eos_token_id=[] if options["ignore_eos"] else None,
            processor=sampler,
        )
    rows: list[dict[str, Any]] = []
    for prompt, before, sequences, scores in zip(
        prompts, ids, result.sequences, result.scores, strict=True
    ):
        beams = [
            {"text": text_of(model, ids_, before[-1]), "score": score, "ids": ids_}
            for ids_, score in zip(sequences, scores, strict=True)
        ]
        rows.append({**prompt.to_json(), "beams": beams})
    if options["as_json"]:
        _json.write("generate", lines=4, model=model_json(model), generations=rows)
        return
    for prompt, row in zip(prompts, rows, strict=True):
        for beam in row["beams"]:
            if options["num_return"] > 1 or len(rows) > 1:
                term.echo(term.dim(f"score {beam['score']:.4f}"))
            _write(prompt.shown, bold=True)
            _write(str(beam["text"]))
            click.echo()


def _write(text: str, *, bold: bool = False) -> None:
    """Print text: unchanged to a file or a pipe, with control characters escaped to a terminal."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    if terminal:
        text = term.escape_controls(text)
        if bold and not os.environ.get("NO_COLOR"):
            text = click.style(text, bold=True)
    click.echo(term.printable(text), nl=False, color=True)  # True: click removes nothing


def _p(log_prob: float) -> str:
    return f"{math.exp(log_prob):.3f}"


def _report(screened: ScreenedHead) -> None:
    r = screened.report
    click.echo(
        f"\nCertified decode: {r.choices} tokens from {r.bytes_read / 1e6:,.1f} MB instead of "
        f"{r.bytes_full / 1e6:,.1f} MB ({r.share_read:.1%}); {r.rows_rescored:.1f} rows rescored "
        f"per token, {r.fell_back} full sweeps.",
        err=True,
    )
