"""The command ``recipes``."""

from __future__ import annotations

import argparse

from fedssl import config
from fedssl.cli.arguments import Commands, complete_with
from fedssl.util.text import align_columns, name_measure, terminal_width


def add_recipes(commands: Commands) -> None:
    """Add ``fedssl recipes``."""
    recipes = commands.add_parser("recipes", help="list the recipes with their papers' numbers")
    pattern = recipes.add_argument(
        "pattern", nargs="?", metavar="PREFIX", help="a table, a folder, or a pattern such as a/*/b"
    )
    complete_with(pattern, "recipes")
    recipes.set_defaults(command=_recipes)


def _recipes(options: argparse.Namespace) -> int:
    print(format_recipes(options.pattern, terminal_width()))
    return 0


def format_recipes(pattern: str | None = None, width: int | None = None) -> str:
    """Format the recipes that match a pattern, or one line for each table without a pattern."""
    lines = [["recipe", "what it reproduces", "the paper's number"]]
    if pattern is not None:
        return align_columns([*lines, *map(describe_recipe, config.match_recipes(pattern))], width)
    tables = {}
    for name in config.list_recipes():
        table = config.find_table(name)
        tables[name if table is None else table.file] = table
    for name, table in tables.items():
        if table is None:
            lines.append(describe_recipe(name))
        else:
            count = f"{len(table.cells())} recipes: fedssl recipes {name}"
            lines.append([name, f"{table.title}: {table.about}", count])
    return align_columns(lines, width)


def describe_recipe(name: str) -> list[str]:
    """Return a recipe's name, its description, and the paper's numbers with their note."""
    tree = config.read_recipe(name)
    paper = tree.get("paper", {})
    numbers = ", ".join(f"{name_measure(k)} {v}" for k, v in paper.get("results", {}).items())
    note = str(paper.get("note", ""))
    about = str(paper.get("row") or tree.get("about", ""))
    return [name, about, f"{numbers} ({note})" if numbers and note else numbers or note]
