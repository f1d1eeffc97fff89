"""A real site's own count of the privacy that runs spend of its images.

A site does not rely on the server's count. It knows in which rounds it took part, and only these
tell of it. So each of them counts in full: a site cannot check that the server drew at random.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from fedssl.engines.base import Engine
from fedssl.engines.remote.messages import Request
from fedssl.privacy.ledger import Entries, Entry, Ledger, add_releases
from fedssl.privacy.noise import Noisy
from fedssl.util.errors import UserError

FILE = "epsilon.json"  # in the site's folder, beside its record of what it sent


class SiteBudget:
    """The rounds with noise that a site took part in, in all runs."""

    def __init__(self, ledger: Ledger, aggregator: Noisy) -> None:
        self.ledger, self.aggregator = ledger, aggregator
        self.limit = aggregator.privacy.budget
        self.round = replace(aggregator.whole_round, clients=1, drawn=1)

    def check(self) -> None:
        """Refuse another round if it would exceed the budget of the site's own recipe."""
        self._check(self.ledger.read())

    def count(self, request: Request) -> None:
        """Count a request's round, the first time that it asks for anything.

        A server that was started again repeats a round with new noise: that is another one.
        """
        run, round = request.history.names[0], f"{request.history.names[-1]}-{request.round}"
        with self.ledger.change() as entries:
            entry = entries.get(run, Entry())
            if entry.about != round:
                self._check(entries)
                entries[run] = Entry(entry.releases + Counter([self.round]), round)

    def _check(self, entries: Entries) -> None:
        spent = add_releases(entries)
        if self.limit is None:
            return
        if self.aggregator.epsilon(spent + Counter([self.round])) > self.limit:
            raise UserError(
                f"this site has spent ε = {self.aggregator.epsilon(spent):.3g}, and another round "
                "would exceed the budget",
                key="privacy.budget",
                value=self.limit,
                fix="Raise it in the recipe of all sites, or use more noise.",
            )


def find_budget(engine: Engine, folder: Path) -> SiteBudget | None:
    """Return a real site's count of what noise spends, which is in a folder; none without noise."""
    if not isinstance(engine.aggregator, Noisy):
        return None
    return SiteBudget(Ledger(folder / FILE), engine.aggregator)
