"""A process that opens damaged files: seeds on standard input, one line of JSON for each.

It limits its own memory; a case that takes too long or too much is reported as a limit.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import torch

from fuzz.corpus import SAMPLES
from fuzz.mutations import mutate_folder
from lmhead.errors import ModelError
from lmhead.models import load_translator, open_model

SECONDS = 20  # of processor time for one case
MEGABYTES = 512  # that one case may take
_HEADROOM = 2 * 2**30  # of address space


class TimeLimitError(BaseException):
    """A case took too long."""


def _expired(_: int, __: FrameType | None) -> None:
    raise TimeLimitError


def open_and_use(name: str, path: Path, *, chat: bool = False) -> None:
    """Open a sample and process one token."""
    if name == "translator":
        translator = load_translator(path)
        try:
            translator.translate(["a"], num_beams=1, max_new_tokens=2)
        except ValueError as error:  # damaged weights may be NaN, which is no matter of the format
            if "finite" not in str(error):
                raise
        return
    model = open_model(path)
    with torch.no_grad():
        hidden, _ = model.hidden(torch.zeros(1, 1, dtype=torch.int64))
        model.head(hidden[:, -1]).argmax(-1)
    if model.tokenizer is not None:
        model.tokenizer.decode([0, 1, 2])
    if chat and model.chat is not None:
        try:
            model.chat.render([{"role": "user", "content": "a"}])
        except ValueError as error:
            if not (isinstance(error, ModelError) or "conversation" in str(error)):
                raise


def choose(seed: int) -> tuple[str, Random]:
    """The sample of a seed, and the numbers that damage it."""
    draw = Random(seed)
    names = list(SAMPLES)
    return draw.choices(names, [SAMPLES[name].share for name in names])[0], draw


def make_case(seed: int, corpus: Path, folder: Path) -> tuple[str, str]:
    """Copy the sample of a seed to a folder and damage it; return its name and what was done."""
    name, draw = choose(seed)
    shutil.copytree(corpus / name, folder)
    return name, mutate_folder(folder, draw)


def run_case(seed: int, corpus: Path) -> dict[str, Any]:
    """Open the damaged files of a seed; return the outcome."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["LMHEAD_CACHE"] = f"{scratch}/cache"
        name, done = make_case(seed, corpus, Path(scratch) / "model")
        before, started = _peak(), _cpu()
        outcome = "opened"
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            open_and_use(name, Path(scratch) / "model" / SAMPLES[name].opens, chat=seed % 100 == 0)
        except ModelError as error:
            outcome = "refused" if "\n" not in str(error) else f"raw: two lines: {error}"
        except TimeLimitError:
            outcome = "limit: time"
        except MemoryError:
            outcome = "limit: memory"
        except BaseException as error:
            outcome = f"raw: {type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if _peak() - before > MEGABYTES:
            outcome = f"limit: {_peak() - before} MB"
        if _cpu() - started > SECONDS:  # also where the signal's exception was caught
            outcome = "limit: time"
    return {"seed": seed, "sample": name, "done": done, "outcome": outcome}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Read seeds until the end of the input."""
    corpus, slow = Path(sys.argv[1]), sys.argv[2] == "slow"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, _expired)
    with tempfile.TemporaryDirectory() as cache:  # load all libraries before memory is limited
        os.environ["LMHEAD_CACHE"] = cache
        for name, sample in SAMPLES.items():
            if slow or not sample.slow:
                open_and_use(name, corpus / name / sample.opens)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _HEADROOM, size + _HEADROOM))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run_case(int(line), corpus)), flush=True)


if __name__ == "__main__":
    main()
