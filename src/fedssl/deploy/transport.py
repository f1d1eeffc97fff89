"""Reach real sites: ask new nodes who they are, and find each site's node."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from fedssl import __version__
from fedssl.config.schema import Engine
from fedssl.deploy.introduction import Introduction
from fedssl.engines.flower.messages import GREETING, read_greeting, write_greeting
from fedssl.engines.flower.transport import GridTransport
from fedssl.engines.remote.messages import LONGEST_FAULT
from fedssl.util.errors import UserError
from fedssl.util.text import escape

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

GREETING_TIMEOUT = 120.0  # seconds that a node has to say who it is
PATIENCE = 30.0  # seconds that nodes have to answer when enough sites are there
PAUSE = 0.5  # seconds between two looks at answers
RETRY_AFTER = 30.0  # seconds until a node that could not take part is asked again


class SiteTransport(GridTransport):
    """Sends requests to real sites: each is one client, whichever node it has now."""

    def __init__(self, grid: Grid, settings: Engine, minimum: int = 1) -> None:
        super().__init__(grid)
        self.settings = settings
        self.minimum = minimum  # sites without which a round is skipped
        self.sites: list[Introduction] = []  # those of the run, by client
        self.connected: dict[int, Introduction] = {}  # by node
        self.greeted: dict[str, int] = {}  # nodes that were asked who they are, by message
        self.asked: dict[int, float] = {}  # when a node was last asked
        self.refused: dict[int, str] = {}  # why a node cannot take part
        self.unneeded: set[str] = set()  # sites that were said to have nothing to do

    def place(self, clients: list[int]) -> dict[int, int]:
        """Return the nodes of the sites that are connected; a site that restarts gets a new one.

        New nodes are asked who they are. Nobody waits for their answers, unless too few sites are
        there without them.
        """
        wanted = {self.sites[k].site for k in clients}
        needed = min(self.minimum, len(wanted))
        self.greet_new_nodes()
        while len(wanted & self._present()) < needed and self.greeted:
            time.sleep(PAUSE)
            self.greet_new_nodes()
        members = {site.site for site in self.sites}
        for site in self.connected.values():
            if site.site not in members | self.unneeded:
                self.unneeded.add(site.site)
                say(self._describe_unneeded(site))
        nodes = {site.site: node for node, site in self.connected.items()}
        return {k: nodes[self.sites[k].site] for k in clients if self.sites[k].site in nodes}

    def _present(self) -> set[str]:
        return {site.site for site in self.connected.values()}

    def _describe_unneeded(self, site: Introduction) -> str:
        """Say why a site is not asked: a run keeps the sites that it started with."""
        line = f"site {site.name} has nothing to do: the run has its {len(self.sites)} sites"
        if site.name not in {member.name for member in self.sites}:
            return line
        return (
            f"{line}, and one of them is another {site.name}. If it should be the same, restore "
            "its FEDSSL_STATE or the place of its folder, or start a new run."
        )

    def greet_new_nodes(self) -> None:
        """Ask new nodes who they are, read the answers that came, and forget nodes that are gone.

        A node that did not answer, or cannot take part, is asked again after a while.
        """
        nodes, now = set(self.grid.get_node_ids()), time.monotonic()
        self.connected = {node: site for node, site in self.connected.items() if node in nodes}
        self.greeted = {m: node for m, node in self.greeted.items() if node in nodes}
        recent = {n for n in self.refused if now - self.asked[n] < RETRY_AFTER}
        for node in sorted(nodes - self.connected.keys() - set(self.greeted.values()) - recent):
            question = write_greeting({})
            number = self.post(node, f"query.{GREETING}", question, GREETING_TIMEOUT)
            self.asked[node] = now
            if number is None:
                self._refuse(node, "could not be sent")
            else:
                self.greeted[number] = node
        for node, content in sorted(self.collect(self.greeted).items()) if self.greeted else ():
            answer = _read_introduction(content, self.settings.max_samples)
            if isinstance(answer, Introduction) and self._has_other_weights(answer):
                answer = "its weights that do not train are not those that it started the run with"
            if isinstance(answer, Introduction):
                self.connected[node] = answer
                self.refused.pop(node, None)
            else:
                self._refuse(node, answer)
        for number, node in list(self.greeted.items()):
            if now - self.asked[node] > GREETING_TIMEOUT:
                del self.greeted[number]
                self._refuse(node, "no answer")

    def _has_other_weights(self, site: Introduction) -> bool:
        """Return whether a site of the run has come back with others, from another file."""
        return any(m.site == site.site and m.constants != site.constants for m in self.sites)

    def _refuse(self, node: int, reason: str) -> None:
        """Do not ask a node for a while, and say so if the reason is new."""
        if self.refused.get(node) != reason:
            say(f"node {node} cannot take part: {reason}")
        self.refused[node], self.asked[node] = reason, time.monotonic()

    def wait(self, count: int, timeout: float, only: set[str] | None = None) -> list[Introduction]:
        """Wait for ``count`` sites (of ``only``) and return the first ones in order of name.

        Once they are there, nodes that were just asked have a little time to answer.
        """
        end, enough_since = time.monotonic() + timeout, None
        while True:
            self.greet_new_nodes()
            present = [s for s in self.connected.values() if only is None or s.site in only]
            sites, now = {site.site: site for site in present}, time.monotonic()
            if len(sites) >= count:
                enough_since = enough_since or now
                if not self.greeted or now > min(end, enough_since + PATIENCE):
                    return sorted(sites.values(), key=lambda site: (site.name, site.site))[:count]
            elif now > end:
                self._give_up(count, timeout, present)
            time.sleep(PAUSE)

    def _give_up(self, count: int, timeout: float, present: list[Introduction]) -> NoReturn:
        names = {site.site: site.name for site in present}
        same = f"; {len(present) - len(names)} more with the same folder on the same machine"
        listed = ", ".join(sorted(names.values())) or "none"
        twice = same if len(present) > len(names) else ""
        raise UserError(
            f"only {len(names)} of {count} sites connected in time ({listed}{twice})",
            key="engine.timeout",
            value=f"{timeout:g}",
            fix=f"{self._suggest_fix(count - len(names))}, then run again.",
        )

    def _suggest_fix(self, missing: int) -> str:
        nodes = set(self.grid.get_node_ids())
        refused = [node for node in self.refused if node in nodes]
        if len(refused) < missing:
            return "Start the others"
        return f"Correct what the lines above say of {len(refused)} nodes"


def say(line: object) -> None:
    """Print a line on stderr at once, before Flower shows its own."""
    print(f"fedssl: {escape(line)}", file=sys.stderr, flush=True)


def _read_introduction(content: RecordDict | str, most: int) -> Introduction | str:
    """Return a node's introduction, or why it cannot take part."""
    if isinstance(content, str):
        return content
    try:
        facts = read_greeting(content)
        version = facts.get("version", "of an older version")[:40]
        if version != __version__:
            return f"has fedssl {version}, the server {__version__}: install the same version"
        if "fault" in facts:
            return facts["fault"][:LONGEST_FAULT]
        site = Introduction.from_dict(json.loads(facts["facts"]))
        if site.samples > most:
            return f"claims {site.samples:,} images, above engine.max_samples={most}"
        return site
    except Exception as error:  # a stranger may send anything
        return f"a message that fedssl did not write ({type(error).__name__})"
