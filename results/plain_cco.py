"""CCO + FedAvg (DCCO paper, Table 1) in plain torch: does it fail by itself, or do we make it fail?

    python results/plain_cco.py IMAGES [--lr 0.001] [--pooled] [--rounds 100] [--size 16]
                                [--encoder timm] [--scale 10]

Network and views are fedssl's; the loss and the mean over clients are written out here, in float32,
and Adam is torch's. ``--pooled`` computes one loss of all samples of a round, as DCCO does.
``--encoder timm``: timm's network of the same depth and width, with its weight standardization,
group norm, order of layers and initialization, below a projector of torch's layers. ``--scale``:
weights of convolutions and linear layers are drawn that many times as large. A line every 25
rounds: training loss, and of the encoder on images that it does not train on, as they are: kNN
accuracy (10 neighbours) and how many dimensions its features use (the participation ratio of their
variances).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedssl.config import Augment, Data, Encoder
from fedssl.data.augment import Augmentation
from fedssl.data.load import load_dataset
from fedssl.models.network import Heads, Tower, build, mlp

SAMPLES, CLIENTS, JUDGED = 16, 8, 1500  # a client's, a round's, images kept for kNN
SCHEDULE = 10000  # rounds of the cosine, as in the rows of the page
WIDTH = 1024  # of the projector's three layers


def ours(size: int) -> tuple[nn.Module, nn.Module]:
    """Encoder and projector of the rows."""
    network = build(
        Encoder("resnet14"),
        (3,),
        size,
        lambda encoder, norm: Heads(mlp(encoder.features, (WIDTH, WIDTH, WIDTH), norm)),
        0,
    )
    tower = network.towers[0]
    assert isinstance(tower, Tower)
    return tower.encoder, tower.head


def timms() -> tuple[nn.Module, nn.Module]:
    """A pre-activation ResNet of the same blocks, and a projector without standardization."""
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    torch.manual_seed(0)
    encoder = ResNetV2([1, 1, 1, 1], num_classes=0, preact=True, stem_type="fixed")
    encoder.stem = StdConv2d(3, 64, 3, padding=1, bias=False)  # as small images have it
    layers: list[nn.Module] = []
    for width in (2048, WIDTH):
        layers += [nn.Linear(width, WIDTH, bias=False), nn.GroupNorm(32, WIDTH), nn.ReLU()]
    return encoder, nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def correlation(f: Tensor, g: Tensor) -> Tensor:
    """Eq. 2 of one client, after centring."""
    f, g = f - f.mean(0), g - g.mean(0)
    f, g = (x / x.square().mean(0).clamp_min(1e-6).sqrt() for x in (f, g))
    return f.T @ g / len(f)


def cco(f: Tensor, g: Tensor) -> Tensor:
    """Eq. 1 with λ = 20."""
    c = correlation(f, g)
    diagonal = torch.diagonal(c)
    others = c.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + 20 * others / (len(c) - 1)


@torch.no_grad()
def judge(encoder: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """kNN accuracy, each image by the others, and the dimensions in use."""
    x = torch.cat([encoder(part.float() / 255) for part in images.split(250)])
    unit = functional.normalize(x, dim=1)
    near = (unit @ unit.T).fill_diagonal_(-1).topk(10).indices
    votes = functional.one_hot(labels[near]).sum(1)
    variances = torch.linalg.svdvals(x - x.mean(0)).square()
    dimensions = variances.sum().square() / variances.square().sum()
    accuracy = (votes.argmax(1) == labels).float().mean()
    return {"knn": round(100 * accuracy.item(), 1), "dimensions": round(dimensions.item(), 1)}


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--pooled", action="store_true")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--encoder", choices=("fedssl", "timm"), default="fedssl")
    parser.add_argument("--scale", type=float, default=1.0)
    o = parser.parse_args()
    split = load_dataset(Data(name="folder", root=str(o.images), size=o.size)).train
    assert split.labels is not None
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    images, labels = split.images[0][order], split.labels[order]
    kept = images[:JUDGED], labels[:JUDGED]
    images, labels = images[JUDGED:], labels[JUDGED:]
    by_class = labels.argsort(stable=True)
    clients = by_class[: len(by_class) // SAMPLES * SAMPLES].view(-1, SAMPLES)
    encoder, head = timms() if o.encoder == "timm" else ours(o.size)
    network = nn.Sequential(encoder, head)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.mul_(o.scale)
    views = Augmentation.from_config(Augment("dcco"), 3, (o.size, o.size))
    adam = torch.optim.Adam(network.parameters())
    generator = torch.Generator().manual_seed(1)
    print(json.dumps({"round": 0, **judge(encoder, *kept)}), flush=True)
    for step in range(o.rounds):
        drawn = torch.randperm(len(clients), generator=generator)[:CLIENTS]
        x = images[clients[drawn].flatten()]
        state = torch.randint(2**62, (len(x),), generator=generator)
        f, g = network(torch.cat(views.each((x, x), state))).chunk(2)
        parts = 1 if o.pooled else CLIENTS
        loss = sum(map(cco, f.chunk(parts), g.chunk(parts)), torch.zeros(())) / parts
        network.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = o.lr * (1 + math.cos(math.pi * step / SCHEDULE)) / 2
        adam.step()
        if (step + 1) % 25 == 0:
            line = {"round": step + 1, "loss": round(loss.item(), 1), **judge(encoder, *kept)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
