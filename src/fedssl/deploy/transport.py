"""Reach real sites: ask new nodes who they are, and find each site's node."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from fedssl import __version__
from fedssl.deploy.introduction import Introduction
from fedssl.engines.flower.messages import GREETING, read_greeting, write_greeting
from fedssl.engines.flower.transport import GridTransport
from fedssl.engines.remote.messages import LONGEST_FAULT
from fedssl.util.errors import UserError

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.serverapp import Grid

GREETING_TIMEOUT = 120.0  # seconds that a node has to say who it is
RETRY_AFTER = 30.0  # seconds until a node that could not take part is asked again


class SiteTransport(GridTransport):
    """Sends requests to real sites: each is one client, whichever node it has now."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.sites: list[Introduction] = []  # those of the run, by client
        self.connected: dict[int, Introduction] = {}  # by node
        self.refused: dict[int, tuple[float, str]] = {}  # when a node was last asked, and why not
        self.unneeded: set[str] = set()  # sites that were said to have nothing to do

    def place(self, clients: list[int]) -> dict[int, int]:
        """Return the nodes of the sites that are connected; a site that restarts gets a new one."""
        self.greet_new_nodes()
        members = {site.site for site in self.sites}
        for site in self.connected.values():
            if site.site not in members | self.unneeded:
                self.unneeded.add(site.site)
                say(self._describe_unneeded(site))
        nodes = {site.site: node for node, site in self.connected.items()}
        return {k: nodes[self.sites[k].site] for k in clients if self.sites[k].site in nodes}

    def _describe_unneeded(self, site: Introduction) -> str:
        """Say why a site is not asked: a run keeps the sites that it started with."""
        line = f"site {site.name} has nothing to do: the run has its {len(self.sites)} sites"
        if site.name not in {member.name for member in self.sites}:
            return line
        return (
            f"{line}, and one of them is another {site.name}. If it should be the same, restore "
            "its FEDSSL_STATE or the place of its folder, or start a new run."
        )

    def greet_new_nodes(self, timeout: float = GREETING_TIMEOUT) -> None:
        """Ask new nodes who they are, and forget those that are gone.

        A node that did not answer, or cannot take part, is asked again only after a while, so that
        the others do not wait for it in every exchange.
        """
        nodes, now = set(self.grid.get_node_ids()), time.monotonic()
        self.connected = {node: site for node, site in self.connected.items() if node in nodes}
        recent = {n for n, (when, _) in self.refused.items() if now - when < RETRY_AFTER}
        new = nodes - self.connected.keys() - recent
        question = (f"query.{GREETING}", write_greeting({}))
        answers = self.exchange(dict.fromkeys(new, question), timeout) if new else {}
        for node in sorted(new):
            answer = _read_introduction(answers.get(node, "no answer"))
            if isinstance(answer, Introduction):
                self.connected[node] = answer
                self.refused.pop(node, None)
                continue
            if self.refused.get(node, (0.0, ""))[1] != answer:
                say(f"node {node} cannot take part: {answer}")
            self.refused[node] = (time.monotonic(), answer)

    def wait(self, count: int, timeout: float, only: set[str] | None = None) -> list[Introduction]:
        """Wait for ``count`` sites (of ``only``) and return the first ones in order of name."""
        end = time.monotonic() + timeout
        while True:
            self.greet_new_nodes(max(1.0, min(GREETING_TIMEOUT, end - time.monotonic())))
            present = [s for s in self.connected.values() if only is None or s.site in only]
            sites = {site.site: site for site in present}
            if len(sites) >= count:
                return sorted(sites.values(), key=lambda site: (site.name, site.site))[:count]
            if time.monotonic() > end:
                names = ", ".join(sorted(site.name for site in sites.values())) or "none"
                twice = len(present) - len(sites)
                same = f"; {twice} more with the same folder on the same machine" if twice else ""
                raise UserError(
                    f"only {len(sites)} of {count} sites connected in time ({names}{same})",
                    key="engine.timeout",
                    value=f"{timeout:g}",
                    fix=f"{self._suggest_fix(count - len(sites))}, then run again.",
                )
            time.sleep(1.0)

    def _suggest_fix(self, missing: int) -> str:
        nodes = set(self.grid.get_node_ids())
        refused = [node for node in self.refused if node in nodes]
        if len(refused) < missing:
            return "Start the others"
        return f"Correct what the lines above say of {len(refused)} nodes"


def say(line: object) -> None:
    """Print a line on stderr at once, before Flower shows its own."""
    print(f"fedssl: {line}", file=sys.stderr, flush=True)


def _read_introduction(content: RecordDict | str) -> Introduction | str:
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
        return Introduction.from_dict(json.loads(facts["facts"]))
    except Exception as error:  # a stranger may send anything
        return f"a message that fedssl did not write ({type(error).__name__})"
