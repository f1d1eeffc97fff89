"""The command that writes an app for real sites: ``deploy init``."""

from __future__ import annotations

import argparse

from fedssl.cli.arguments import Commands, add_words, complete_with, load_torch, path

EXAMPLES = """examples:
  fedssl deploy init app default engine.sites=3
  fedssl deploy init app mine.yaml engine.sites=5 privacy.secure=true

Then read app/SERVER.md, and send app/SITES.md to the sites.
"""


def add_deploy(commands: Commands) -> None:
    """Add ``fedssl deploy``."""
    deploy = commands.add_parser("deploy", help="run a recipe on real machines, through Flower")
    actions = deploy.add_subparsers(title="actions", required=True, metavar="ACTION")
    init = actions.add_parser(
        "init",
        help="write a Flower app, with instructions for the server and the sites",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    init.add_argument("folder", type=path, metavar="DIR", help="a new folder")
    recipe = init.add_argument("recipe", metavar="RECIPE", help="a recipe's name or file")
    complete_with(recipe, "recipes")
    add_words(init, "key=value", "keys to change", "keys")
    init.set_defaults(command=_deploy_init)


def _deploy_init(options: argparse.Namespace) -> int:
    load_torch()
    from fedssl.deploy.write import write_app
    from fedssl.util.status import stage

    with stage("checking the recipe"):
        write_app(options.folder, options.recipe, options.words)
    print(f"{options.folder}: written; read {options.folder / 'SERVER.md'} next")
    return 0
