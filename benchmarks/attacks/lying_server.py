"""A server that asks the sites of a run for more than a secure sum (``sums.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from secure_run import MODEL, Finding, Run, hash_model

from fedssl.engines.remote.codec import MalformedError
from fedssl.privacy.secure import Masker, masks
from fedssl.privacy.secure.identity import Identity, load_identity


class Liar:
    """A server that has some clients' help, and asks the other sites for what it likes."""

    def __init__(self, run: Run) -> None:
        self.run, self.chance = run, run.chance
        self.rate = run.chance.choice([0.02, 0.1, 0.4])  # of lies
        most = max(0, min(2 * run.threshold - run.sites - 1, run.sites - 2))
        helpers = run.chance.sample(range(run.sites), run.chance.randint(0, most))
        self.helpers = {k: Masker(k, run.context, run.threshold) for k in helpers}
        self.signers = {k: self._identity(k) for k in helpers}
        self.sites = [k for k in range(run.sites) if k not in helpers]
        self.keys: dict[int, Any] = {}
        self.bundles: dict[int, dict[int, tuple[bytes, list[bytes]]]] = {}  # by receiver, sender
        self.senders: dict[int, tuple[list[int], str]] = {}  # whom a vector is masked with
        self.signed: dict[tuple[int, ...], dict[int, bytes]] = {}  # by survivors
        self.counts: Counter[str] = Counter()

    def _identity(self, site: int) -> Identity:
        return load_identity(self.run.folder / str(site) / "identity")

    def lies(self) -> bool:
        """Return whether to lie in the next message."""
        return self.chance.random() < self.rate

    def attack(self) -> Counter[str]:
        """Try everything, step by step, then count what the answers open."""
        everybody = list(range(self.run.sites))
        for k, masker in self.helpers.items():
            self.keys[k] = masker.keys(self.signers[k])
        for k in self.sites:
            self.keys[k] = self.try_some(k, "keys", lambda k: {}) or {}
        self.keys = {k: reply for k, reply in self.keys.items() if reply}
        cohorts = [everybody, self.drop_some(everybody) if self.lies() else everybody]
        for k in self.sites:
            self.try_some(k, "shares", lambda k: self.name_clients(cohorts), self.note_bundles)
        for k, masker in self.helpers.items():
            self.note_bundles(
                k, masker.shares(self.list_keys(everybody)), self.list_keys(everybody)
            )
        for k in self.sites:
            self.try_some(k, "masked", self.name_senders)
        vectors = sorted(self.senders)
        groups = [sorted({*vectors, *self.helpers}) for _ in range(2)]
        groups[0] = self.drop_some(groups[0]) if self.chance.random() < 0.3 else groups[0]
        groups[1] = self.drop_some(groups[1]) if self.lies() else groups[0]
        for k in self.sites:
            self.try_some(k, "agree", lambda k: self.name_survivors(groups), self.note_signature)
        for k in self.sites:
            self.try_some(k, "unmask", lambda k: self.name_signers())
        self.check()
        return self.counts

    def try_some(
        self,
        site: int,
        step: str,
        make: Callable[[int], Any],
        note: Callable[[int, Any, Any], None] = lambda *_: None,
    ) -> Any:
        """Ask a site up to four times for a step, in ways that may differ."""
        reply = None
        for _ in range(self.chance.randint(1, 4)):
            message = make(site)
            model = MODEL + int(self.lies())
            try:
                got = self.run.ask(site, step, message, model)
            except MalformedError:
                self.counts["refused"] += 1
                continue
            self.counts["answered"] += 1
            if step == "masked":
                self.senders.setdefault(site, (message["senders"], hash_model(model)))
            reply = got
            note(site, got, message)
        return reply

    def drop_some(self, clients: Sequence[int]) -> list[int]:
        """Return the clients without one or two."""
        gone = self.chance.sample(list(clients), min(len(clients), self.chance.randint(1, 2)))
        return [k for k in clients if k not in gone]

    def list_keys(self, clients: Sequence[int]) -> dict[str, Any]:
        """Return the message that names clients and their keys."""
        there = [k for k in clients if k in self.keys]
        return {
            "clients": there,
            "keys": [key for k in there for key in self.keys[k]["keys"]],
            "signed": [item for k in there for item in self.keys[k]["signed"]],
        }

    def name_clients(self, cohorts: Sequence[Sequence[int]]) -> Any:
        """Name the clients of a sum: some, with keys of others, twice, or invented."""
        message = self.list_keys(self.chance.choice(cohorts))
        if not self.lies() or not message["clients"]:
            return message
        place, kind = self.chance.randrange(len(message["clients"])), self.chance.random()
        if kind < 0.25:  # the keys of one are those of another
            message["keys"][3 * place : 3 * place + 3] = message["keys"][:3]
        elif kind < 0.5:  # the server's own keys in the middle
            client = message["clients"][place]
            own = Masker(client, self.run.context, self.run.threshold).keys(Identity())
            message["keys"][3 * place : 3 * place + 3] = own["keys"]
            message["signed"][2 * place : 2 * place + 2] = own["signed"]
        elif kind < 0.75:  # one more
            client = self.chance.choice([self.run.sites, 99])
            own = Masker(client, self.run.context, self.run.threshold).keys(Identity())
            message["clients"].append(client)
            message["keys"] += own["keys"]
            message["signed"] += own["signed"]
        else:
            message["clients"][place] = message["clients"][0]
        return message

    def note_bundles(self, sender: int, reply: Any, message: Any) -> None:
        """Keep a client's bundles and marks by their receivers."""
        clients = sorted(message["clients"])
        receivers = [k for k in clients if k != sender]
        for receiver, bundle in zip(receivers, reply["bundles"], strict=True):
            place = clients.index(receiver)
            told = reply["marks"][2 * place : 2 * place + 2]
            self.bundles.setdefault(receiver, {})[sender] = (bundle, told)

    def name_senders(self, site: int) -> Any:
        """Name whom a vector is to be masked with, with bundles that may be others'."""
        there = self.bundles.get(site, {})
        senders = sorted(there)
        if self.lies():
            senders = self.drop_some(senders)
        bundles = [there[k][0] for k in senders]
        marks = [each for k in senders for each in there[k][1]]
        if self.lies() and self.chance.random() < 0.3:
            bundles, marks = bundles[::-1], marks[::-1]
        if self.lies() and self.chance.random() < 0.3:
            senders = [*senders[1:], self.chance.choice([site, 99])]
        return {"senders": senders, "bundles": bundles, "marks": marks}

    def name_survivors(self, groups: Sequence[list[int]]) -> Any:
        """Name the survivors: one or the other group, or any other."""
        if not self.lies():
            return {"survivors": self.chance.choice(groups)}
        return {"survivors": self.drop_some([*groups[0], *self.chance.choice([[], [99]])])}

    def note_signature(self, site: int, reply: Any, message: Any) -> None:
        """Keep a signature by the survivors that it is for; the helpers sign everything."""
        survivors = tuple(sorted(message["survivors"]))
        signed = self.signed.setdefault(survivors, {})
        signed[site] = reply["signature"][0]
        text = masks.survivors_statement(self.run.context, survivors)
        signed |= {k: identity.sign(text) for k, identity in self.signers.items()}

    def name_signers(self) -> Any:
        """Show signatures: of one list of survivors, of all lists, or doubled."""
        lists = list(self.signed.values()) or [{}]
        shown = dict(self.chance.choice(lists))
        if self.lies():
            for each in lists:
                shown = {**each, **shown}
        signers = sorted(shown)
        signatures = [shown[k] for k in signers]
        if signers and self.lies():
            signers[-1] = signers[0]
        return {"signers": signers, "signatures": signatures}

    def check(self) -> None:
        """Count the shares that the server has, and find the sums that they open."""
        run, helpers = self.run, set(self.helpers)
        for k in self.sites:
            masker = run.masker(k)
            for peer, identity in (masker.identities if masker else {}).items():
                if identity != run.identities[peer]:
                    raise Finding(f"site {k} takes a key of the server's for client {peer}")
        seeds: dict[int, set[int]] = {k: set(helpers) for k in range(run.sites)}
        secrets: dict[int, set[int]] = {k: set(helpers) for k in range(run.sites)}
        for holder in self.sites:
            told, masker = run.replies.get((run.round, holder, "unmask")), run.masker(holder)
            if told is None or masker is None:
                continue
            for peer, share in zip(sorted(masker.peers), told["shares"], strict=True):
                known = seeds if peer in masker.survivors else secrets
                if share:
                    known[peer].add(holder)
        bare = {k for k in seeds if len(seeds[k]) >= run.threshold}
        lost = {k for k in secrets if len(secrets[k]) >= run.threshold} | helpers
        opened = [k for k in find_groups(self.senders, lost, helpers) if k <= bare]
        if len(opened) > 1:
            raise Finding(f"two sums: over {opened}")
        for group in opened:
            self.counts["opened sums"] += 1
            if len(group) + len(helpers) < run.threshold:
                raise Finding(f"a sum of {len(group)} sites, with {len(helpers)} helpers")


def find_groups(
    senders: Mapping[int, tuple[list[int], str]], lost: set[int], helpers: set[int]
) -> list[set[int]]:
    """Return the sets of sites whose masks cancel, except for those that a server can rebuild."""
    groups, left = list[set[int]](), set(senders)
    while left:
        group, new, cancels = set[int](), {left.pop()}, True
        while new:
            site = new.pop()
            group.add(site)
            peers, asked = senders[site]
            for peer in peers if site not in lost else ():
                if peer in lost:
                    continue
                theirs, same = senders.get(peer, ((), ""))
                if site not in theirs or same != asked:
                    cancels = False
                elif peer not in group:
                    new.add(peer)
        left -= group
        if cancels:
            groups.append(group)
    return groups
