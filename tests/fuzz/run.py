"""Open many damaged files in worker processes and summarise the outcomes.

python -m fuzz.run --cases 100000      (see `make fuzz`)
python -m fuzz.run --seed 1234         one case, with its files kept and its traceback
"""

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from preloaded_python import preloaded_python

from fuzz.corpus import SAMPLES, write_corpus
from fuzz.worker import SECONDS, choose, make_case, open_and_use

_WALL = 3 * SECONDS  # until a worker that does not answer is ended


class Worker:
    """A worker process, started again when it has crashed or hangs."""

    def __init__(self, corpus: Path, *, slow: bool) -> None:
        self.command = [
            preloaded_python(),
            "-m",
            "fuzz.worker",
            str(corpus),
            "slow" if slow else "fast",
        ]
        self.process: subprocess.Popen[str] | None = None

    def run(self, seed: int) -> dict[str, Any]:
        """Return the outcome of a seed."""
        process = self.process or self._start()
        assert process.stdin is not None
        process.stdin.write(f"{seed}\n")
        process.stdin.flush()
        line = self._answer(process, _WALL)
        if line:
            result: dict[str, Any] = json.loads(line)
            if result["outcome"].startswith("limit"):  # what it has allocated may not come back
                self.stop()
            return result
        ended = process.poll() is not None
        self.stop()
        outcome = f"crash: exit code {process.returncode}" if ended else "limit: no answer"
        return {"seed": seed, "sample": choose(seed)[0], "done": "", "outcome": outcome}

    def run_all(self, seeds: list[int]) -> list[dict[str, Any]]:
        """Return the outcomes of several seeds."""
        return [self.run(seed) for seed in seeds]

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        )
        line = self._answer(self.process, 300)
        if line != "ready\n":
            raise RuntimeError(f"the worker did not start; run {' '.join(self.command)}")
        return self.process

    @staticmethod
    def _answer(process: subprocess.Popen[str], seconds: float) -> str:
        """Return the next line; "" if there is none in time."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(seconds)
        line = process.stdout.readline() if ready else ""
        if not line and ready:
            process.wait()
        return line


def run_cases(seeds: list[int], *, workers: int, slow: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the outcome of every seed, in no particular order.

    Args:
        seeds: of the cases.
        workers: the number of processes.
        slow: whether there are samples that transformers opens among them.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder))
        pool = [Worker(Path(folder), slow=slow) for _ in range(workers)]
        try:
            with ThreadPoolExecutor(workers) as threads:
                for start in range(0, len(seeds), 100 * workers):
                    block = seeds[start : start + 100 * workers]
                    parts = [block[i::workers] for i in range(workers)]
                    for results in threads.map(Worker.run_all, pool, parts):
                        yield from results
        finally:
            for worker in pool:
                worker.stop()


def summary(results: list[dict[str, Any]]) -> str:
    """A table: sample, cases, opened, refused, raw exceptions, limits, crashes."""
    kinds = ("opened", "refused", "raw", "limit", "crash")
    counts = Counter((result["sample"], result["outcome"].split(":")[0]) for result in results)
    rows = [f"{'sample':18}{'cases':>8}" + "".join(f"{kind:>9}" for kind in kinds)]
    for name in [*SAMPLES, "all"]:
        names = list(SAMPLES) if name == "all" else [name]
        row = [sum(counts[result, kind] for result in names) for kind in kinds]
        rows.append(f"{name:18}{sum(row):8,}" + "".join(f"{n:9,}" for n in row))
    return "\n".join(rows)


def failures(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases that neither opened nor were refused."""
    return [result for result in results if result["outcome"] not in ("opened", "refused")]


def main() -> None:
    """Run the cases that the command line asks for; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, help="run this case alone, in this process")
    options = parser.parse_args()
    if options.seed is not None:
        folder = Path(tempfile.mkdtemp())
        write_corpus(folder / "corpus")
        name, done = make_case(options.seed, folder / "corpus", folder / "model")
        print(f"{name}: {done}; files in {folder / 'model'}")
        open_and_use(name, folder / "model" / SAMPLES[name].opens, chat=True)
        return
    started, results = time.time(), []
    seeds = list(range(options.first, options.first + options.cases))
    try:
        for result in run_cases(seeds, workers=options.workers):
            results.append(result)
            if result["outcome"] not in ("opened", "refused"):
                print("seed {seed}: {sample}, {done}: {outcome}".format(**result), flush=True)
            if len(results) % 5000 == 0:
                print(f"{len(results):,} cases, {time.time() - started:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("Interrupted.")
    print(summary(results))
    print(f"{time.time() - started:.0f} s, from seed {options.first}")
    sys.exit(bool(failures(results)) or len(results) < options.cases)


if __name__ == "__main__":
    main()
