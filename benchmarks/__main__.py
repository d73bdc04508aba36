"""`python -m benchmarks NAME`."""

from benchmarks.commands import command

if __name__ == "__main__":
    command(prog_name="python -m benchmarks")
