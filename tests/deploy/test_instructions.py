"""SITES.md and SERVER.md: the commands, what leaves a site, and how it is protected."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import refused

from fedssl.deploy.instructions import write_server_instructions, write_site_instructions
from fedssl.deploy.recipe import adapt_recipe
from fedssl.federation.algorithm import build_algorithm
from fedssl.privacy.aggregators import build_aggregator
from fedssl.privacy.exchanges import list_exchanges

WORDS = ["engine.sites=3", "cohort.size=null"]
CCL = "algorithm.name=ccl objective.name=moco"
NOISE = "privacy.noise=1 privacy.clip=3 objective.bound=1"


def exchanges(words: str = "") -> str:
    return list_exchanges(adapt_recipe("default", [*WORDS, *words.split()]))


def sites(words: str = "") -> str:
    config = adapt_recipe("default", [*WORDS, *words.split()])
    return " ".join(write_site_instructions(config, "default", None).split())


def test_what_leaves_a_site_is_what_the_algorithm_declares() -> None:
    secure = "privacy.secure=true"
    plain, masked, noisy = exchanges(), exchanges(secure), exchanges(NOISE)
    for task in ("locate", "encode", "descend"):
        assert f"- `{task}`" in plain
    assert "`locate`" not in masked + noisy
    assert "Means of the client's encodings and of their products" in plain
    assert "could see each client's own" in plain and "could see" not in masked
    assert "learns only the sum" in masked
    assert "public keys" in masked and "public keys" not in plain
    for text in (plain, noisy):
        assert "its weight in the mean" in text and "random number" in text
    assert "the loss" in plain and "loss" not in noisy  # which stays at the site
    assert "clipped at the client to norm 2.24" in noisy  # √(2B² + 3B⁴)
    assert "clipped at the client to norm 3," in noisy
    assert "the classes' names" not in plain
    assert "the classes' names" in exchanges("algorithm.name=fedavg objective.name=supervised")


ENCODING = "is a list of 16 numbers that the network computes from an image. It is not"
OPEN = "algorithm.share_plain=true"
RECEIVE = "**What the other sites receive** is computed from all replies:"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "**Secure sums are off** (`privacy.secure=true` turns them on)"),
        ("algorithm.name=featarc", "**Secure sums are off** (and not possible with these"),
        ("engine.sites=2", "**Secure sums are off** (and not possible"),
        ("engine.max_norm=1", "**Secure sums are off** (and not possible"),
        ("cohort.average=median", "server has to look at each site's replies"),
        ("algorithm.name=gossip", "sees each site's own reply to `train`"),
        (CCL, "one row for each image, and passes them on to all sites"),
        (CCL, "keeps the last ones of each site, also in the run's folder"),
        (CCL, "mixed with 3 others and signs are flipped (InstaHide). This is no proof of privacy"),
        (f"{CCL} {OPEN} algorithm.mask=false", "mixed with 3 others. This is no proof of privacy"),
        (f"{CCL} {OPEN} algorithm.mix=1", "The images are taken as they are."),
        (f"{CCL} algorithm.remote=off algorithm.lambda=0", "**Secure sums are off**"),
        ("privacy.secure=true", "only if at least 3 of a round's 3 sites answer"),
        # With two helpers of three sites, the third one's part would be left.
        ("privacy.secure=true", "and up to 1 of the other sites may help it. It gets one sum"),
        ("privacy.secure=true engine.sites=9", "and up to 4 of the other sites may help it"),
        ("privacy.secure=true engine.sites=5 privacy.threshold=0.51", "no other site helps it."),
        ("privacy.secure=true", "recover single images out of a sum"),
        ("privacy.secure=true engine.sites=9", "at least 7 of a round's 9 sites"),
        ("privacy.secure=true engine.sites=9 cohort.size=5", "at least 4 of a round's 5 sites"),
        (NOISE, "**Differential privacy is on** (`privacy.noise=1.0`)"),
        ("", "One damaged image stops this site"),
        ("data.corrupt=skip", "Damaged images are left out"),
        ("data.size=null", "all of one square size"),
        ("", "--node-config 'data=\"/srv/images\"'"),
        ("", ENCODING),
        (CCL, ENCODING),
        ("", f"{RECEIVE} the next model, and the means of `locate` and `encode` over a round's"),
        ("", "the mean of the other sites. If a round's sites use at most 10 images together"),
        ("privacy.secure=true", f"{RECEIVE} the next model, and the means of `encode` over a"),
        ("cohort.size=2", "With two sites in a round, each can compute the other's part."),
        (NOISE, "a round's sites, all with noise. An **encoding"),
        (CCL, f"{RECEIVE} the next model, and each site's own `share`."),
        ("algorithm.name=fedavg", f"{RECEIVE} the next model. Sites that combine their parts"),
    ],
)
def test_a_site_reads_what_it_shares_and_how_it_is_protected(words: str, text: str) -> None:
    assert text in sites(f"objective.projector=32,16 {words}")


def test_an_encoding_is_explained_only_where_any_leaves() -> None:
    assert "**encoding**" not in sites("algorithm.name=fedavg objective.name=byol")


def test_what_is_possible_does_not_depend_on_what_is_installed_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "`privacy.secure=true` turns them on" in sites()
    secure = adapt_recipe("default", [*WORDS, "privacy.secure=true"])
    with refused("privacy.secure", True, "not installed"):
        build_aggregator(secure, build_algorithm(secure), 3, 3)


def test_the_servers_commands_can_be_pasted() -> None:
    config, folder = adapt_recipe("default", WORDS), Path("/srv/my app")
    text = write_server_instructions(config, folder)
    assert text.count("flwr run '/srv/my app' fedssl --stream") == 2
    assert "--run-config 'resume=true'" in text and "fedssl evaluate '/srv/my app/run'" in text
    assert "--enable-supernode-auth" in text and "--database" in text
    # The table of `flwr list` is cut off in a terminal of 80 columns.
    assert "flwr list --format json fedssl" in text and '"status": "finished:completed"' in text
