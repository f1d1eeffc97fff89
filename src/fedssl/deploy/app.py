"""``fedssl deploy init``: a Flower app of a recipe, with instructions for server and sites."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fedssl import __version__
from fedssl import config as configuration
from fedssl.config import Config, Privacy
from fedssl.util import plugins, tables
from fedssl.util.errors import UserError

if TYPE_CHECKING:
    from fedssl.data.dataset import Dataset
    from fedssl.deploy.rehearsal import Moved
    from fedssl.privacy import Replies

FLOWER = "1.41.0"  # the version that these commands were tried with
PACKAGE = "fedssl_app"
MANY = 1024  # images, of a site of which nothing is known
# A recipe's keys of simulations, where they are not what sites have anyway, and why they go.
SIMULATED = {
    "partition": (
        {"source": "labels", "fraction": 1.0, "level": "client"},
        "sites have their own data, which nobody divides or alters",
    ),
    "engine": ({"workers": 2, "compile": "auto"}, "it is for simulations"),
}
CONNECTION = "fedssl"  # the server's name in Flower's config.toml
QUIET = (
    "export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 \\\n"
    "    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"
)
SOON = "export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1  # a site looks for its own work more often"
APP = '''"""{about}"""

from pathlib import Path
from typing import Any

from fedssl.engines.flower.engine import {name}

app = {name}(Path(__file__).with_name("recipe.yaml"))
'''


def init(folder: Path, recipe: str, words: Sequence[str]) -> None:
    """Write a complete Flower app of ``recipe`` into ``folder``, which must be new or empty."""
    folder = folder.expanduser().absolute()
    config = settle(recipe, words)
    moved = _check(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; name a new one")
    shipped, own = ship(config)
    texts = {
        **own,
        "pyproject.toml": pyproject(folder, config),
        "LICENSE": _license(),
        "SITES.md": sites(config, recipe, moved),
        "SERVER.md": server(config, folder),
        f"{PACKAGE}/__init__.py": f'"""Written by fedssl {__version__}: {recipe}."""\n',
        f"{PACKAGE}/client_app.py": APP.format(about="What a site runs.", name="client_app"),
        f"{PACKAGE}/server_app.py": APP.format(about="What the server runs.", name="server_app"),
        f"{PACKAGE}/recipe.yaml": configuration.dump(shipped),
    }
    try:
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: cannot be written ({error.strerror}); name another folder"
        ) from None


def settle(recipe: str, words: Sequence[str]) -> Config:
    """The recipe as a deployment has it: each site is one client, and its data is its own."""
    for word in words:
        name, _, value = word.partition("=")
        if name in ("data.name", "partition.name") and value != "folder":
            raise UserError(
                f"{word}: each site is one client with a folder of images of its own; leave it out"
            )
        if name == "engine.name" and value != "flower":
            raise UserError(f"{word}: a deployment runs on Flower; leave it out")
    given = {word.partition("=")[0] for word in words}
    if "=" in recipe:
        raise UserError(f"{recipe}: expected a recipe's name before it, such as folder or default")
    fixed = ["data.name=folder", "partition.name=folder", "engine.name=flower"]
    # A recipe's own root is where one machine finds all clients; here it is the server's images.
    fixed += [] if "data.root" in given else ["data.root=null"]
    # Baselines would be trained at all sites, one after another.
    fixed += [] if "evaluate.baselines" in given else ["evaluate.baselines=[]"]
    config = configuration.resolve(_for_sites(recipe), [*words, *fixed])
    configuration.check_used(config)
    if config.engine.sites is None:
        raise UserError("engine.sites: say how many sites take part, as in engine.sites=3")
    data = config.data
    levels = tuple(level for level in data.levels or () if level != "client") or None
    root, cache = _absolute(data.root), _absolute(data.cache)
    own = dataclasses.replace(data, levels=levels, root=root, cache=cache)
    encoder = dataclasses.replace(config.encoder, init=_absolute(config.encoder.init))
    return dataclasses.replace(config, data=own, encoder=encoder)


def _for_sites(recipe: str) -> configuration.Tree:
    """A recipe without what it has for simulations alone; where that is something, it is said."""
    tree = configuration.read_recipe(recipe)
    for section, (plain, why) in SIMULATED.items():
        given = tree.get(section) or {}
        for key in (key for key, value in plain.items() if given.get(key, value) != value):
            said = f"{recipe}: {section}.{key}={given[key]} is left out: {why}"
            print(f"fedssl: {said}", file=sys.stderr)
        tree = {**tree, section: {k: v for k, v in given.items() if k not in plain}}
    return tree


def _absolute(path: str | None) -> str | None:
    """The server's program starts in another folder."""
    return None if path is None else str(Path(path).expanduser().absolute())


def ship(config: Config) -> tuple[Config, dict[str, str]]:
    """The user's own files as modules of the app, and the names they have so.

    The sites get them with the app; no path of this machine means anything there.
    """
    modules: dict[str, str] = {}

    def moved(name: str) -> str:
        if not plugins.is_file(name):
            return name
        path, _, own = name.rpartition(":")
        return f"{PACKAGE}.{modules.setdefault(path, f'own_{len(modules) + 1}')}:{own}"

    shipped = _renamed(config, moved)
    texts = {
        f"{PACKAGE}/{module}.py": Path(path).read_text(encoding="utf-8")
        for path, module in modules.items()
    }
    return shipped, texts


def keep(config: Config, out: Path) -> tuple[Config, dict[Path, str]]:
    """The app's modules of the user's own as files of the run's folder, and their names so.

    Only while Flower runs the app there are modules; the run is judged and reported on later.
    """
    texts: dict[Path, str] = {}

    def moved(name: str) -> str:
        module, _, own = name.rpartition(":")
        if not module.startswith(f"{PACKAGE}."):
            return name
        path = out.resolve() / f"{module.removeprefix(f'{PACKAGE}.')}.py"
        texts[path] = plugins.source(module)
        return f"{path}:{own}"

    return _renamed(config, moved), texts


def bring_back(out: Path, texts: Mapping[Path, str]) -> None:
    """What ``keep`` found as files, and their names in the configuration of a run that goes on.

    It may have been started elsewhere, or by a version that left them as modules of the app.
    """
    from fedssl.util.files import write_text

    for path, text in texts.items():
        write_text(path, text)
    known = out / "config.yaml"
    if texts and known.is_file():
        before = configuration.read_yaml(known)
        now = _renewed(before, out.resolve())
        if now != before:
            write_text(known, yaml.safe_dump(now, sort_keys=False, allow_unicode=True))


def _renewed(tree: Any, out: Path) -> Any:
    if isinstance(tree, dict):
        return {key: _renewed(value, out) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_renewed(value, out) for value in tree]
    named = rf"(?:.*/|{PACKAGE}\.)(own_\d+)(?:\.py)?:(.+)"
    found = re.fullmatch(named, tree) if isinstance(tree, str) else None
    return f"{out}/{found[1]}.py:{found[2]}" if found else tree


def _renamed(config: Config, moved: Callable[[str], str]) -> Config:
    """The same with other names of what may be the user's own."""
    sections: dict[str, Any] = {}
    for section in ("algorithm", "objective"):
        params = getattr(config, section)
        sections[section] = dataclasses.replace(params, name=moved(params.name))
    sections["evaluate"] = configuration.renamed(config.evaluate, moved)
    return dataclasses.replace(config, **sections)


def _check(config: Config) -> Moved | None:
    """Refuse now what would be refused when all sites are waiting; what a site moves in a round."""
    from fedssl import privacy
    from fedssl.evaluate import collaborations
    from fedssl.runs.session import cohort_size

    count, cohort = config.engine.sites, config.cohort
    assert count is not None
    if cohort.size is not None and cohort.size > count:
        raise UserError(
            f"cohort.size={cohort.size}: more than engine.sites={count}; add cohort.size={count}, "
            "or cohort.size=null for all of them"
        )
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    kind = configuration.variant("algorithm", config.algorithm.name)
    if kind.pools_data:
        raise UserError(
            f"algorithm.name={config.algorithm.name}: has all data in one place, so there is "
            "nothing to deploy; use another algorithm"
        )
    if not kind.has_global:
        raise UserError(
            f"algorithm.name={config.algorithm.name}: has no global model, so the server would end "
            "with nothing; use another algorithm"
        )
    if config.algorithm.norm_policy == "local":
        raise UserError(
            "algorithm.norm_policy=local: normalization layers never leave the sites, so the "
            "server's encoder would have untrained ones; use average or reset"
        )
    check_init(config)
    if config.data.root is None:
        check_public(config, None)
    if "per-client" in (*(config.evaluate.protocols or ()), *(config.evaluate.monitor or ())):
        raise UserError(
            "evaluate.protocols=per-client: the server has no client's test images; leave it out"
        )
    for words in collaborations(config.evaluate):
        raise UserError(f"{words}: the server has no client's images; leave it out")
    if config.evaluate.drift:
        raise UserError(
            "evaluate.drift=true: compares clients' models, and these never come to the server "
            "whole; leave it out"
        )
    privacy.average(config, kind(config.algorithm, objective), count, cohort_size(config, count))
    with plugins.blamed():
        return _rehearse(config, count)


def _rehearse(config: Config, count: int) -> Moved | None:
    """Build what the server will, as far as it is known here what images there will be."""
    import numpy as np

    from fedssl.data import datasets
    from fedssl.data.dataset import Groups
    from fedssl.deploy import rehearsal
    from fedssl.deploy.deployment import Introduction, nothing
    from fedssl.runs.session import assemble

    data, encoder, many = config.data, config.encoder, MANY
    if data.root is not None and Path(data.root).exists():
        dataset = datasets.load(data, config.seed)
        check_public(config, dataset)
    else:
        if data.root is not None:  # this machine may not be the server
            text = f"data.root={data.root}: no such folder here; the server needs it"
            print(f"fedssl: {text}", file=sys.stderr)
        if data.size is None or data.halves:
            return None
        # Of the channels that most images have; given weights may be for others.
        encoder = dataclasses.replace(encoder, init=None)
        classes = ("a", "b") if algorithm_of(config).objective.needs_labels else ()
        dataset = nothing(Introduction("0", "site", many, (3,), data.size, data.size, classes))
    groups = Groups(np.zeros(count * many, dtype=np.int64), np.arange(count + 1) * many)
    known = dataclasses.replace(config, encoder=encoder, device="cpu")
    bare = dataclasses.replace(known, encoder=dataclasses.replace(encoder, init=None))
    return rehearsal.site_bytes(
        assemble(known, dataset, groups), lambda: assemble(bare, dataset, groups, weights=False)
    )


def check_init(config: Config) -> None:
    """The server has the weights; what sites start from by themselves, they would lack."""
    init, algorithm = config.encoder.init, config.algorithm
    if init is None:
        return
    if not Path(init).exists():
        raise UserError(f"encoder.init={init}: no such file or folder; the server needs it here")
    for key, value in (("name", "ditto"), ("norm_policy", "reset")):
        if getattr(algorithm, key) == value:
            raise UserError(
                f"encoder.init={init} with algorithm.{key}={value}: sites start from the same "
                "weights by themselves, and do not have that file; leave it out"
            )


def check_public(config: Config, dataset: Dataset | None) -> None:
    """The server has the images that it is to show to the sites."""
    from fedssl.runs.session import public_images

    wanted = getattr(config.algorithm, "public", 0)
    held = 0 if dataset is None else len(public_images(config, dataset))
    if held < wanted:
        raise UserError(
            f"algorithm.public={wanted}: images of the server's own, which the sites get to see, "
            f"and it has {held}; name a folder with more in data.root, or set algorithm.align=0 "
            "and algorithm.public=0"
        )


def pyproject(folder: Path, config: Config) -> str:
    """What Flower reads: names, the two apps, and keys that ``--run-config`` may change."""
    return f"""[project]
name = "fedssl-app"
version = "1.0.0"
description = "Federated self-supervised learning, written by fedssl {__version__}"
license = {{ file = "LICENSE" }}
dependencies = ["fedssl[{extras(config)}]=={__version__}", "flwr>={FLOWER},<2"]

[tool.flwr.app]
publisher = "fedssl"
fab-format-version = 1
flwr-version-target = "{FLOWER}"
# What is sent to the sites; results stay at the server.
fab-include = ["LICENSE", "{PACKAGE}/*.py", "{PACKAGE}/recipe.yaml"]

[tool.flwr.app.components]
serverapp = "{PACKAGE}.server_app:app"
clientapp = "{PACKAGE}.client_app:app"

[tool.flwr.app.config]
out = {json.dumps(str(folder / "run"), ensure_ascii=False)}
resume = false
"""


def command(out: Path, key: str) -> str:
    """How the app is started whose run is in ``out``, with a ``--run-config``."""
    app = out.resolve().parent
    named = shlex.quote(str(app)) if (app / PACKAGE).is_dir() else "APP"
    return f"flwr run {named} {CONNECTION} --stream --run-config {shlex.quote(key)}"


def extras(config: Config) -> str:
    """What has to be installed with the package."""
    return "flower" if config.privacy.noise is None else "flower,privacy"


def _license() -> str:
    return (
        f"This folder was written by fedssl {__version__} (Apache License 2.0,\n"
        "https://www.apache.org/licenses/LICENSE-2.0). Flower asks for this file.\n"
    )


def exchanges(config: Config) -> str:
    """What leaves a site, as a list: from what the algorithm declares and ``privacy.*``."""
    kind, privacy = algorithm_of(config), config.privacy
    shown = "masked, so that the server learns only the sum over the sites"
    if not privacy.secure:
        shown = "the server computes the mean, and could see each site's own"
    if config.cohort.average != "mean":
        shown = f"the server sees each site's own, and takes the {config.cohort.average}"
    lines = [
        "- before training, and again whenever site or server come back: the version of fedssl, "
        "the folder's name, how many images there are, their size, and a random number to know "
        "this site by"
    ]
    if kind.objective.needs_labels:
        lines[0] += ", and the classes' names"
    for task in kind.asked(privacy.secure):
        clipped = _clipped(privacy, kind.bound(task))
        lines.append(f"- `{task}`, in a round: {about(kind, task)} ({shown}{clipped})")
    if privacy.secure:
        lines.append(
            "- for each of these sums, also: public keys, shares of the masks' secrets that only "
            "other sites can open, and what unmasks the sum"
        )
    for task in kind.gathers:
        lines.append(f"- `{task}`: {about(kind, task)} (the server sees each site's own)")
    lines.append(f"- with each reply, protected as it is: {_beside(privacy)}")
    if kind.logs and not privacy.secure and privacy.noise is None:
        for task in (task for task in kind.logs if task not in kind.simulated):
            lines.append(f"- `{task}`, for the log: {about(kind, task)} (single numbers)")
    if public := getattr(config.algorithm, "public", 0):
        lines.append(f"- (the other way: the site gets {public} public images in every round)")
    lines.append("- when something fails: one line that says what, and names no file of the site")
    return "\n".join(lines)


def _clipped(privacy: Privacy, bound: float | None) -> str:
    if privacy.noise is None:
        return ""
    norm = privacy.clip if bound is None else bound
    return f"; clipped at the site to norm {norm:.3g}, and the server adds noise to the sum"


def _beside(privacy: Privacy) -> str:
    """What goes with every reply."""
    if privacy.noise is not None:
        return f"its weight in the mean (the images it is made of, {privacy.most_samples} at most)"
    return "its weight in the mean (the images it is made of, or 1), and with a change the loss"


def about(kind: object, task: str) -> str:
    """The first sentence that the algorithm says of a task."""
    text = (getattr(kind, task, None).__doc__ or task).strip().splitlines()[0]
    return text.rstrip(".")


def algorithm_of(config: Config) -> Any:
    """The algorithm as configured: what it asks for depends on its keys."""
    objective = configuration.variant("objective", config.objective.name)(config.objective)
    return configuration.variant("algorithm", config.algorithm.name)(config.algorithm, objective)


def _hidden(config: Config) -> str:
    """What InstaHide is, where there is a choice of it."""
    mix = getattr(config.algorithm, "mix", None)
    if mix is None:
        return " The images are taken as they are."
    if mix == 1:
        return " The images are taken as they are (`algorithm.share_plain=true`)."
    return (
        f"\nBefore, each image is mixed with {mix - 1} others and signs are flipped (InstaHide), "
        "**which is no proof of privacy**:\npublished attacks recover images from mixtures."
    )


def protection(config: Config) -> str:
    """How what is sent is protected, and what that does not cover."""
    from fedssl import privacy as hiding

    privacy, kind = config.privacy, algorithm_of(config)
    lines = []
    if privacy.secure:
        lines.append(
            "Secure sums are on (`privacy.secure`): what a site sends is masked with keys that the "
            "sites agree on,\nand the server can only unmask the sum, if at least "
            f"{_answering(config)} answer."
        )
    elif config.cohort.average != "mean":
        lines.append(
            f"Secure sums are not possible with `cohort.average={config.cohort.average}`: **the "
            "server has to look at what each\nsite sends**. Updates and moments of a model are not "
            "images, but they can tell things about them."
        )
    elif set(kind.gathers) & set(kind.varying):
        lines.append(
            f"Secure sums are not possible with `{plugins.label(config.algorithm.name)}`: **the "
            "server sees what stands above for each site by itself, one\nrow for an image, and "
            "passes it on to all sites**. It keeps the last of each site, also in the run's "
            "folder.\nFeatures are not images, but they can tell much about them." + _hidden(config)
        )
    elif kind.gathers:
        lines.append(
            f"Secure sums are not possible with `{plugins.label(config.algorithm.name)}`: **the "
            f"server sees each site's own reply to {', '.join(kind.gathers)}**. Models are not "
            "images, but they can tell\nthings about them."
        )
    else:
        switch = "`privacy.secure=true` turns them on"
        if hiding.in_sums(config, kind, config.engine.sites) is None:
            switch = "and not possible with these settings"
        lines.append(
            f"Secure sums are off ({switch}): whoever runs the server can look at what\n"
            "each site sends. Updates and moments of a model are not images, but they can tell "
            "things about them."
        )
    if privacy.noise is not None:
        lines.append(
            f"Differential privacy is on (`privacy.noise={privacy.noise:g}`): ε for "
            f"δ = {privacy.delta:g} is written to the run's summary.\nThe server adds the noise: "
            "it protects from those who see the model, not from the server."
        )
    else:
        lines.append("Differential privacy is off (`privacy.noise`).")
    return "\n\n".join(lines)


def _answering(config: Config) -> str:
    """How many must come through a secure sum: as a number where that of the sites is known."""
    from fedssl.engines.remote.site import survivors_needed
    from fedssl.runs.session import cohort_size

    if config.engine.sites is None:
        return f"{config.privacy.threshold:.0%} of a round's clients, and three,"
    size = cohort_size(config, config.engine.sites)
    return f"{survivors_needed(config.privacy.threshold, size)} of a round's {size} sites"


def _amount(config: Config, moved: Moved | None) -> str:
    """How many bytes a site sends and receives."""
    if moved is None:
        return "**How much** a round moves is not known beforehand; `sent.jsonl` (below) has it."
    kind, rounds = algorithm_of(config), config.rounds
    up, down = sum(moved.up.values()), sum(moved.down.values())
    about = "at most" if set(kind.gathers) & set(kind.varying) else "about"
    first = f", and {_parts(moved.first)} more in the run's first round" if moved.first else ""
    drawn = " (sites are drawn at random)" * (_round_size(config) != config.engine.sites)
    keys = ", the keys of the sums" * config.privacy.secure
    text = (
        f"**How much.** In a round that it takes part in{drawn}, a site sends {about} "
        f"{tables.size(up)} ({_parts(moved.up)}){first}. It receives {about} {tables.size(down)}. "
        f"In all {rounds:,} rounds these are {tables.size(up * rounds)} and "
        f"{tables.size(down * rounds)}. This is counted for images with three channels. Flower's "
        f"own messages, encryption{keys} and what is done again after a fault come on top."
    )
    return textwrap.fill(text, 100)


def _parts(moved: Mapping[str, int]) -> str:
    return ", ".join(f"`{task}` {tables.size(count)}" for task, count in moved.items())


def _round_size(config: Config) -> int:
    """How many sites a round asks."""
    from fedssl.runs.session import cohort_size

    assert config.engine.sites is not None
    return cohort_size(config, config.engine.sites)


def _others(config: Config) -> str:
    """What comes to the other sites of what a site sends."""
    from fedssl import privacy

    kind = algorithm_of(config)
    asked = (*kind.asked(config.privacy.secure), *kind.gathers)
    told = [task for task in asked if task in kind.statistics]
    own = [task for task in asked if task in kind.varying]
    noise = "" if config.privacy.noise is None else ", all with the noise"
    text = "**What the other sites get** is what the server makes of all replies: the next model"
    text += f", and the means of {_quoted(told)} over a round's sites" if told else ""
    text += f", and each site's own {_quoted(own)}" if own else ""
    text += f"{noise}."
    if noise:
        return textwrap.fill(text, 100)
    text += " Sites that put their parts together may take these out of a mean"
    text += ": with two sites a round each may find the other's." * (_round_size(config) == 2)
    text += ": what is left is the others'." * (_round_size(config) != 2)
    if told:
        few = privacy.few_images(kind.objective)
        text += (
            f" If a round's sites use at most {few} images together, whoever has these means can "
            "compute each image's encoding."
        )
    return textwrap.fill(text, 100)


def _quoted(tasks: Sequence[str]) -> str:
    return " and ".join(f"`{task}`" for task in tasks)


def _encoding(config: Config) -> str:
    """What an encoding is, where any leave the site, if only in means."""
    kind = algorithm_of(config)
    asked = (*kind.asked(config.privacy.secure), *kind.gathers)
    if not any(task in (*kind.statistics, *kind.varying) for task in asked):
        return ""
    width = kind.objective.params.projector[-1]
    text = (
        f"An **encoding** (also: features, a projection) is a list of {width:,} numbers that the "
        "network computes from an image. It is not the image, but images that look alike have "
        "encodings that are alike: whoever has one, and the network, as the server does, can tell "
        "whether a picture is that image, or like it. Published methods have drawn pictures that "
        "resemble the image from such numbers of other networks."
    )
    return textwrap.fill(text, 100) + "\n\n"


def _single(config: Config) -> str:
    """What a site with few images must know, where its replies tell of single ones."""
    from fedssl import privacy

    kind = algorithm_of(config)
    found = [(r, _most_images(config, kind, r.most)) for r in privacy.kinds(config, kind)]
    said = [_sends(config, replies, most) for replies, most in found if most != 0]
    if not said:
        return ""
    said.append(_remedy(config, any(most is None for _, most in found), found[0][0].most))
    return textwrap.fill(" ".join(said), 100) + "\n\n"


def _sends(config: Config, replies: Replies, most: int | None) -> str:
    """What a site with at most ``most`` images sends; none: every site."""
    who = "A site with one image" if most == 1 else f"A site with at most {most} images"
    if most is None:
        who = f"With `algorithm.batch={config.algorithm.batch}` every site"
    tasks = _quoted(replies.tasks)
    if replies.changes:
        what = f"{who} sends changes of the weights that are made of one image"
        return f"**{what}**, in {tasks}: they {replies.tell(1)}."
    return (
        f"**{who} sends single images' encodings**: in {tasks} go means over the images that a "
        "round uses here. Over one image they are its encoding, and from those over up to "
        f"{replies.most} images each encoding can be computed."
    )


def _most_images(config: Config, kind: Any, most: int) -> int | None:
    """The most images of a site whose replies are made of at most ``most``; 0: of none; none: any.

    A pass leaves out less than a batch.
    """
    from fedssl.training.plan import Plan

    plan = Plan.from_config(config.algorithm, config.seed)
    if plan.averaged(sys.maxsize) <= most:
        return None
    sizes = (size for size in range(1, most + (plan.batch or 1) + 1) if plan.averaged(size) <= most)
    return max((size for size in sizes if _takes_part(config, kind, size)), default=0)


def _takes_part(config: Config, kind: Any, size: int) -> bool:
    """Whether a site with so many images is not refused."""
    import numpy as np

    try:
        kind.check_clients(np.array([size]))
    except UserError:
        return False
    return size > 1 or config.encoder.norm != "batch"


def _remedy(config: Config, everyone: bool, few: int) -> str:
    """What helps where replies of up to ``few`` images tell of each, everyone's or small sites'."""
    from fedssl import privacy

    assert config.engine.sites is not None
    images = "one image" if few == 1 else f"{few} images"
    least = privacy.fewest(config, config.engine.sites)
    if config.privacy.secure:
        text = "This leaves masked, and the server learns only sums over the sites (below)."
        if least <= few:
            text += (
                f" But a sum may be over {least} sites: if a round uses at most {few} images of "
                "these together, it tells their encodings."
            )
        return text
    fix = f"Take part with more than {images}"
    if everyone:
        fix = f"Ask the server's operator for a batch above {images}, or for none"
    if privacy.in_sums(config, algorithm_of(config), config.engine.sites) is not None:
        fix += ", or for" if everyone else ", or ask the server's operator for"
        fix += " `privacy.secure=true`: the server then learns only sums over the sites"
        if least <= few:
            fix += f" (which hide this where they are over more than {few} images)"
    return f"{fix}."


def sites(config: Config, recipe: str, moved: Moved | None = None) -> str:
    """Instructions for a site's administrator; ``moved`` is what a round costs, where known."""
    square, algorithm = "all of one square size", plugins.label(config.algorithm.name)
    if config.data.size is not None:
        square = f"of any size: they are cut to a square and resized to {config.data.size} pixels"
    damaged = "One damaged image keeps this site, and so the run, from starting (last table)."
    if config.data.corrupt == "skip":
        damaged = "Damaged images are left out, and the log names them (`data.corrupt=skip`)."
    return f"""# For a site

Recipe `{recipe}`, algorithm `{algorithm}`, {config.engine.sites} sites, \
{config.rounds} rounds. Written by fedssl {__version__} for Flower {FLOWER}.

## What you need

- Linux, Python 3.11 to 3.13, and a connection out to the server's one port. Nothing connects in.
- One folder with images, {square}; any format that Pillow reads, at any depth. It is only read;
  leave it as it is while a run is on. If it has a folder `train`, the images must be in that
  (`test` and `val` beside it are not used).
  {damaged}
- Room for the prepared images (`~/.cache/fedssl`, or `FEDSSL_CACHE`) and for what this site's model
  keeps between rounds (`~/.local/state/fedssl`, or `FEDSSL_STATE`). Neither leaves the site, but
  for the random number that the server knows it by.
  Of a run that is over, what is kept there may be deleted, but for `sent.jsonl` (below).
- A GPU is used where there is one; `CUDA_VISIBLE_DEVICES` chooses it, or hides it (`=""`). Of the
  CPU all cores are used, or as many as `OMP_NUM_THREADS` says.
- From the server's operator, by a way that you trust: the server's address and `ca.crt`.

## Install, once

```sh
python3 -m venv ~/fedssl
. ~/fedssl/bin/activate
pip install 'fedssl[{extras(config)}]=={__version__}' 'flwr=={FLOWER}'
ssh-keygen -t ecdsa -b 384 -N '' -C '' -f ~/fedssl/site.key
```

If pip does not find fedssl: the server's operator has it as a file; name that in its place, as in
`pip install './fedssl-{__version__}-py3-none-any.whl[{extras(config)}]'`.

Send `~/fedssl/site.key.pub` to the server's operator, who registers it. `site.key` stays with you.

## Start

```sh
. ~/fedssl/bin/activate
{QUIET}
{SOON}
flower-supernode --superlink SERVER:8000 --root-certificates ~/fedssl/ca.crt \\
    --auth-supernode-private-key ~/fedssl/site.key --node-config 'data="/srv/images"'
```

`SERVER` is the name or address that is in the server's certificate; `/srv/images` is your folder.
That is all there is to configure. The command stays in the foreground and waits for work; it tries
again by itself while the server cannot be reached. If it ends, let whatever starts it start it
again (in a systemd unit `Restart=always` and `RestartSec=15`): after a power cut the server takes
this site for still connected, and refuses it, for up to a minute. Ctrl-C ends it properly. A site
that goes away costs its own replies only, and is used again when it is back.

Several SuperNodes on one machine each need a `--port` of their own (9094 unless said).
For a first try in one room, without encryption: `--insecure` in place of the two options for
certificate and key, here and at the server.

## What leaves the site

{exchanges(config)}

No image does, and nothing else of what is here. (In this list a client is a site, and its samples
are the site's images.) Nothing is fetched from elsewhere either: the variables above turn off
Flower's telemetry, update check and installs.

{_amount(config, moved)}

{_others(config)}

{_encoding(config)}{_single(config)}{protection(config)}

**Your own record.** `sent.jsonl`, in the folder of this site in `~/.local/state/fedssl`, has a line
for every message: when, for which run, round and exchange, the names, types and shapes of all that
is in it, and the bytes. It is written before the message is sent; what cannot be recorded is not
sent, but for the line that says so. The bytes of a round, over all replies that counted, are those
in `metrics.jsonl` at the server; the words of first contacts (`hello`) and faults are counted here
alone. Flower's own messages (is there work, the site is alive) and what
encryption adds are not in it.

**Whom you trust.** The server sends the program that runs here (the files of this app, which use
the fedssl that you installed) together with each run. Whoever can start runs at the server can run
a program as the user that you start the SuperNode as: make it a user that can read the images and
nothing else.

## If it does not work

| The log says | It means |
|---|---|
| `Connection attempt failed, retrying` | no server at this address, or a firewall |
| `CERTIFICATE_VERIFY_FAILED` | not the server's `ca.crt`, or `SERVER` is not in its certificate |
| `[code: 2004] Failed to activate SuperNode` | the key is not registered; or it is in use: by a \
second SuperNode, or by one that was killed less than a minute ago |
| `fedssl: refused: node-config data…` | the folder in `--node-config` is not given, not there, \
not readable or holds no images; end the SuperNode and start it again with the right one |
| `fedssl: refused: data.corrupt=fail…` | the files that it names are damaged; mend or remove \
them: while the run waits for its sites, the server asks again every half minute; or its operator \
writes the app anew with `data.corrupt=skip`, which leaves them out |
"""


def server(config: Config, folder: Path) -> str:
    """Instructions for the server's operator."""
    quoted, out = (shlex.quote(str(path)) for path in (folder, folder / "run"))
    judged = (
        f"Encoders are judged with the labelled images in `{config.data.root}` (`data.root`)."
        if config.data.root
        else "The server has no images, so encoders are not judged; labelled images of your own in "
        "`data.root` change that."
    )
    if public := getattr(config.algorithm, "public", 0):
        judged += f"\n**{public} of these images are public**: every site gets them."
    return f"""# For the server

Recipe and all keys: `{PACKAGE}/recipe.yaml`. The run waits for {config.engine.sites} sites \
(`engine.sites`), a reply for at most {config.engine.timeout:g} s (`engine.timeout`). {judged}
After the run, `fedssl evaluate {out} data.root=FOLDER` judges with others.
Written by fedssl {__version__} for Flower {FLOWER}.

## Install, once

```sh
python3 -m venv ~/fedssl
. ~/fedssl/bin/activate
pip install 'fedssl[{",".join((extras(config), *config.log))}]=={__version__}' 'flwr=={FLOWER}'
```

Where fedssl is not on an index that pip knows, `pip wheel --no-deps .` in its repository makes
`fedssl-{__version__}-py3-none-any.whl`: install that, and send it to the sites.

A certificate of your own authority, valid for a year; put in the server's name and address:

```sh
mkdir -p ~/fedssl/tls && cd ~/fedssl/tls && umask 077
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -days 365 -subj '/CN=fedssl' \\
    -keyout ca.key -out ca.crt
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-384 -nodes -subj '/CN=server.example' \\
    -keyout server.key -out server.csr
printf 'subjectAltName=DNS:server.example,DNS:localhost,IP:127.0.0.1\\n' > san
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 \\
    -extfile san -out server.crt
```

Send `ca.crt` and `SITES.md` to the sites; `ca.key` and `server.key` to nobody.

## Start the SuperLink

```sh
. ~/fedssl/bin/activate
{QUIET}
flower-superlink --host 0.0.0.0 --port 8000 --database ~/fedssl/superlink.db \\
    --ssl-ca-certfile ~/fedssl/tls/ca.crt --ssl-certfile ~/fedssl/tls/server.crt \\
    --ssl-keyfile ~/fedssl/tls/server.key --enable-supernode-auth \\
    --disable-runtime-dependency-installation
```

It stays in the foreground. With `--database` it knows its sites again after a restart. Messages go
through that file: put it on a fast disk.

**Who may reach the port.** Sites, and everyone who may start runs, use the same port, and Flower
{FLOWER} asks for no password to start a run: whoever reaches the port can run programs at
the sites. Let the firewall admit only the sites' addresses, and only sites that you trust.

## Register the sites

Name the server once, in `~/.flwr/config.toml` (`FLWR_HOME` moves it):

```toml
[superlink]
default = "{CONNECTION}"

[superlink.{CONNECTION}]
address = "localhost:8000"
root-certificates = "/home/YOU/fedssl/tls/ca.crt"
```

```sh
flwr supernode register site-a.pub {CONNECTION}   # once for each site's public key
flwr supernode list {CONNECTION}                  # who is there
flwr supernode unregister NODE-ID {CONNECTION}    # a site leaves for good
```

## Run

```sh
flwr run {quoted} {CONNECTION} --stream
flwr list --format json {CONNECTION}   # of one run: --run-id RUN-ID
```

The run first waits for its sites, for `engine.timeout` at most; its log names a node that cannot
take part, and why. Ctrl-C ends the display, not the run (`flwr stop RUN-ID {CONNECTION}` does
that). `flwr run` exits with 0 even if the run failed: `"status": "finished:completed"` in
`flwr list --format json` is success (without `--format json` a narrow terminal cuts it off).
Results, metrics and checkpoints are in `{folder / "run"}` on the SuperLink's machine (`out`).

## Go on after a crash

```sh
flwr run {quoted} {CONNECTION} --stream --run-config 'resume=true'
```

It goes on from the last checkpoint. Rounds after it do not count: they are done, and sent, again,
and no round counts twice. If the server's program was
killed, `flwr list` shows the old run as running for another minute; that does no harm. A run is
not started into a folder that holds another (`--run-config 'out="/another/folder"'` names a new
one), nor continued while it is still at work.
"""
