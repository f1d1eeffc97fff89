"""Write the Flower app of a recipe, with instructions for the server and the sites."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedssl import __version__
from fedssl import config as configuration
from fedssl.deploy.instructions import (
    fill_template,
    required_extras,
    write_server_instructions,
    write_site_instructions,
)
from fedssl.deploy.plugin_files import pack_plugins
from fedssl.deploy.recipe import adapt_recipe, check_recipe
from fedssl.runs.folder import PACKAGE
from fedssl.util.errors import UserError
from fedssl.util.files import make_folders, write_text


def write_app(folder: Path, recipe: str, words: Sequence[str]) -> None:
    """Write a complete Flower app of ``recipe`` into ``folder``, which must be new or empty."""
    folder = folder.expanduser().absolute()
    config = adapt_recipe(recipe, words)
    traffic = check_recipe(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder", fix="Name a new one.")
    shipped, plugin_texts = pack_plugins(config)
    extras = ",".join(required_extras(config))
    out = json.dumps(str(folder / "run"), ensure_ascii=False)
    client = {"about": "The client app: what a site runs.", "module": "site", "name": "client_app"}
    main = {"about": "The server app.", "module": "server", "name": "server_app"}
    texts = {
        **plugin_texts,
        "pyproject.toml": fill_template("pyproject.toml.in", extras=extras, out=out),
        "LICENSE": fill_template("LICENSE.in"),
        "SITES.md": write_site_instructions(config, recipe, traffic),
        "SERVER.md": write_server_instructions(config, folder),
        f"{PACKAGE}/__init__.py": f'"""Written by fedssl {__version__}: {recipe}."""\n',
        f"{PACKAGE}/client_app.py": fill_template("app.py.in", **client),
        f"{PACKAGE}/server_app.py": fill_template("app.py.in", **main),
        f"{PACKAGE}/recipe.yaml": configuration.dump(shipped),
    }
    try:
        for name, text in texts.items():
            path = folder / name
            make_folders(path.parent)
            write_text(path, text)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} cannot be written ({error.strerror})",
            fix="Name another folder.",
        ) from None
