"""Completion as a shell asks for it: by environment variables, with a file for the answer."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedssl import config
from fedssl.cli import completion

CODE = """
import os, sys, fedssl.cli
real = os._exit
def end(code):
    assert not {"torch", "numpy"} & {*sys.modules}
    real(code)
os._exit = end  # how argcomplete ends
sys.argv = ["fedssl"]
fedssl.cli.main()
"""


def complete(line: str) -> list[str]:
    pytest.importorskip("argcomplete")
    with tempfile.NamedTemporaryFile("r") as answer:
        environment = {
            **os.environ,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": answer.name,
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "COMP_TYPE": "9",
        }
        subprocess.run([sys.executable, "-c", CODE], env=environment, check=True)
        return answer.read().split("\n")


ENDS = ("", "6")
ENGINE = [f"engine.compile={choice}" for choice in ("auto", "on", "off")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fedssl do", ["doctor"]),
        ("fedssl run --res", ["--resume"]),
        ("fedssl run algorithm.la", ["algorithm.lambda="]),
        ("fedssl run default engine.compile=", ENGINE),
        ("fedssl run algorithm.name=fede", ["algorithm.name=fedema"]),
        ("fedssl evaluate x evaluate.pre", ["evaluate.preset="]),
        (
            "fedssl recipes dcco/table1/dcco/noniid-1",
            [f"dcco/table1/dcco/noniid-1{end}" for end in ENDS],
        ),
    ],
)
def test_a_shell_is_told(line: str, expected: list[str]) -> None:
    assert complete(line) == expected


def test_it_is_quick() -> None:
    """By the processor's time: others use this machine too."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    before = used()
    complete("fedssl run al")
    assert used() - before < 0.5


def test_every_key_and_choice_is_known() -> None:
    """Completion reads from the source text the keys that the classes have."""
    known = {word.removesuffix("=") for word in completion.keys("")}
    offered = {f"{key}={choice}" for key, own in completion._list_keys("") for choice in own}
    for section, names in config.VARIANTS.items():
        for name in names:
            for key, kind in config.key_types(config.variant(section, name).Params).items():
                assert f"{section}.{key}" in known
                assert {f"{section}.{key}={c}" for c in completion._choices(kind)} <= offered
    for word in ("algorithm.norm_policy=reset", "objective.preset=fedema", "engine.merge=off"):
        assert word in completion.keys(word.partition("=")[0] + "=")
    assert {*config.flatten(config.to_tree(config.build({})))} - {"paper"} <= known
    assert "log=mlflow" in completion.keys("log=")
    norms = {f"encoder.norm={norm}" for norm in ("batch", "frozen", "group")}
    assert set(completion.keys("encoder.norm=")) == norms


def test_recipes_and_tables_are_offered() -> None:
    found = completion.words("fedema/table3")
    assert "fedema/table3" in found and "fedema/table3/fedbyol/cifar10-noniid" in found
    assert set(config.list_recipes()) <= set(completion.words(""))


def test_the_file_says_that_it_completes() -> None:
    text = (Path(__file__).parents[2] / "src/fedssl/cli/__init__.py").read_text()
    assert "PYTHON_ARGCOMPLETE_OK" in text[:1024]  # where argcomplete looks for it
