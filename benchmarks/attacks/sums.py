"""Attack secure sums, as dishonest clients and as a dishonest server.

    python benchmarks/attacks/sums.py --count 5000 --seed 0

Half of the sums have an honest server. Of its clients some drop out, answer late or twice, copy
what another one sent or what they sent before, flip bits, sign with other keys, or send false
shares and vectors. Then the server may start again, and lose other clients. A sum must be right or
not come about, it must come about if enough honest clients are left, and the second must be the
first.

In the other half the server lies, with as many clients' help as the protocol bears: it names other
clients to each site, sends other models, mixes up what it forwards, and asks again in other ways.
At the end the shares that it got are counted. They must open one sum at most, over enough sites.

Each site is a folder, and reads its record anew for each message, as after a restart.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lying_server import Liar
from secure_run import ROUNDS, RUN, SIZE, Finding, Run

from fedssl.engines.remote.codec import MalformedError
from fedssl.privacy import secure
from fedssl.privacy.secure import Masker, SumLost, Unmasker
from fedssl.privacy.secure.identity import Identity

Change = Callable[[Run, int, str, Any], Any]  # of a reply; None: there is none


def flip(run: Run, site: int, step: str, reply: Any) -> Any:
    """Flip one bit."""
    if isinstance(reply, np.ndarray):
        flipped = reply.copy()
        flipped[run.chance.randrange(len(reply))] ^= 1 << run.chance.randrange(63)
        return flipped
    name = run.chance.choice(sorted(reply))
    items = list(reply[name])
    place = run.chance.randrange(len(items))
    item = bytearray(items[place] or b"\0")
    item[run.chance.randrange(len(item))] ^= 1 << run.chance.randrange(8)
    items[place] = bytes(item)
    return {**reply, name: items}


def copy_other(run: Run, site: int, step: str, reply: Any) -> Any:
    """Send what another site sent."""
    others = [k for k in range(run.sites) if (run.round, k, step) in run.replies and k != site]
    return run.replies[run.round, run.chance.choice(others), step] if others else None


def repeat_earlier(run: Run, site: int, step: str, reply: Any) -> Any:
    """Send what the site sent in the round before."""
    return run.replies.get((run.round - 1, site, step))


def cut(run: Run, site: int, step: str, reply: Any) -> Any:
    """Leave out a part."""
    if isinstance(reply, np.ndarray):
        return run.chance.choice([reply[1:], reply[None], reply.astype(float), reply.tolist()])
    name = run.chance.choice(sorted(reply))
    return run.chance.choice(
        [{}, None, {**reply, name: reply[name][1:]}, {**reply, name: [b""] * len(reply[name])}]
    )


def shuffle(run: Run, site: int, step: str, reply: Any) -> Any:
    """Mix up the items, or the numbers."""
    if isinstance(reply, np.ndarray):
        return np.roll(reply, 1)
    return {name: items[::-1] for name, items in reply.items()}


def forge(run: Run, site: int, step: str, reply: Any) -> Any:
    """Send keys of another identity, a vector of the site's choice, or random bytes."""
    if step == "keys":
        return Masker(site, run.context, run.threshold).keys(Identity())
    if isinstance(reply, np.ndarray):
        return np.frombuffer(run.chance.randbytes(8 * len(reply)), np.int64)
    return {
        name: [run.chance.randbytes(len(item)) for item in items] for name, items in reply.items()
    }


def lose(run: Run, site: int, step: str, reply: Any) -> Any:
    """Do not answer."""
    return None


CHANGES: tuple[Change, ...] = (
    *(flip, copy_other, repeat_earlier, cut, shuffle, forge),
    *(lose, lose, lose),
)


@dataclass
class Outcome:
    """The end of an honest server's sum: its clients and numbers, or why there is none."""

    members: tuple[int, ...] = ()
    total: tuple[int, ...] | None = None
    counts: Counter[str] = field(default_factory=Counter)


def sum_honestly(run: Run, faults: Mapping[int, tuple[str, Change, str]]) -> Outcome:
    """Go through a sum in which some clients lie in one step: ``now``, ``late`` or ``twice``."""
    outcome, added = Outcome(), {site: run.vector(site) for site in range(run.sites)}
    size = SIZE + 1
    server = Unmasker(range(run.sites), run.context, run.threshold, size, run.asked, run.identities)
    late: dict[int, Any] = {}
    refused = set[int]()  # by their own sites
    try:
        for step in secure.STEPS:
            messages = server.ask()
            for site, reply in late.items():  # of the step before
                take(server, site, reply, must_refuse=True)
            late.clear()
            for site in run.chance.sample(sorted(messages), len(messages)):
                try:
                    reply = run.ask(site, step, messages[site])
                except MalformedError:
                    refused.add(site)
                    continue
                at, change, how = faults.get(site, ("", lose, ""))
                if at == step:
                    outcome.counts[change.__name__] += 1
                    before, reply = reply, change(run, site, step, reply)
                    if how == "late" and change is lose:
                        late[site] = before
                    if step == "masked" and is_vector(reply, len(before)):
                        added[site] = added[site] + (reply - before)[1:]
                    if reply is None:
                        continue
                if take(server, site, reply) and how == "twice":
                    take(server, site, reply, must_refuse=True)
        total = server.total()
    except SumLost as error:
        outcome.counts[f"no sum: {type(error).__name__}"] += 1
        honest = run.sites - len(faults.keys() | refused)
        spoilers = [site for site, (at, *_) in faults.items() if at in ("shares", "masked")]
        if honest >= run.threshold and not spoilers:
            raise Finding(f"{error}, but {honest} honest clients were there") from None
        return outcome
    members = tuple(sorted(server._masked))
    if total.tolist() != np.sum([added[site] for site in members], axis=0).tolist():
        raise Finding(f"a wrong sum over {members}")
    outcome.members, outcome.total = members, tuple(total.tolist())
    outcome.counts["right sums"] += 1
    return outcome


def is_vector(reply: Any, length: int) -> bool:
    """Return whether the server would take this for a masked vector."""
    is_array = isinstance(reply, np.ndarray)
    return is_array and reply.shape == (length,) and reply.dtype == np.int64


def take(server: Unmasker, site: int, reply: Any, must_refuse: bool = False) -> bool:
    """Give the server a reply; return whether it takes it."""
    try:
        server.take(site, reply)
    except ValueError:
        return False
    if must_refuse:
        raise Finding(f"the server took a reply of client {site} late, or twice")
    return True


def draw_faults(run: Run) -> dict[int, tuple[str, Change, str]]:
    """Draw which clients lie, in which step, and how."""
    most = run.sites - run.threshold + 1  # one more than a sum bears
    liars = run.chance.sample(range(run.sites), run.chance.randint(0, most))
    return {
        site: (
            run.chance.choice(secure.STEPS),
            run.chance.choice(CHANGES),
            run.chance.choice(["now", "late", "twice"]),
        )
        for site in liars
    }


def attack_as_clients(run: Run) -> Counter[str]:
    """Sum with dishonest clients; perhaps again, as a server that was started again."""
    first = sum_honestly(run, draw_faults(run))
    if run.chance.random() < 0.3:
        run.restart()
        lost = run.chance.sample(range(run.sites), run.chance.randint(0, 2))
        again = sum_again(run, {site: (run.chance.choice(secure.STEPS), lose, "") for site in lost})
        if (
            first.total
            and again.total
            and (first.members, first.total)
            != (
                again.members,
                again.total,
            )
        ):
            raise Finding(f"two sums: over {first.members}, and over {again.members}")
        first.counts["started again"] += 1
    return first.counts


def sum_again(run: Run, faults: Mapping[int, tuple[str, Change, str]]) -> Outcome:
    """Ask for a sum that was asked for before: sites that refuse are no fault."""
    try:
        return sum_honestly(run, faults)
    except Finding as finding:
        if "honest clients were there" in str(finding):
            return Outcome()
        raise


def attack(count: int, seed: int) -> Counter[str]:
    """Attack ``count`` sums, of as many runs as that takes."""
    counts: Counter[str] = Counter()
    done = number = 0
    while done < count:
        with tempfile.TemporaryDirectory(prefix="sums-") as folder:
            run = Run(Path(folder), random.Random(f"{seed}/{number}"))
            number += 1
            # The sites meet when the server is still honest.
            first = sum_honestly(run, {})
            if first.total is None:
                raise Finding("no sum of honest clients")
            while done < count and run.round + 1 < ROUNDS:
                run.round, run.attempts = run.round + 1, (RUN,)
                try:
                    if run.chance.random() < 0.5:
                        counts += attack_as_clients(run)
                        counts["dishonest clients"] += 1
                    else:
                        counts += Liar(run).attack()
                        counts["dishonest server"] += 1
                except Finding as finding:
                    where = f"run {number - 1}, round {run.round + 1}, {run.sites} sites"
                    raise Finding(f"{finding} ({where}, threshold {run.threshold})") from None
                done += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="secure sums")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn, except keys")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        counts = attack(options.count, options.seed)
    except Finding as finding:
        print(f"secure sums, seed {options.seed}: {finding}", file=sys.stderr)
        sys.exit(1)
    listed = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    minutes = (time.monotonic() - started) / 60
    print(f"{options.count} secure sums, none wrong, none told apart: {listed} ({minutes:.1f} min)")


if __name__ == "__main__":
    main()
