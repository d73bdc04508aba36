"""The command line: `lmhead COMMAND`. One file per command, loaded when it is called."""

from importlib import import_module

import click

from lmhead import __version__

# Command name -> what `lmhead --help` says of it. `lmhead NAME` runs `lmhead.cli.NAME:command`.
_COMMANDS = {
    "demo": "Watch a hidden state become a word, step by step.",
    "doctor": "Versions, threads, instruction sets, compiled core or fallback.",
    "bench": "Speed, memory and errors, beside everything else a user could pick.",
}


class _LazyGroup(click.Group):
    """A group that imports a command only when it is run, so that `--help` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"lmhead.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lmhead")
def main() -> None:
    """The last step of a language model.

    Hidden state in; loss, log-probabilities and next token out, with no logits tensor in memory.
    """
