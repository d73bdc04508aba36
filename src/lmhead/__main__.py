"""`python -m lmhead`, and what the command `lmhead` calls."""

from lmhead.interrupt import leaving_at_once


def main() -> None:
    """Run the command line."""
    with leaving_at_once():
        from lmhead.cli import main as command_line
    command_line(prog_name="lmhead")


if __name__ == "__main__":
    main()
