"""Count a run with noise in the ledger of its images, and keep it within ``privacy.budget``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fedssl.data.places import state_home
from fedssl.privacy.accountant import VACUOUS, Releases, count_rounds
from fedssl.privacy.ledger import Entries, Entry, Ledger, add_releases
from fedssl.privacy.noise import Noisy
from fedssl.util.errors import UserError

LEDGERS = "privacy"  # folder
VACUOUS_NOTE = (
    f"ε above {VACUOUS:g} is vacuous: it promises nothing. Use more noise, fewer rounds, or more "
    "clients in the same cohort size."
)


class Budget:
    """The privacy that a run and all others on the same images spend.

    A round is counted before it starts, so that neither a crash nor a run at the same time can
    exceed the budget. Afterwards the count is corrected if the round released less.
    """

    def __init__(self, images: str, aggregator: Noisy) -> None:
        name = hashlib.sha256(images.encode()).hexdigest()[:16]
        self.ledger = Ledger(state_home() / LEDGERS / f"{name}.json")
        self.aggregator, self.account = aggregator, aggregator.account
        self.limit = aggregator.privacy.budget
        self.about = ""  # the run's folder
        self.stopped = False  # before a round that would have exceeded the budget

    def resume(self) -> None:
        """Count what the run released after its last checkpoint."""
        entry = self.ledger.read().get(self.account.run, Entry())
        self.account.lost = entry.releases - self.account.releases()

    def check(self) -> None:
        """Refuse a run that cannot do a single round."""
        entries = self.ledger.read()
        if not self._allows(entries, 1):
            spent = self.aggregator.epsilon(self._plan(entries, 0))
            one = self.aggregator.epsilon(self._plan(entries, 1))
            raise UserError(
                f"one round would take the ε of these images from {spent:.3g} to {one:.3g}",
                key="privacy.budget",
                value=self.limit,
                fix="Raise it, or use more noise (privacy.noise).",
            )

    def describe(self, rounds: int) -> Iterator[str]:
        """Say what the run will spend in so many more rounds."""
        entries = self.ledger.read()
        left = count_rounds(lambda n: self._allows(entries, n), rounds)
        if left < rounds:
            yield (
                f"privacy.budget={self.limit:g} ends this run after {left} of {rounds} rounds. "
                "Schedules of the learning rate are made for all of them."
            )
        own = self.account.releases() + Counter({self.aggregator.whole_round: left})
        spent = [self.aggregator.epsilon(own), self.aggregator.epsilon(self._plan(entries, left))]
        line = f"Privacy: ε = {spent[0]:.3g} for δ = {self.aggregator.privacy.delta:g} at the end"
        if others := len(entries.keys() - {self.account.run}):
            line += f", {spent[1]:.3g} with all {others + 1} runs on these images"
        yield f"{line}."
        if spent[1] > VACUOUS:
            yield VACUOUS_NOTE

    def reserve(self) -> bool:
        """Count the next round; return false if it would exceed the budget."""
        with self.ledger.change() as entries:
            self.stopped = not self._allows(entries, 1)
            if not self.stopped:
                own = self.account.releases() + Counter([self.aggregator.whole_round])
                entries[self.account.run] = Entry(own, self.about)
        return not self.stopped

    def describe_stop(self, round: int) -> str:
        """Say why the run ends early."""
        spent = self.aggregator.epsilon(self._plan(self.ledger.read(), 0))
        return (
            f"Stopped after round {round}: another one would exceed privacy.budget={self.limit:g}. "
            f"ε is {spent:.3g} for all runs on these images."
        )

    def settle(self) -> None:
        """Correct the count if the round ended before all of its sums were released."""
        own = self.account.releases()
        if self.ledger.read()[self.account.run].releases != own:
            with self.ledger.change() as entries:
                entries[self.account.run] = Entry(own, self.about)

    def summarize(self) -> dict[str, Any]:
        """Return ε of all runs on these images, their number, and the budget that ended the run."""
        entries = self.ledger.read()
        total = {"epsilon_total": self.aggregator.epsilon(self._plan(entries, 0))}
        runs = {"runs_counted": len(entries.keys() | {self.account.run})}
        return total | runs | ({"budget_spent": self.limit} if self.stopped else {})

    def _allows(self, entries: Entries, rounds: int) -> bool:
        if self.limit is None:
            return True
        return self.aggregator.epsilon(self._plan(entries, rounds)) <= self.limit

    def _plan(self, entries: Entries, rounds: int) -> Releases:
        """Return what all runs will have released after so many more rounds of this one."""
        own = self.account.releases() + Counter({self.aggregator.whole_round: rounds})
        return add_releases(entries, self.account.run) + own
