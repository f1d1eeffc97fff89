"""Test in Client (PerFCL, section III): each client's accuracy on test images of its own."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data import random
from fedssl.data.dataset import Groups, Split
from fedssl.evaluate import linear
from fedssl.util.errors import UserError

Ints = NDArray[np.int64]
Mode = Literal["folder", "matched", "iid"]


def check(
    mode: Mode | None, groups: Groups, train: Split, test: Split | None, classes: int, seed: int
) -> None:
    """Refuse, before any training, what could not be judged after it."""
    where = "evaluate.protocols=per-client"
    if test is None or not (test.full_labels.numpy() >= 0).any():
        missing = "there is no test split" if test is None else "the test split has no labels"
        raise UserError(f"{where}: {missing}; use evaluate.protocols=[unlabeled]")
    if train.cases is not None or test.cases is not None:
        raise UserError(
            f"{where}: judges single images, and this data has cases; use linear or knn, which "
            "pool a case's images"
        )
    if mode == "folder" and test.clients is None:
        raise UserError(
            "evaluate.client_test=folder: the test split has no client folders; use matched or "
            "iid, or put test images into test/<client>/…"
        )
    if mode == "folder" and _folders(groups, train) is None:
        raise UserError(
            "evaluate.client_test=folder: the clients are not the training split's client folders; "
            "use matched or iid, or partition.name=folder"
        )
    labels = train.full_labels.numpy()
    if not (labels >= 0).any():
        raise UserError(
            f"{where}: the training split has no labels; use evaluate.protocols=[unlabeled]"
        )
    mode = _mode(mode, groups, train, test)
    if mode == "matched" and not (labels[groups.members] >= 0).any():
        raise UserError(
            "evaluate.client_test=matched: no client holds a labelled training image; use iid"
        )
    if not len(deal(mode, groups, train, test, classes, seed).members):
        raise UserError(
            f"evaluate.client_test={mode}: no client would get a labelled test image; use iid"
        )


def deal(
    mode: Mode | None, groups: Groups, train: Split, test: Split, classes: int, seed: int
) -> Groups:
    """The labelled test images of each client, of which a client may have none.

    ``matched`` gives a client, of each class, its share of the training images; ``iid`` equally
    many images; ``folder`` those of its own folder. None: folder where there are client folders
    on both sides and they are the clients, else matched.
    """
    mode = _mode(mode, groups, train, test)
    order = random.permutation(random.key(seed, "client test"), len(test))
    order = order[test.full_labels.numpy()[order] >= 0]
    if mode == "iid":
        return Groups(order, np.arange(len(groups) + 1) * len(order) // len(groups))
    if mode == "matched":
        owners = _matched(
            groups, train.full_labels.numpy(), test.full_labels.numpy()[order], classes, seed
        )
    else:
        owners = _own_folder(groups, train, test)[order]
    dealt = Groups.from_labels(owners[owners >= 0], len(groups))
    return Groups(order[owners >= 0][dealt.members], dealt.offsets)


def sources(tests: Groups, groups: Groups, of: Ints, total: int, seed: int) -> Ints:
    """A source for each of ``total`` test images, given those of the training images; -1: nobody's.

    A client's test images have its sources in the shares that its training images have them in.
    """
    found = np.full(total, -1)
    for k in range(len(tests)):
        mine, held = tests[k], np.sort(of[groups[k]])
        places = random.permutation(random.key(seed, "client test", 2, k), len(mine))
        found[mine] = held[((places + 0.5) * len(held) / max(len(mine), 1)).astype(np.int64)]
    return found


def scores(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    tests: Groups,
    classes: int,
    preset: str,
    seed: int,
) -> NDArray[np.float64]:
    """Each client's top-1 in percent on its own test images; nan where it has none.

    One linear probe on all labelled training images serves all clients. PerFCL does not say so, but
    its clients of two classes score as a probe on ten does (Table II); one on a client's own images
    would choose between two.
    """
    known = train_labels >= 0
    head = linear.fit(train_features[known], train_labels[known], classes, preset, seed)
    return accuracies(head, test_features, test_labels, tests)


def accuracies(
    head: linear.Head, test_features: Tensor, test_labels: Tensor, tests: Groups
) -> NDArray[np.float64]:
    """The same of a probe that is there already."""
    right = (linear.predict(head, test_features) == test_labels).cpu().numpy()
    clients = np.repeat(np.arange(len(tests)), tests.sizes)
    hits = np.bincount(clients, weights=right[tests.members], minlength=len(tests))
    return np.where(tests.sizes > 0, 100.0 * hits / np.maximum(tests.sizes, 1), np.nan)


def summary(name: str, scores: NDArray[np.float64]) -> dict[str, float]:
    """Mean, minimum and standard deviation over the clients that have test images, if any has."""
    known = scores[~np.isnan(scores)]
    if not len(known):
        return {}
    return {
        f"per-client_{name}_top1": float(known.mean()),
        f"per-client_{name}_worst": float(known.min()),
        f"per-client_{name}_spread": float(known.std()),
    }


def _mode(mode: Mode | None, groups: Groups, train: Split, test: Split) -> Mode:
    if mode is not None:
        return mode
    folders = test.clients is not None and _folders(groups, train) is not None
    return "folder" if folders else "matched"


def _folders(groups: Groups, train: Split) -> Ints | None:
    """The folder of each client, -1 for one without images; none if the clients are no folders."""
    if train.clients is None:
        return None
    held = train.clients[groups.members]
    owners = np.repeat(np.arange(len(groups)), groups.sizes)
    folders = np.full(len(groups), -1)
    folders[owners] = held
    used = folders[folders >= 0]
    same = (folders[owners] == held).all() and len(np.unique(used)) == len(used)
    return folders if same else None


def _own_folder(groups: Groups, train: Split, test: Split) -> Ints:
    """The client of each test image, -1 where its folder is none of the clients'."""
    folders = _folders(groups, train)
    assert folders is not None and test.clients is not None  # see check
    client_of = np.full(max(folders.max(), test.clients.max()) + 1, -1)
    client_of[folders[folders >= 0]] = np.flatnonzero(folders >= 0)
    return client_of[test.clients]


def _matched(groups: Groups, held: Ints, wanted: Ints, classes: int, seed: int) -> Ints:
    """The client of each test image, given the labels; -1 for classes that no client holds.

    The clients' images of a class stand in a row, and its test images point at places of equal
    distance in it from a random start: a client gets its share, rounded up or down.
    """
    clients = np.repeat(np.arange(len(groups)), groups.sizes)
    held = held[groups.members]
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
