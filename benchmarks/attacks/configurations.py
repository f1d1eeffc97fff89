"""Draw configurations at random, and check that each runs or is refused in one line.

    python benchmarks/attacks/configurations.py --count 5000

Keys and values come from the keys' declarations: the ends of their ranges and what is just outside
them, other types, numbers that float32 or 64 bits do not hold, long and odd text, empty and nested
lists, sweeps, and keys that exclude each other. A part are recipes, in YAML that may be damaged.
Each is a command (``fedssl run``) in a process of its own. It reads the configuration
(``--explain``) or, if it is small, also trains a round on small images.

Good ends are: exit code 0, exit code 2 with one line, and exit code 1 with one line where training
diverged. Any other is printed with its number N, and the exit code is 1.
``--first N --count 1`` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from fedssl.util.tuning import shorten_thread_waits

shorten_thread_waits()  # as the command line does, before torch

import torch

from fedssl import cli, config, report
from fedssl.config.keys import Key

SMALL = (
    *("data.name=folder", "data.root=images", "data.cache=cache", "data.size=8"),
    *("encoder.name=tiny", "encoder.groups=4", "objective.projector=[16,16]", "rounds=1"),
    *("algorithm.local_steps=1", "algorithm.batch=6", "partition.name=iid", "partition.clients=3"),
    *("evaluate.protocols=[knn]", "evaluate.baselines=[]", "engine.threads=1"),
)
TRAINED = 0.2  # of the cases
YAML = 0.3  # of the cases have a recipe
WILD = 0.6  # of the cases have values of any kind; the others at least of the key's type
PATIENCE = 60  # seconds of computing that a command may take
STUCK = 1200.0  # seconds that it may take by the clock, on a machine that is busy
MEMORY = 3 << 30  # bytes that a command may take beside PyTorch
LONGEST = 2000  # characters of an error
# Not drawn where a round is trained: processes, downloads, and large values that take long.
LEFT_OUT = ("engine.name", "engine.workers", "engine.sites", "device", "encoder.pretrained", "log")
COSTLY = 40  # the largest whole number that a trained case draws, unless it is refused
NUMBERS = (
    *("0", "1", "-1", "2", "3", "0.5", "1e39", "-1e39", "3.4e38", "1e-39", "1e-320", "1e308"),
    *("1e400", ".nan", ".inf", "-.inf", "2147483647", "2147483648", "4294967296", "-0.0"),
    *("9223372036854775807", "9223372036854775808", "1" + "0" * 400, "9" * 5000, "1_000", "0x10"),
)
TEXTS = (
    *("", " ", "null", "~", "true", "off", "é中🙂", "\u202eabc", "\x1b[31m", "a\nb", "a\0b", "a:b"),
    *(
        "nobody.py:Name",
        "python:Net",
        "..",
        "a/b/c",
        "x" * 300,
        "y/" * 3000,
        "z" * 10_000,
        "[",
        "{",
    ),
    *("[" * 2000, "{a: 1}", "[]", "[1]", "[[1]]", "[1,2]", "[a,b]", "&a [*a]", "!!python/name:os"),
    *("2024-13-45", "12:30", "=", "%s%n", "knn", "semi@200%", "semi@nan%", "$HOME", "{{1}}", "a=b"),
)
PLAIN = (*config.VARIANTS["objective"], *config.VARIANTS["algorithm"], "knn", "linear", "tiny")
DAMAGES = ("cut", "double", "indent", "swap", "insert", "nest", "alias", "bytes")
Range = tuple[str, Any, Key]  # of a key: its name, its type and its declaration


@dataclass(frozen=True)
class Case:
    """One configuration: words and, if any, a recipe."""

    words: tuple[str, ...]
    recipe: bytes | None
    trains: bool


def draw_case(seed: int, number: int) -> Case:
    """Draw a configuration, the same for the same numbers."""
    source = random.Random(f"{seed}/{number}")
    trains, is_wild = source.random() < TRAINED, source.random() < WILD
    names = {s: source.choice(list(found)) for s, found in config.VARIANTS.items()}
    ranges = list(_list_ranges(names))
    if trains:
        ranges = [each for each in ranges if each[0] not in LEFT_OUT]
    given = {f"{s}.name": n for s, n in names.items() if source.random() < 0.3}
    for name, kind, fact in source.sample(ranges, source.choice((1, 1, 2, 2, 3, 5, 12))):
        draw = _draw_value if is_wild else _draw_typed
        given[name] = draw(source, kind, fact, trains)
    small = dict(word.split("=", 1) for word in SMALL) if trains else {}
    if source.random() < YAML:
        text = _write(source, given, 2 if is_wild else 0)
        return Case(tuple(f"{k}={v}" for k, v in small.items() if k not in given), text, trains)
    return Case(tuple(f"{k}={v}" for k, v in {**small, **given}.items()), None, trains)


def _list_ranges(names: dict[str, str]) -> Iterator[Range]:
    """Yield the keys of a configuration with these parts."""
    for section, kind in config.key_types(config.Config).items():
        if section in names:
            kind = config.variant(section, names[section]).Params
        if not dataclasses.is_dataclass(kind):
            yield section, kind, config.facts_of(config.Config)[section]
            continue
        facts = config.facts_of(kind)
        yield from ((f"{section}.{k}", t, facts[k]) for k, t in config.key_types(kind).items())


def _draw_value(source: random.Random, kind: Any, fact: Key, small: bool) -> str:
    """Draw the text of a value: most often of the key's type."""
    chance = source.random()
    if chance < 0.1:
        return source.choice(TEXTS)
    if chance < 0.2:
        return source.choice(NUMBERS)
    if chance < 0.25:  # a sweep
        return f"[{','.join(_draw_value(source, kind, fact, small) for _ in range(3))}]"
    return _draw_typed(source, kind, fact, small)


def _draw_typed(source: random.Random, kind: Any, fact: Key, small: bool) -> str:
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return str(source.choice(kinds))
    if origin is tuple:
        count = source.choice((0, 1, 1, 2, 2, 3, 3, 300)) if kinds[-1] is Ellipsis else len(kinds)
        return f"[{','.join(_draw_typed(source, kinds[0], fact, small) for _ in range(count))}]"
    if kinds and kind is not type(None):
        return _draw_typed(source, source.choice(kinds), fact, small)
    if kind is bool:
        return source.choice(("true", "false"))
    if kind in (int, float):
        return _draw_number(source, kind, fact, small)
    return (
        "null" if kind is type(None) else source.choice(TEXTS if source.random() < 0.3 else PLAIN)
    )


def _draw_number(source: random.Random, kind: type, fact: Key, small: bool) -> str:
    """Draw a number at an end of the range, just outside or anywhere in it."""
    ends = [end for end in (fact.ge, fact.gt, fact.le, fact.lt) if end is not None]
    least, most = min(ends, default=0), max(ends, default=10)
    if kind is int:
        near = [end + step for end in ends for step in (-1, 0, 1)]
        near += [source.randint(int(least), int(max(most, least + 10))), source.randint(0, 8)]
        near = [n for n in near if not small or n <= COSTLY or not fact.allows(n)]
        return str(int(_choose(source, near, fact)))
    near = [math.nextafter(end, way) for end in ends for way in (-math.inf, math.inf)] + ends
    inside = [source.uniform(least, max(most, least + 1)), source.random()]
    near += [*inside, *inside, 10 ** source.uniform(-9, 9)]
    return repr(float(_choose(source, near, fact)))


def _choose(source: random.Random, near: Sequence[float], fact: Key) -> float:
    """Choose a number that is allowed, most often."""
    allowed = [number for number in near if fact.allows(number)]
    return source.choice(allowed if allowed and source.random() < 0.8 else near)


# Recipes -----------------------------------------------------------------------------------------


def _write(source: random.Random, given: dict[str, str], most: int) -> bytes:
    """Return a recipe with these keys, with up to so many damages."""
    lines: list[str] = []
    for section in dict.fromkeys(name.partition(".")[0] for name in given):
        if section in given:
            lines.append(f"{section}: {_quote(source, given[section])}")
            continue
        lines.append(f"{section}:")
        keys = {n.partition(".")[2]: v for n, v in given.items() if n.startswith(f"{section}.")}
        lines += [f"  {key}: {_quote(source, value)}" for key, value in keys.items()]
    text = "\n".join(lines) + "\n"
    for damage in source.choices(DAMAGES, k=source.randint(0, most)):
        text = _damage(source, text, damage)
    data = text.encode("utf-8", "surrogatepass")
    return data + source.randbytes(3) if most and source.random() < 0.04 else data


def _quote(source: random.Random, value: str) -> str:
    """Return a value as YAML reads it, or in quotes, with which it is text."""
    return json.dumps(value) if source.random() < 0.2 else value


def _damage(source: random.Random, text: str, damage: str) -> str:
    lines = text.splitlines(keepends=True)
    at, line = source.randrange(len(text) + 1), source.randrange(len(lines) + 1)
    if damage == "cut":
        return text[:at]
    if damage == "double":
        return "".join(lines[:line] + lines)
    if damage == "indent":
        return "".join(lines[:line]) + "".join(f"  {rest}" for rest in lines[line:])
    if damage == "swap":
        source.shuffle(lines)
        return "".join(lines)
    if damage == "nest":
        depth = source.choice((3, 30, 3000))
        deep = "[" * depth + "]" * depth if source.random() < 0.5 else "{a: " * depth + "}" * depth
        return f"{text}{source.choice(('paper', 'rounds', 'encoder', 'about'))}: {deep}\n"
    if damage == "alias":
        rows = "".join(f"{b}: &{b} [*{a},*{a},*{a},*{a}]\n" for a, b in pairwise("abcdefghi"))
        return f"a: &a [1,1,1,1]\n{rows}{text}"
    odd = source.choice((*"\t:-[]{}&*!|>'\"%@`#,?=~\x00\x1b\ufeff\u2028", "<<: ", "---\n", "- "))
    return text[:at] + odd + text[at:]


# Commands ----------------------------------------------------------------------------------------


def run_case(case: Case, place: Path, log: Path) -> tuple[str, str]:
    """Run a configuration in a process; return the kind of its end, and what it printed."""
    process = os.fork()
    if not process:
        code = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(place)
            _set_limits()
            words = list(case.words)
            if case.recipe is not None:
                Path("recipe.yaml").write_bytes(case.recipe)
                words.insert(0, "recipe.yaml")
            code = cli.main(["run", *(["--out", "run"] if case.trains else ["--explain"]), *words])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ended = _wait(process)
    shutil.rmtree(place / "run", ignore_errors=True)
    text = log.read_text(errors="replace")
    return _classify(ended, text, case.trains), text


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def _wait(process: int) -> int | None:
    """Return the exit code of a process; ``None`` if it hangs."""
    deadline = time.monotonic() + STUCK
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _classify(code: int | None, text: str, trains: bool) -> str:
    if code in (None, -signal.SIGXCPU, -signal.SIGKILL):
        return "HANG"
    if code < 0:
        return f"SIGNAL {-code}"
    if "Traceback" in text:
        return "TRACEBACK"
    last = text.splitlines()[-1] if text else ""
    if code == 0:
        done = "trained" if trains else "accepted"
        return f"{done}, with a note" if "fedssl: " in text or "arning" in text else done
    if code not in (1, 2) or not last.startswith("fedssl: ") or len(last) > LONGEST:
        return "NO ERROR LINE"
    if "out of memory" in last:
        return "OUT OF MEMORY"
    if code == 1:
        return "diverged" if trains else "EXIT CODE 1"
    return "refused before training" if trains else "refused"


def make_images(root: Path) -> None:
    """Write small images of two classes."""
    source = random.Random(0)
    for split, count in (("train", 12), ("test", 4)):
        for kind in ("cat", "dog"):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = source.randbytes(8 * 8 * 3)
                Image.frombytes("RGB", (8, 8), pixels).save(folder / f"{number}.png")


def warm_up(place: Path) -> None:
    """Train here once, so that forks find everything imported."""
    torch.set_num_threads(1)  # a fork has only the thread that called it
    report.write_page_or_warn = lambda run: None  # takes longer than the run
    with contextlib.chdir(place / "work"), (place / "log.txt").open("w") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            code = cli.main(["run", "--out", "run", *SMALL])
        shutil.rmtree("run")
    if code:
        raise SystemExit((place / "log.txt").read_text())


def attack(seed: int, numbers: Sequence[int], place: Path) -> Counter[str]:
    """Run configurations; print what is not a good end, and return how many had each end."""
    (place / "work").mkdir()
    make_images(place / "work/images")
    warm_up(place)
    ends: Counter[str] = Counter()
    for done, number in enumerate(numbers, 1):
        case = draw_case(seed, number)
        end, text = run_case(case, place / "work", place / "log.txt")
        ends[end] += 1
        if end.isupper() or end.startswith("SIGNAL"):
            shown = [word[:200] for word in case.words if word not in SMALL]
            print(
                f"{number}: {end}: {shown} {(case.recipe or b'')[:600]!r}\n{text[-3000:]}",
                flush=True,
            )
        if done % 250 == 0:
            print(f"{done} configurations: {dict(ends)}", flush=True)
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5000, help="configurations")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="configurations-") as folder:
        ends = attack(options.seed, numbers, Path(folder))
    minutes = (time.monotonic() - started) / 60
    for end, count in sorted(ends.items()):
        print(f"{count:6} {end}")
    found = sum(count for end, count in ends.items() if end.split()[0].isupper())
    print(f"{sum(ends.values())} configurations, {found} findings ({minutes:.1f} minutes)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
