"""Evaluate on each client's own test images (Test in Client: PerFCL, section III)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data import random
from fedssl.data.dataset import Groups, Split
from fedssl.evaluate import linear
from fedssl.evaluate.base import EvaluatedModel, EvaluationData, Protocol
from fedssl.util.errors import UserError
from fedssl.util.text import shorten_list

Ints = NDArray[np.int64]


class PerClient(Protocol):
    """Accuracy of models on each client's own test images; measured over all clients."""

    name = "per-client"
    needs = "clients"

    def evaluate(self, model: EvaluatedModel) -> dict[str, float]:
        """Measure nothing of one model: the evaluator measures all clients' models together."""
        return {}

    def check(self, data: EvaluationData) -> None:
        """Check that clients get labelled test images, and that there are some to train on."""
        self.check_test(data)
        self.check_train(data)
        self.check_single_images(data)
        train, test, mode = data.train, data.test, choose_mode(data)
        assert test is not None
        problem = ""
        if mode == "folder" and test.clients is None:
            problem = "the test split has no client folders"
        elif mode == "folder" and _find_folders(data.clients, train) is None:
            problem = "the clients are not the client folders of the training split"
        elif mode == "matched" and not (train.full_labels[data.clients.members] >= 0).any():
            problem = "no client holds a labelled training image"
        elif not len(deal_tests(data).members):
            problem = "no client would get a labelled test image"
        if problem:
            fix = "Use evaluate.client_test=iid."
            raise UserError(problem, key="evaluate.client_test", value=mode, fix=fix)

    def list_warnings(self, data: EvaluationData) -> list[str]:
        """Name the clients without test images."""
        without = [data.names[int(k)] for k in np.flatnonzero(deal_tests(data).sizes == 0)]
        if not without:
            return []
        count = f"{len(without)} of {len(data.names)} clients"
        names = shorten_list(without, 5)
        return [f"per-client: {count} have no test images and are left out ({names})"]


def deal_tests(data: EvaluationData) -> Groups:
    """Return the labelled test images of each client; a client may have none.

    ``matched`` gives a client its share of the training images of each class, ``iid`` equally
    many images, ``folder`` those of its own folder.
    """
    mode, groups, test, seed = choose_mode(data), data.clients, data.test, data.config.split_seed
    assert test is not None
    labels = test.full_labels.numpy()
    order = random.permutation(random.key(seed, "client test"), len(test))
    order = order[labels[order] >= 0]
    if mode == "iid":
        return Groups(order, np.arange(len(groups) + 1) * len(order) // len(groups))
    if mode == "matched":
        held = data.train.full_labels.numpy()[groups.members]
        owners = _match_classes(groups, held, labels[order], data.classes, seed)
    else:
        owners = _match_folders(groups, data.train, test)[order]
    dealt = Groups.from_labels(owners[owners >= 0], len(groups))
    return Groups(order[owners >= 0][dealt.members], dealt.offsets)


def sources(tests: Groups, groups: Groups, of: Ints, total: int, seed: int) -> Ints:
    """Return a source for each of ``total`` test images, given those of training images; else -1.

    A client's test images have its sources in the shares that its training images have them in.
    """
    assigned = np.full(total, -1)
    for k in range(len(tests)):
        tested, held = tests[k], np.sort(of[groups[k]])
        places = random.permutation(random.key(seed, "client test", 2, k), len(tested))
        assigned[tested] = held[((places + 0.5) * len(held) / max(len(tested), 1)).astype(np.int64)]
    return assigned


def accuracies(
    head: linear.Head, test_features: Tensor, test_labels: Tensor, tests: Groups
) -> NDArray[np.float64]:
    """Return each client's top-1 in percent on its own test images; nan if it has none.

    One linear probe on all labelled training images serves all clients. PerFCL does not say so, but
    its clients of two classes score as a probe on ten does (Table II); one on a client's own images
    would choose between two.
    """
    right = (linear.predict(head, test_features) == test_labels).cpu().numpy()
    clients = np.repeat(np.arange(len(tests)), tests.sizes)
    hits = np.bincount(clients, weights=right[tests.members], minlength=len(tests))
    return np.where(tests.sizes > 0, 100.0 * hits / np.maximum(tests.sizes, 1), np.nan)


def summarize(name: str, scores: NDArray[np.float64]) -> dict[str, float]:
    """Return mean, minimum and standard deviation over the clients that have test images."""
    measured = scores[~np.isnan(scores)]
    if not len(measured):
        return {}
    return {
        f"{name}_top1": float(measured.mean()),
        f"{name}_worst": float(measured.min()),
        f"{name}_spread": float(measured.std()),
    }


def choose_mode(data: EvaluationData) -> Literal["folder", "matched", "iid"]:
    """Return the configured mode; by default ``folder`` if possible, else ``matched``."""
    if data.settings.client_test is not None:
        return data.settings.client_test
    has_folders = data.test is not None and data.test.clients is not None
    is_folder = has_folders and _find_folders(data.clients, data.train) is not None
    return "folder" if is_folder else "matched"


def _find_folders(groups: Groups, train: Split) -> Ints | None:
    """Return the folder of each client, or -1; ``None`` if clients are not folders."""
    if train.clients is None:
        return None
    held = train.clients[groups.members]
    owners = np.repeat(np.arange(len(groups)), groups.sizes)
    folders = np.full(len(groups), -1)
    folders[owners] = held
    used = folders[folders >= 0]
    same = (folders[owners] == held).all() and len(np.unique(used)) == len(used)
    return folders if same else None


def _match_folders(groups: Groups, train: Split, test: Split) -> Ints:
    """Return the client of each test image, or -1 if its folder belongs to none."""
    folders = _find_folders(groups, train)
    assert folders is not None and test.clients is not None  # PerClient.check
    client_of = np.full(max(folders.max(), test.clients.max()) + 1, -1)
    client_of[folders[folders >= 0]] = np.flatnonzero(folders >= 0)
    return client_of[test.clients]


def _match_classes(groups: Groups, held: Ints, wanted: Ints, classes: int, seed: int) -> Ints:
    """Return the client of each test image by its label, or -1 for classes that no client holds.

    The clients' images of a class stand in a row, and its test images point at places of equal
    distance in it from a random start: a client gets its share, rounded up or down. ``held`` are
    the labels of the groups' members.
    """
    clients = np.repeat(np.arange(len(groups)), groups.sizes)
    starts = random.uniform(
        random.mix(random.key(seed, "client test", 1), torch.arange(classes)), 1
    )
    owners = np.full(len(wanted), -1)
    for c in range(classes):
        row, places = clients[held == c], np.flatnonzero(wanted == c)
        if len(row):
            at = (np.arange(len(places)) + starts[c].item()) / max(len(places), 1)
            owners[places] = row[(at * len(row)).astype(np.int64)]
    return owners
