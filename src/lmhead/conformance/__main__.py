"""Run the conformance cases on an implementation: a table or JSON; exit code 1 on a failure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from lmhead.conformance import CASES, Implementation, Result, named, run_cases
from lmhead.conformance.implementations import KNOWN


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if no case failed, 1 if one did, 2 for wrong usage or a missing implementation."""
    parser = argparse.ArgumentParser(prog="python -m lmhead.conformance", description=__doc__)
    parser.add_argument(
        "--implementation",
        action="append",
        metavar="NAME",
        help=f"{', '.join(KNOWN)}, or module:name of an Implementation or of a loss function; "
        "may be repeated (default: lmhead)",
    )
    parser.add_argument("--kind", choices=["loss", "sampler", "decode"], help="only these cases")
    parser.add_argument("--case", action="append", metavar="NAME", help="only this case")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    options = parser.parse_args(arguments)
    unknown = set(options.case or ()) - set(CASES)
    if unknown:
        parser.error(f"--case must be one of --list; got {', '.join(sorted(unknown))}")
    chosen = [
        case
        for case in CASES.values()
        if options.kind in (None, case.kind) and (not options.case or case.name in options.case)
    ]
    if options.list:
        for case in chosen:
            print(f"{case.kind:8} {case.name:44} {case.origin:40} {case.summary}")
        return 0
    try:
        implementations = [named(name) for name in options.implementation or ["lmhead"]]
    except (ValueError, ImportError, AttributeError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    torch.manual_seed(0)
    results = [run_cases(each, chosen) for each in implementations]
    print(_json(implementations, results) if options.json else _table(implementations, results))
    return int(any(r.status == "failed" for column in results for r in column))


def _json(implementations: list[Implementation], results: list[list[Result]]) -> str:
    return json.dumps(
        [
            {
                "implementation": each.name,
                "version": each.version,
                "torch": torch.__version__,
                **_counts(column),
                "cases": [
                    {
                        "name": r.case.name,
                        "kind": r.case.kind,
                        "origin": r.case.origin,
                        "summary": r.case.summary,
                        "status": r.status,
                        "detail": r.detail,
                    }
                    for r in column
                ],
            }
            for each, column in zip(implementations, results, strict=True)
        ],
        indent=1,
    )


def _table(implementations: list[Implementation], results: list[list[Result]]) -> str:
    """Return one line per case, one column per implementation, and the failures below."""
    shown = {"passed": "pass", "failed": "FAIL", "unsupported": "-"}
    width = max(12, *(len(each.name) for each in implementations))
    name = max(len(r.case.name) for r in results[0])
    origin = max(len(r.case.origin) for r in results[0])
    lines = [
        f"{'case':{name}}  {'from':{origin}}  "
        + "  ".join(f"{each.name:{width}}" for each in implementations)
    ]
    for row in zip(*results, strict=True):
        case = row[0].case
        lines.append(
            f"{case.name:{name}}  {case.origin:{origin}}  "
            + "  ".join(f"{shown[r.status]:{width}}" for r in row).rstrip()
        )
    for each, column in zip(implementations, results, strict=True):
        counts = ", ".join(f"{n} {status}" for status, n in _counts(column).items())
        lines += ["", f"{each.name} {each.version}: {counts}"]
        lines += [f"  {r.case.name}: {r.detail}" for r in column if r.status == "failed"]
    return "\n".join(line.rstrip() for line in lines)


def _counts(column: list[Result]) -> dict[str, int]:
    return {
        status: sum(r.status == status for r in column)
        for status in ("passed", "failed", "unsupported")
    }


if __name__ == "__main__":
    sys.exit(main())
