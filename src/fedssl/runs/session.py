"""From a configuration to everything that a run needs, with every check that needs no training."""

from __future__ import annotations

import contextlib
import copy
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedssl import config as configuration
from fedssl import privacy
from fedssl.config import Config, SourceParams
from fedssl.data import sources
from fedssl.data.augment import Augmentation
from fedssl.data.dataset import Census, Dataset, Groups, Split
from fedssl.data.folders import describe_unused
from fedssl.data.labels import draw_share
from fedssl.data.load import convert_channels, load_dataset
from fedssl.data.partition import Folder, called, client_names, partition, uneven
from fedssl.data.random import choose, key, mix
from fedssl.engines.base import Engine
from fedssl.engines.local import LocalEngine
from fedssl.evaluate import check as check_protocols
from fedssl.evaluate import (
    collaborations,
    collaborative,
    judge,
    linear,
    parse,
    per_client,
    protocols,
)
from fedssl.evaluate import notes as judge_notes
from fedssl.evaluate.features import extract, pool_cases, top1
from fedssl.federation.aggregate import Aggregator
from fedssl.federation.algorithm import Algorithm
from fedssl.federation.client import Client
from fedssl.federation.sampling import cohort_size
from fedssl.federation.server import Server
from fedssl.models.flat import Flat
from fedssl.models.network import Network, Tower, build
from fedssl.objectives.base import Objective
from fedssl.training.trainer import Trainer
from fedssl.util import plugins
from fedssl.util.errors import UserError
from fedssl.util.process import keep_memory
from fedssl.util.trees import mean

Probes = dict[int | None, list[linear.Head]]  # by client; None: of the global model
JUDGED_CLIENTS = 5  # personal models that an evaluation averages over
# Steps of a run from which compiling one is paid back. BYOL, ResNet-18, batch 128 on an H200
# (results/measured.jsonl): the first round took 22 to 63 s longer, a step 9 ms in place of 46.
WORTH_COMPILING = 2000


@dataclass
class Session:
    """A run that could start now."""

    config: Config
    dataset: Dataset
    engine: Engine
    server: Server
    cohort: int  # clients in a round
    # Each client's accuracy in the last ``judge_clients``, by model.
    client_scores: dict[str, dict[str, float]] = field(default_factory=dict)
    site_names: list[str] | None = None  # of a deployment
    classes: int | None = None  # that the network was built for, where the data has others
    # The federations of few labels that ``collaborative`` fine-tunes in, by protocol.
    tuned: dict[str, Session] = field(default_factory=dict)
    drawn: tuple[int, NDArray[np.int64]] | None = None  # a round, and who takes part
    # Seconds that went elsewhere than into rounds, by what for, since the last line of metrics.
    overhead: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time as overhead."""
        started = time.perf_counter()
        yield
        self.overhead[what] += time.perf_counter() - started

    def take_overhead(self) -> dict[str, float]:
        """What has come together so far; counting starts anew."""
        taken = {what: round(seconds, 6) for what, seconds in self.overhead.items()}
        self.overhead.clear()
        return taken

    @property
    def judged(self) -> bool:
        """Whether there are images here to judge an encoder with."""
        return len(self.dataset.train) > 0

    @property
    def judges(self) -> Literal["global", "personal"]:
        """Which model is the result; personal ones never leave their sites."""
        return self.algorithm.judges if self.site_names is None else "global"

    @property
    def trainer(self) -> Trainer:
        """The network and its data."""
        return self.engine.trainer

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs."""
        return self.engine.algorithm

    def cohort_ids(self, round: int) -> NDArray[np.int64]:
        """Who takes part in a round.

        With noise for privacy nobody may be able to tell: it counts on a secret draw.
        """
        if self.config.privacy.noise is not None:
            drawn = secrets.SystemRandom().sample(range(len(self.engine.groups)), self.cohort)
            return np.array(sorted(drawn), dtype=np.int64)
        state = key(self.config.seed, "cohort", round)
        return choose(state, len(self.engine.groups), self.cohort)

    @cached_property
    def clients(self) -> Groups:
        """Who holds what, also where an algorithm has pooled it."""
        pools = self.algorithm.pools_data
        return client_data(self.config, self.dataset) if pools else self.engine.groups

    @cached_property
    def public(self) -> Client | None:
        """The images that the server has and may show to all clients, as a client's."""
        members = public_images(self.config, self.dataset)
        if not len(members):
            return None
        ids, sizes = np.array([len(self.engine.groups)]), np.array([len(members)])
        lr = self.config.client.lr
        return Client(self.trainer, members, ids, sizes, 0, lr, {})

    @cached_property
    def names(self) -> list[str]:
        """The clients' names: those of their folders, else their numbers."""
        if self.site_names is not None:
            return self.site_names
        return client_names(self.config.partition, self.clients, self.dataset)

    def notes(self) -> Iterator[str]:
        """What a user should know before the first round."""
        if self.algorithm.gathers:
            yield (
                f"{self.config.algorithm.name}: the server sees each client's own reply to "
                f"{', '.join(self.algorithm.gathers)}, not only means (docs/privacy.md)"
            )
        sizes = self.engine.groups.sizes.tolist()
        if single := privacy.told(self.config, self.algorithm, sizes, self.names):
            helps = privacy.remedy(self.config, self.algorithm, sizes)
            name = self.config.algorithm.name
            yield f"{name}: {single} (docs/privacy.md); this helps: {helps}"
        if self.algorithm.note is not None:
            yield self.algorithm.note
        yield from self.judging_notes()
        every, rounds = self.config.evaluate.every, self.config.rounds
        if self.judged and 0 < rounds < every:
            yield f"evaluate.every={every}: there are {rounds} rounds, so only the end is judged"
        if self.site_names is not None:
            return
        if self.config.data.name == "folder":
            yield self._found()
            yield from describe_unused(self.config.data)
        named, given = self.config.partition.name, self.dataset.clients
        if given and named != "folder" and not self.algorithm.pools_data:
            yield (
                f"the data has folders of {len(given)} clients, and partition.name={named} makes "
                f"{len(self.engine.groups)} others of it; partition.name=folder follows the folders"
            )
        yield from uneven(self.config.partition, self.clients.sizes)
        if "per-client" in (*self.protocols, *(self.config.evaluate.monitor or ())):
            without = [self.names[k] for k in np.flatnonzero(self.client_tests.sizes == 0)]
            if without:
                yield (
                    f"per-client: {len(without)} of {len(self.names)} clients have no test images "
                    f"and are left out ({_shown(without)})"
                )
        shares = collaborations(self.config.evaluate).items()
        for spec, share in {words.partition("=")[2]: share for words, share in shares}.items():
            train = self.dataset.train
            yield from collaborative.notes(spec, self.config, self.clients, train, share)

    def judging_notes(self) -> Iterator[str]:
        """Of these, what is about judging alone."""
        if self.judged:
            data, settings = self.dataset, self.config.evaluate
            yield from judge_notes(settings, data.train, data.test, len(data.classes))

    def _found(self) -> str:
        """What the user's folders were taken for."""
        classes, clients = self.dataset.classes, self.clients
        made = "" if isinstance(self.config.partition, Folder.Params) else "made "
        held = f"{len(clients)} {made}clients"
        if self.names != list(map(str, range(len(clients)))):
            held += f" ({_shown(self.names)})"
        labels = f"{len(classes)} classes ({_shown(classes)})" if classes else "no classes"
        return f"folders: {labels}, {held}; data.levels says what folders mean"

    def encoder(self, tower: int = 0) -> Tower:
        """One tower of the network that clients train (whatever weights it holds now)."""
        return cast(Tower, self.trainer.network.towers[tower])

    def judge(
        self,
        weights: Tensor,
        named: tuple[str, ...] | None = None,
        probes: list[linear.Head] | None = None,
    ) -> dict[str, float]:
        """The numbers of an encoder under the configured protocols, or under those named."""
        train, test = self.judged_splits
        specs = named or self.protocols
        # A network with a classifier is judged by it on held-out images, and not by a probe.
        own = [s for s in specs if "head" in self.protocols and parse(s)[0] == "heldout"]
        rest = tuple(spec for spec in specs if spec not in own)
        settings = replace(self.config.evaluate, protocols=rest)
        body, modality, device = self.body(weights), self.modality, self.trainer.device
        results = judge(
            body.encoder,
            train,
            test,
            len(self.dataset.classes),
            settings,
            self.config.seed,
            device,
            views=self._views,
            modality=modality,
            holdout=self.config.data.holdout,
            probes=probes,
        )
        for spec in specs:
            name, share = parse(spec)
            if name == "head" and test is not None:
                results["head_top1"] = self._own_accuracy(body, test)
            elif spec in own and share is not None:
                kept = self._kept(train, share)
                results[f"{spec}_top1"] = self._own_accuracy(body, kept)
            elif name == "collaborative" and share is not None:
                results[f"{spec}_top1"] = self._fine_tune(body.encoder, spec, share)
        return results

    def _own_accuracy(self, body: Tower, split: Split) -> float:
        """Top-1 of the network's own classifier."""
        assert split.labels is not None
        # The head is linear, so a case's mean logits are those of its mean encoding.
        logits = extract(body, split.images[self.modality], device=self.trainer.device)
        scores, labels = pool_cases(logits, split.labels, split.cases)
        return top1(scores.argmax(1), labels)

    def _kept(self, train: Split, share: float) -> Split:
        """Training images that are held out: as many of them as ``heldout`` is asked for."""
        assert train.labels is not None
        classes, seed = len(self.dataset.classes), self.config.seed
        index = draw_share(train.labels, share, classes, seed)
        return Split(tuple(images[index] for images in train.images), train.labels[index])

    def _fine_tune(self, encoder: nn.Module, spec: str, share: float) -> float:
        """Top-1 after supervised FedAvg from this encoder; what it needs is built once."""
        if spec not in self.tuned:
            train, test = self.judged_splits
            assert test is not None
            drawn = collaborative.draw(self.config, self.clients, train, share)
            few, groups = collaborative.data(self.dataset, train, test, self.modality, drawn)
            settings = collaborative.settings(self.config, len(groups))
            network = collaborative.classifier(encoder, len(few.classes))
            self.tuned[spec] = assemble(settings, few, groups, network=network)
        return collaborative.accuracy(self.tuned[spec], encoder)

    def body(self, weights: Tensor) -> Tower:
        """The judged tower with these weights: a copy, so that judging changes no client's work."""
        self.trainer.load(weights)
        tower = int(self.config.evaluate.tower == "second")
        return copy.deepcopy(self.encoder(tower)).float().eval()

    @property
    def modality(self) -> int:
        """Which images the judged tower sees."""
        tower = int(self.config.evaluate.tower == "second")
        return tower % len(self.dataset.train.images)

    def untrained(self) -> Tensor:
        """Weights at random, whatever weights the run itself started from."""
        if self.config.encoder.init is None:
            return self.trainer.initial
        fresh = replace(self.config, encoder=replace(self.config.encoder, init=None))
        images = self.dataset.train.images
        channels = tuple(i.shape[1] for i in images)
        size, classes = min(images[0].shape[2:]), self.classes or len(self.dataset.classes)
        network = build_network(fresh, self.trainer.objective, channels, size, classes)
        return Flat(network).vector.to(self.trainer.initial)

    def judge_untrained(self) -> dict[str, float]:
        """The numbers of weights at random, which are everybody's: so ``per-client_top1``, too."""
        weights, probes = self.untrained(), list[linear.Head]()
        results = self.judge(weights, probes=probes)
        if "per-client" in self.protocols:
            found = per_client.summary("global", self._client_scores(weights, *probes))
            results |= {name.replace("_global", ""): value for name, value in found.items()}
        return results

    def number_of(self, client: int) -> int:
        """Which of the server's models a client trains, where the server has several."""
        path = self.algorithm.personal
        own = None if path is None else self.engine.states.get_leaf(client, path)
        return 0 if own is None or own.ndim else int(own)

    def global_weights(self, number: int = 0) -> Tensor:
        """A global model; layers that never leave a client are the mean of its clients' own."""
        trainer, states = self.trainer, self.engine.states
        weights = self.algorithm.numbered(self.server, number)
        if trainer.kept is None:
            return weights
        members = [k for k in sorted(states) if self.number_of(k) == number]
        leaves = ([states.get_leaf(k, (n,)) for n in ("samples", "norm")] for k in members)
        alike = self.algorithm.weight == "uniform"
        known = [
            (1.0 if alike else float(n), own)
            for n, own in leaves
            if n is not None and own is not None
        ]
        weights = weights.clone()
        if known:
            weights[trainer.kept] = cast(Tensor, mean(known)[0]).to(weights)
        return weights

    def judge_result(self, named: tuple[str, ...] | None = None) -> dict[str, float]:
        """The numbers of the algorithm's result: the global model, or the mean of personal ones.

        Where there are both, the global model's stand beside, as ``global_…``.
        """
        probes: Probes = defaultdict(list)
        if self.judges == "global":
            results = self.judge(self.global_weights(), named, probes[None])
        else:
            personal = self.personal(JUDGED_CLIENTS).items()
            rows = [self.judge(weights, named, probes[k]) for k, weights in personal]
            results = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
            if self.algorithm.has_global:
                both = self.judge(self.global_weights(), named, probes[None])
                results |= {f"global_{name}": value for name, value in both.items()}
        if "per-client" in (named or self.protocols):
            results |= self.judge_clients(probes)
        return results

    def judge_clients(self, probes: Probes | None = None) -> dict[str, float]:
        """Personal models and the global one, each on the clients' own test images.

        ``probes``: those that were fitted to these models already.
        """
        results: dict[str, float] = {}
        fitted = probes or {}
        self.client_scores.clear()
        if self.algorithm.has_global:
            scores = self._client_scores(self.global_weights(), *fitted.get(None, []))
            self.client_scores["global"] = self._named(scores)
            results |= per_client.summary("global", scores)
        own = {k: self.personal_weights(k) for k in self.engine.states}
        models = {k: weights for k, weights in own.items() if weights is not None}
        if models:
            scores = np.full(len(self.clients), np.nan)
            for k, weights in models.items():
                scores[k] = self._client_scores(weights, *fitted.get(k, []))[k]
            self.client_scores["personal"] = self._named(scores)
            results |= per_client.summary("personal", scores)
        return results

    def _named(self, scores: NDArray[np.float64]) -> dict[str, float]:
        known = zip(self.names, scores.tolist(), strict=True)
        return {name: round(score, 4) for name, score in known if score == score}

    def _client_scores(
        self, weights: Tensor, probe: linear.Head | None = None
    ) -> NDArray[np.float64]:
        train, test = self.judged_splits
        assert train.labels is not None and test is not None and test.labels is not None
        encoder, device = self.body(weights).encoder, self.trainer.device
        judged = extract(encoder, self.client_test_images, device=device)
        tests = (judged, test.labels.to(device), self.client_tests)
        if probe is not None:
            return per_client.accuracies(probe, *tests)
        features = extract(encoder, train.images[self.modality], device=device)
        known, labels = _labelled(features, train.labels)
        return per_client.scores(
            known,
            labels,
            *tests,
            len(self.dataset.classes),
            self.config.evaluate.preset,
            self.config.seed,
        )

    @cached_property
    def client_tests(self) -> Groups:
        """Which test images are whose."""
        data, mode = self.dataset, self.config.evaluate.client_test
        assert data.test is not None
        return per_client.deal(
            mode, self.clients, data.train, data.test, len(data.classes), self.config.seed
        )

    @cached_property
    def client_test_images(self) -> Tensor:
        """The test images as clients have them: turned or stylized like what they train on."""
        (_, test), params = self.judged_splits, self.config.partition
        assert test is not None
        images = test.images[self.modality]
        if not isinstance(params, SourceParams) or not sources.alters(params):
            return images
        of = sources.assign(self.config, self.dataset).of
        assert of is not None
        found = per_client.sources(
            self.client_tests, self.clients, of.numpy(), len(test), self.config.seed
        )
        return sources.alter(params, images, torch.from_numpy(found))

    def personal_weights(self, client: int) -> Tensor | None:
        """A client's own model: the algorithm's, or the server's for it with its own norms."""
        states, path = self.engine.states, self.algorithm.personal
        own = None if path is None else states.get_leaf(client, path)
        if path is not None and (own is None or own.ndim):
            return own
        weights = self.server.weights
        if own is not None:  # the number of one of the server's models
            weights = self.algorithm.numbered(self.server, int(own))
        if self.trainer.kept is None:
            return None if own is None else weights
        norm = states.get_leaf(client, ("norm",))
        return None if norm is None else weights.index_copy(0, self.trainer.kept, norm.to(weights))

    def personal(self, most: int) -> dict[int, Tensor]:
        """The models of up to ``most`` clients that have one."""
        ids = sorted(self.engine.states)
        if self.algorithm.personal is None and self.trainer.kept is None:
            return {}
        found = self._own_models(ids, most)
        if len(found) < min(most, len(ids)):  # somebody's own algorithm has them for some alone
            with_one = [k for k in ids if self.personal_weights(k) is not None]
            found = self._own_models(with_one, most)
        return found or ({0: self.trainer.initial} if self.judges == "personal" else {})

    def _own_models(self, ids: Sequence[int], most: int) -> dict[int, Tensor]:
        """The models of up to ``most`` of these clients, but of those that have none."""
        chosen = choose(key(self.config.seed, "judged"), len(ids), most)
        own = {ids[i]: self.personal_weights(ids[i]) for i in chosen}
        return {k: weights for k, weights in own.items() if weights is not None}

    @cached_property
    def protocols(self) -> tuple[str, ...]:
        """What is measured; a network trained with labels is also judged by its own head."""
        named = protocols(self.config.evaluate, self.dataset.train, self.dataset.test)
        extra = self.trainer.objective.needs_labels and "head" not in named
        return (*named, "head") if extra and self.config.evaluate.protocols is None else named

    @cached_property
    def judged_splits(self) -> tuple[Split, Split | None]:
        """The data at the size at which the encoder is judged."""
        settings = self.config.evaluate
        if settings.size is None or settings.size == self.config.data.size:
            return self.dataset.train, self.dataset.test
        channels = [images.shape[1] for images in self.dataset.train.images]
        other = convert_channels(load_data(self.config, settings.size), channels)
        return other.train, other.test

    def _views(self, images: Tensor, indices: Tensor, view: int) -> Tensor:
        state = mix(key(self.config.seed, "views"), indices)
        height, width = images.shape[2:]
        augmentation = replace(self.trainer.augmentation, size=(height, width))
        return augmentation.views(images, state, view)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def load_data(config: Config, size: int | None = None) -> Dataset:
    """The data set; training images are turned or stylized where clients differ in that."""
    return sources.altered(config, load_dataset(config.data, config.seed, size))


def prepare(
    config: Config,
    trains: bool = True,
    dataset: Dataset | None = None,
    classes: int | None = None,
) -> Session:
    """Load the data, build the network, and refuse what could not run.

    ``dataset`` is the data where it was loaded already; of ``classes`` see ``assemble``.
    """
    for spec in config.evaluate.protocols or ():
        parse(spec)  # before images are decoded, which may take long
    dataset = load_data(config) if dataset is None else sources.altered(config, dataset)
    groups = client_data(config, dataset)
    session = assemble(config, dataset, groups, trains=trains, classes=classes)
    labels, groups = dataset.train.labels, session.engine.groups
    if labels is not None and bool((labels[groups.members] >= 0).all()):
        census = Census(labels.to(session.trainer.device), groups, len(dataset.classes))
        session.trainer.census = session.server.census = census
    _ = session.judged_splits  # a file that cannot be read at that size is found now
    return session


def assemble(
    config: Config,
    dataset: Dataset,
    groups: Groups,
    federation: int | None = None,
    network: Network | None = None,
    trains: bool = True,
    weights: bool = True,
    classes: int | None = None,
    site_names: list[str] | None = None,
) -> Session:
    """A session of data that is here, or of a deployment's server, whose data is elsewhere.

    On a site, ``groups`` is its own data alone, one client of the ``federation``'s. Without a
    ``network`` one is made. What only judges (not ``trains``) need not have the run's clients,
    nor its ``classes``, which are then how many its head tells apart.
    Without ``weights`` nothing can be run: all is refused that would be, at no cost of memory.
    """
    check_deployment(config)
    device = pick_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams and kernels that name no device mean this one
    torch.set_num_threads(config.engine.threads)
    keep_memory()
    train = dataset.train
    objective: Objective = configuration.variant("objective", config.objective.name)(
        config.objective
    )
    clients = federation or len(groups)
    size = cohort_size(config, clients)
    algorithm_class: type[Algorithm] = configuration.variant("algorithm", config.algorithm.name)
    held = groups
    if algorithm_class.pools_data:
        config, groups = pooled(config, groups, size)
        clients = size = 1
    algorithm = algorithm_class(config.algorithm, objective)
    check_objective(objective, train, config, trains)
    here = groups is held and federation is None and not deployed(config)
    names = client_names(config.partition, groups, dataset) if here else []
    algorithm.client_names = names = site_names or names
    algorithm.check_clients(groups.sizes)
    if federation is None:
        check_cohort(config, objective, groups, size, names)
    if federation is None and trains:
        algorithm.found(len(groups), config)
    height, width = train.images[0].shape[2:]
    channels = tuple(images.shape[1] for images in train.images)
    augmentation = Augmentation.from_config(config.augment, channels[0], (height, width))
    if network is None:
        small = min(height, width)
        with torch.device("cpu" if weights else "meta"):
            known = classes or len(dataset.classes)
            network = build_network(config, objective, channels, small, known)
    check_norms(config, network)
    place = device if weights else torch.device("meta")
    trainer = Trainer(config, network, objective, augmentation, train, place)
    if len(train) and federation is None:  # a site judges nothing
        check_evaluation(config, dataset, objective, held)
    trainer.compiles = compiles(config, algorithm, trainer, groups, size)
    aggregator = privacy.build_aggregator(config, algorithm, clients, size)
    engine = make_engine(trainer, algorithm, groups, aggregator)
    if config.evaluate.drift:
        watch(engine)
    if compiles_passes(config, engine):
        trainer.compile_passes()
    check_compiled(config, trainer)
    return Session(
        config, dataset, engine, Server(trainer), size, site_names=site_names, classes=classes
    )


def make_engine(
    trainer: Trainer, algorithm: Algorithm, groups: Groups, aggregator: Aggregator
) -> Engine:
    """Where client work happens (``engine.name``)."""
    if trainer.config.engine.name == "local":
        return LocalEngine(trainer, algorithm, groups, aggregator)
    from fedssl.engines.remote.engine import RemoteEngine

    if algorithm.pools_data:
        raise UserError(
            f"engine.name=flower with algorithm.name={algorithm.params.name}: it has all data in "
            "one place, so there is nothing to send; use engine.name=local"
        )
    return RemoteEngine(trainer, algorithm, groups, aggregator)


def public_images(config: Config, dataset: Dataset) -> NDArray[np.int64]:
    """Which training images are everybody's (``algorithm.public`` of algorithms that have it).

    They are trained on, so none of them is held out.
    """
    count, held = getattr(config.algorithm, "public", 0), held_out(config, dataset)
    free = np.setdiff1d(np.arange(len(dataset.train)), held)
    return free[choose(key(config.seed, "public"), len(free), count)]


def held_out(config: Config, dataset: Dataset) -> NDArray[np.int64]:
    """The training images that ``data.holdout`` keeps for fine-tuning or for choices."""
    train, share = dataset.train, config.data.holdout
    if not share:
        return np.empty(0, dtype=np.int64)
    labels = torch.full((len(train),), -1) if train.labels is None else train.labels
    names = dataset.classes
    return draw_share(labels, share, len(names), config.seed, names=names).numpy()


def client_data(config: Config, dataset: Dataset, found: sources.Sources | None = None) -> Groups:
    """The training images of each client; public ones and those held out for ``semi`` are not.

    ``found`` is what the partition goes by, where it is known already.
    """
    train, public, held = dataset.train, public_images(config, dataset), held_out(config, dataset)
    if len(public) and len(public) + len(held) == len(train):
        count = getattr(config.algorithm, "public", 0)
        raise UserError(
            f"algorithm.public={count}: leaves the clients nothing of {len(train)} images; give "
            "fewer, or set algorithm.align=0 and algorithm.public=0"
        )
    found = found or sources.assign(config, dataset, pick_device(config.device))
    if not len(held) and not len(public):
        whole = replace(train, labels=found.of)
        return divided(config, whole, len(found.names))
    labels = torch.full((len(train),), -1) if train.labels is None else train.labels
    kept = np.setdiff1d(np.arange(len(train)), np.union1d(held, public))
    part = Split(
        tuple(images[: len(kept)] for images in train.images),  # only their number matters
        labels[kept] if found.of is None else found.of[kept],
        None if train.clients is None else train.clients[kept],
        None if train.cases is None else train.cases[kept],
    )
    groups = divided(config, part, len(found.names))
    return Groups(kept[groups.members], groups.offsets)


def divided(config: Config, split: Split, classes: int) -> Groups:
    """The samples of each client; what a partition of the user's own says is looked at first."""
    groups = partition(config.partition, split, classes, config.seed)
    if config.partition.name not in configuration.VARIANTS["partition"]:
        plugins.check_groups(groups, len(split), config.partition.name)
    return groups


def compiles(
    config: Config, algorithm: Algorithm, trainer: Trainer, groups: Groups, cohort: int
) -> bool:
    """Whether local training goes through a compiled step (``engine.compile``)."""
    mode = config.engine.compile
    own = algorithm.compiles != "off" and trainer.objective.of_batches
    possible = trainer.plan.batch is not None and own
    if mode != "auto" or not possible or algorithm.compiles == "on":
        return mode == "on" and possible
    steps = config.rounds * cohort * trainer.plan.count(int(np.median(groups.sizes)))
    return trainer.device.type == "cuda" and steps >= WORTH_COMPILING


def check_compiled(config: Config, trainer: Trainer) -> None:
    """What was asked for is done, or refused."""
    if config.engine.compile == "on" and not trainer.compiles and not trainer.compiles_passes:
        raise UserError(
            f"engine.compile=on with algorithm.name={config.algorithm.name} and "
            f"objective.name={config.objective.name}: what is compiled is local training in "
            "batches of one size (algorithm.batch) on a loss of these, or merged cohorts of "
            "clients of one size; use engine.compile=auto"
        )


def compiles_passes(config: Config, engine: Engine) -> bool:
    """Whether merged cohorts go through compiled passes: one shape for all rounds.

    A round of 512 images of ResNet-14 took 16 ms so, on an H200 (results/measured.jsonl). Plain, a
    step takes about six times that, so that a minute or two of compiling is paid back.
    """
    mode, sizes = config.engine.compile, engine.groups.sizes
    same = bool((sizes == sizes[0]).all())
    if not engine.merges or not same or mode == "off":
        return False
    return mode == "on" or (
        engine.trainer.device.type == "cuda" and config.rounds >= WORTH_COMPILING
    )


def watch(engine: Engine) -> None:
    """Keep a round's local models, for ``evaluate.drift``."""
    where = "evaluate.drift=true: compares clients' models after local training"
    if engine.trainer.config.engine.name != "local":
        raise UserError(f"{where}, and these never come here whole; use engine.name=local")
    if engine.algorithm.pools_data:
        raise UserError(f"{where}; algorithm.name={engine.algorithm.params.name} has no clients")
    if engine.merges:
        raise UserError(f"{where}, and a merged cohort has none; set engine.merge=off")
    engine.trainer.watched = {}


def build_network(
    config: Config, objective: Objective, channels: tuple[int, ...], size: int, classes: int
) -> Network:
    """The network of a configuration, initialized."""
    return build(
        config.encoder,
        channels,
        size,
        lambda features, norm: objective.head_for(
            config.encoder, channels[0], features, norm, classes
        ),
        config.seed,
        objective.predictor,
        objective.joint,
    )


def pooled(config: Config, groups: Groups, cohort: int) -> tuple[Config, Groups]:
    """One client that holds all samples of the partition; a step sees as many as a cohort has."""
    total = len(groups.members)
    batch = config.algorithm.batch or max(1, round(cohort * total / len(groups)))
    algorithm = replace(config.algorithm, batch=min(batch, total))
    config = replace(config, algorithm=algorithm, cohort=replace(config.cohort, minimum=1))
    one = Groups(np.sort(groups.members), np.array([0, total]))
    return config, one


def check_cohort(
    config: Config, objective: Objective, groups: Groups, size: int, names: Sequence[str]
) -> None:
    """Enough samples in every round for the loss, and in every batch for batch norm."""
    fewest = int(np.sort(groups.sizes)[:size].sum())
    if fewest < objective.minimum:
        raise UserError(
            f"cohort.size={size}: a round may hold only {fewest} sample, and "
            f"objective.name={config.objective.name} compares at least {objective.minimum}; "
            "take more clients a round"
        )
    smallest = int(groups.sizes.argmin())
    single = config.algorithm.batch == 1
    if config.encoder.norm == "batch" and (single or groups.sizes[smallest] < 2):
        which = "algorithm.batch is 1" if single else f"{called(names, smallest)} has 1"
        raise UserError(
            f"encoder.norm=batch: needs batches of at least 2 samples, and {which}; use "
            "encoder.norm=group"
        )


def check_objective(objective: Objective, train: Split, config: Config, trains: bool) -> None:
    """Labels where the objective trains with them, and a use for every tower."""
    if config.encoder.towers > objective.inputs:
        raise UserError(
            f"encoder.towers={config.encoder.towers}: objective.name={config.objective.name} looks "
            "at one input, so a second tower would learn nothing; use encoder.towers=1"
        )
    labelled = train.labels is not None and bool((train.labels >= 0).all())
    if objective.needs_labels and trains and not labelled:
        raise UserError(
            f"objective.name={objective.params.name}: needs a label for every training image; "
            "use labelled data, or another objective such as cco"
        )


def check_norms(config: Config, network: Network) -> None:
    """A policy needs something to act on."""
    if config.algorithm.norm_policy == "reset" and not network.has_batch_norm:
        raise UserError(
            "algorithm.norm_policy=reset: is about batch norm's running statistics, and "
            f"encoder.norm={config.encoder.norm} has none; use average or local"
        )


def deployed(config: Config) -> bool:
    """Whether clients are real sites."""
    return config.engine.name == "flower" and config.engine.sites is not None


def check_deployment(config: Config) -> None:
    """A deployment's server holds none of its clients' images."""
    if deployed(config):
        source = getattr(config.partition, "source", "labels")
        if source != "labels":
            raise UserError(
                f"partition.source={source}: sites have their own data, which nobody divides or "
                "alters; leave it out"
            )
        for words in collaborations(config.evaluate):
            raise UserError(
                f"{words}: fine-tunes on the clients' images, which a deployment's server does not "
                "have; leave it out"
            )


def check_evaluation(
    config: Config, dataset: Dataset, objective: Objective, groups: Groups
) -> None:
    """Protocols that the data allows, of a tower that exists."""
    settings, names = config.evaluate, dataset.classes
    train, test, classes, holdout = dataset.train, dataset.test, len(names), config.data.holdout
    check_protocols(settings, train, test, classes, holdout=holdout, names=names)
    if "per-client" in (*(settings.protocols or ()), *(settings.monitor or ())):
        per_client.check(settings.client_test, groups, train, test, classes, config.seed)
    for words, share in collaborations(settings).items():
        collaborative.check(words, config, groups, dataset, share)
    if settings.tower == "second" and config.encoder.towers == 1:
        raise UserError("evaluate.tower=second: there is one tower; set encoder.towers=2")
    named = (*(settings.protocols or ()), *(settings.monitor or ()))
    if any(parse(spec)[0] == "head" for spec in named) and not objective.needs_labels:
        raise UserError(
            f"evaluate.protocols=head: objective.name={config.objective.name} trains no "
            "classifier; use linear"
        )


def _labelled(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    labels = labels.to(features.device)
    return features[labels >= 0], labels[labels >= 0]


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UserError(f"device={name}: not available here ({reason}); use device=cpu") from None
    return device
