"""Commands that show finished runs: ``report`` and ``compare``."""

from __future__ import annotations

import argparse

from fedssl.cli.arguments import Commands, load_torch, path

RUNS = "a run's folder, or the folder of a sweep or a table, for all its runs"


def add_report(commands: Commands) -> None:
    """Add ``fedssl report``."""
    report = commands.add_parser(
        "report", help="show runs on one page of HTML, which needs no network"
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    report.add_argument(
        "--out",
        type=path,
        metavar="FILE.html",
        help="default: report.html in the run, or above several",
    )
    report.set_defaults(command=_report)


def add_compare(commands: Commands) -> None:
    """Add ``fedssl compare``."""
    compare = commands.add_parser("compare", help="compare runs in a table")
    compare.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    compare.set_defaults(command=_compare)


def _report(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl import report

    print(report.write_page(options.runs, options.out))
    return 0


def _compare(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl.report import comparison
    from fedssl.util.text import terminal_width

    print(comparison.table(options.runs, terminal_width()))
    return 0
