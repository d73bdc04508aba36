"""Threads, forks, spawned processes, signals: right answers or clear errors, as a table.

    python -m scripts.reliability.processes [--write]

Each scenario runs in a process of its own with a time limit, and prints "ok: ..." as its last
line. `tests/native/test_processes.py` runs them, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap

from scripts.reliability.record import RESULTS, keep

SECONDS = 240
ROOT = RESULTS.parents[1]

SETUP = """
import os, signal, sys, threading, time
import torch, lmhead

torch.set_num_threads(1)
torch.manual_seed(0)
HIDDEN, TARGETS = torch.randn(64, 32), torch.randint(500, (64,))
HEAD = lmhead.LMHead(32, 500, bias=True).requires_grad_(False)
SCREENED = lmhead.ScreenedHead(HEAD)
SAMPLER = lmhead.Sampler(top_p=0.9, seed=list(range(64)))

def answers(rows=slice(None)):
    h, y = HIDDEN[rows], TARGETS[rows]
    found = lmhead.query(h, HEAD.weight, bias=HEAD.bias, log_prob=y, rank=y, entropy=True, top_k=3)
    leaf = h.clone().requires_grad_()
    lmhead.linear_cross_entropy(leaf, HEAD.weight, y, bias=HEAD.bias, reduction="sum").backward()
    sampler = lmhead.Sampler(top_p=0.9, seed=list(range(len(h))))
    return [
        HEAD(h).argmax(-1), found.rank, found.top_k.indices, SCREENED.argmax(h).token,
        sampler(HEAD(h)).token, found.log_prob, found.entropy, leaf.grad,
    ]

def same(mine, theirs):
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(mine, theirs, strict=True)
    )
"""

SCENARIOS: dict[str, str] = {
    "8 Python threads, one head, mixed questions": """
        torch.set_num_threads(2)
        want = [answers(slice(8 * i, 8 * i + 8)) for i in range(8)]
        wrong = []
        def work(i):
            for _ in range(6):
                if not same(answers(slice(8 * i, 8 * i + 8)), want[i]):
                    wrong.append(i)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not wrong, wrong
        print("ok: 48 rounds of 8 questions agree")
    """,
    "fork before use": """
        torch.set_num_threads(2)
        pid = os.fork()
        got = answers()
        if pid == 0:
            os._exit(0 if len(got) == 8 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print("ok: parent and child answer")
    """,
    "fork after use": """
        torch.set_num_threads(2)
        want = answers()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if same(answers(), want) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert same(answers(), want)
        print("ok: the same answers in the child")
    """,
    "multiprocessing, spawn": """
        import multiprocessing
        from scripts.reliability.processes import spawned
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            found = pool.map(spawned, [1, 1, 2])
        assert found[0] == found[1] != found[2], found
        print("ok: equal seeds, equal answers")
    """,
    "DataLoader workers": """
        class Questions(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                return torch.cat([a.double().reshape(-1) for a in answers(slice(8 * i, 8 * i + 8))])
        want = answers(slice(0, 8))
        loaded = list(torch.utils.data.DataLoader(Questions(), num_workers=2, batch_size=None))
        mine = [Questions()[i] for i in range(8)]
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(loaded, mine))
        print("ok: 8 items from 2 workers")
    """,
    "sub-interpreter": """
        import subprocess
        code = (
            "import _xxsubinterpreters as i; "
            "i.run_string(i.create(), 'import lmhead; lmhead.LMHead(4, 9)')"
        )
        made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        error = made.stderr.strip().splitlines()[-1] if made.stderr.strip() else ""
        assert made.returncode == 1, made.returncode
        assert "lmhead cannot be imported in a sub-interpreter" in error, error
        print("ok: refused with an ImportError")
    """,
    "Ctrl-C in a sweep": """
        hidden, weight = torch.randn(4096, 256), torch.randn(50_000, 256)
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        try:
            for _ in range(1000):
                lmhead.query(hidden, weight, entropy=True, top_k=3)
            raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            late = time.monotonic() - begin - 1.0
        assert late < 120, late
        got = answers()
        assert same(got, answers())
        print("ok: KeyboardInterrupt, answers right afterwards")
    """,
    "1024 threads": """
        want = answers()
        torch.set_num_threads(1024)
        assert same(answers(), want)
        print("ok: the same answers")
    """,
    "number of threads changed between calls": """
        want = answers()
        for n in (1, 2, 3, 8, 1, 4):
            torch.set_num_threads(n)
            assert same(answers(), want), n
        print("ok: 1, 2, 3, 8, 1, 4 threads")
    """,
    "nested: a backward pass inside a thread pool inside a hook": """
        from concurrent.futures import ThreadPoolExecutor
        torch.set_num_threads(2)
        want = answers()
        found = []
        leaf = torch.randn(4, requires_grad=True)
        def hook(grad):
            with ThreadPoolExecutor(2) as pool:
                found.extend(pool.map(lambda _: answers(), range(2)))
            return grad
        leaf.register_hook(hook)
        (leaf * 2).sum().backward()
        assert len(found) == 2 and all(same(f, want) for f in found)
        print("ok: both agree")
    """,
}


def spawned(seed: int) -> list[int]:
    """Return the tokens of a small head, in a process that was spawned."""
    import torch

    import lmhead

    torch.manual_seed(seed)
    tokens: list[int] = lmhead.LMHead(8, 50)(torch.randn(5, 8)).argmax(-1).tolist()
    return tokens


def run(name: str, python: str = sys.executable) -> str:
    """Return the last line of a scenario; "failed: ..." where it failed."""
    code = SETUP + textwrap.dedent(SCENARIOS[name])
    if "spawn" in name:  # the children import the main module
        body = textwrap.indent(textwrap.dedent(SCENARIOS[name]), "    ")
        code = SETUP + "if __name__ == '__main__':\n" + body
    try:
        done = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"failed: no end within {SECONDS} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("ok"):
        return lines[-1]
    errors = done.stderr.strip().splitlines()
    return f"failed: exit code {done.returncode}, {errors[-1] if errors else 'no message'}"


def main() -> int:
    """Return 1 if a scenario failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    results = {name: run(name) for name in SCENARIOS}
    keep("processes", {"scenarios": results}, write=options.write)
    return int(any(not line.startswith("ok") for line in results.values()))


if __name__ == "__main__":
    sys.exit(main())
