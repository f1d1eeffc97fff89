"""Commands beside training: ``partition``, ``theory`` and ``doctor``."""

from __future__ import annotations

import argparse
import sys

from fedssl import config
from fedssl.cli.arguments import Commands, add_words, load_torch, path, split_words
from fedssl.util.files import check_suffix


def add_partition(commands: Commands) -> None:
    """Add ``fedssl partition``."""
    partition = commands.add_parser("partition", help="show which client holds which images")
    add_words(partition)
    partition.add_argument(
        "--out",
        type=path,
        metavar="FILE.png",
        help="write a chart with a bar for each client and a color for each class",
    )
    partition.set_defaults(command=_partition)


def add_theory(commands: Commands) -> None:
    """Add ``fedssl theory``."""
    theory = commands.add_parser("theory", help="solve the linear model of the Dec-SSL paper")
    actions = theory.add_subparsers(title="actions", required=True, metavar="ACTION")
    shown = actions.add_parser(
        "representability", help="show the directions that each solution has (Figure 3)"
    )
    shown.add_argument("--d", type=int, default=256, help="dimension of the data")
    shown.add_argument("--k", type=int, default=3, help="number of sources")
    shown.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    shown.add_argument("--out", type=path, metavar="FILE.png", help="write a chart")
    shown.set_defaults(command=_representability)


def add_doctor(commands: Commands) -> None:
    """Add ``fedssl doctor``."""
    doctor = commands.add_parser("doctor", help="show what is installed here and what is missing")
    doctor.set_defaults(command=_doctor)


def _partition(options: argparse.Namespace) -> int:
    if options.out is not None:
        check_suffix(options.out, "--out", ".png")
    load_torch()
    from fedssl.data import charts
    from fedssl.data.client_table import format_table
    from fedssl.data.dirichlet import describe_imbalance
    from fedssl.data.heterogeneity import describe_clusters
    from fedssl.data.load import load_dataset
    from fedssl.data.partition import client_names
    from fedssl.runs.fit import fit_recipe
    from fedssl.runs.sources import find_sources
    from fedssl.runs.split import split_clients
    from fedssl.util.device import pick_device
    from fedssl.util.status import stage
    from fedssl.util.text import terminal_width

    recipe, words = split_words(options.words)
    settings = config.resolve(fit_recipe(config.read_recipe(recipe), words), words)
    with stage("loading the images"):
        dataset = load_dataset(settings.data, settings.split_seed)
        sources = find_sources(settings, dataset, pick_device(settings.device))
        groups = split_clients(settings, dataset, sources)
    labels = sources.labels.numpy()
    names = client_names(settings.partition, groups, dataset)
    width = terminal_width()
    print(format_table(groups, labels, sources.names, names, sources.kind, width))
    partition = settings.partition
    for note in (*describe_imbalance(partition, groups.sizes), *describe_clusters(partition)):
        print(f"fedssl: {note}", file=sys.stderr)
    if options.out is not None:
        charts.draw_partition(options.out, groups, labels, sources.names, names)
        print(f"\n{options.out}")
    return 0


def _representability(options: argparse.Namespace) -> int:
    from fedssl.contrib import theory

    if options.out is not None:
        check_suffix(options.out, "--out", ".png")
    table = theory.compare(options.d, options.k, options.seed)
    print(theory.format_table(table, options.d))
    if options.out is not None:
        theory.draw(options.out, table, options.d)
        print(f"\n{options.out}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fedssl.contrib import doctor
    from fedssl.util.status import stage_without_threads

    with stage_without_threads("looking at what is installed"):
        report = doctor.report()
    print(report)
    return 0
