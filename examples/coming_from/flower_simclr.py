"""SimCLR with Flower: ten clients with different digits train, and the server averages."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from lightly.loss import NTXentLoss
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torchvision.transforms import v2

CLIENTS, ALPHA, ROUNDS = 10, 0.5, 3
pixels, labels = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
train_ids, test_ids = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0)
augment = v2.Compose([v2.RandomResizedCrop(16, (0.5, 1.0)), v2.RandomRotation(15)])


def split() -> list[np.ndarray]:
    """Divide each class among the clients by a Dirichlet distribution."""
    draw = np.random.default_rng(0)
    clients: list[list[int]] = [[] for _ in range(CLIENTS)]
    for label in range(10):
        members = train_ids[labels[train_ids] == label]
        cuts = np.cumsum(draw.dirichlet([ALPHA] * CLIENTS))[:-1] * len(members)
        for client, part in zip(clients, np.split(members, cuts.astype(int)), strict=True):
            client.extend(part)
    return [np.array(client) for client in clients]


def make_model() -> nn.Sequential:
    """A small encoder and a projector."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten()
    )
    return nn.Sequential(encoder, nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, 64)))


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one epoch on this client's images."""
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.05), NTXentLoss(0.1)
    own = torch.tensor(split()[int(context.node_config["partition-id"])])
    for batch in own[torch.randperm(len(own))].split(64):
        views = [torch.stack([augment(image) for image in images[batch]]) for _ in range(2)]
        optimizer.zero_grad()
        loss(model(views[0]), model(views[1])).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(own)})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, then classify test images by their nearest neighbours."""
    model = make_model()
    model(torch.zeros(1, 1, 16, 16))
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ROUNDS)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    with torch.no_grad():
        features = model[0](nn.functional.interpolate(images, size=16)).numpy()
    knn = KNeighborsClassifier(20).fit(features[train_ids], labels[train_ids])
    print(f"knn {100 * knn.score(features[test_ids], labels[test_ids]):.1f} %")


if __name__ == "__main__":
    run_simulation(server_app, client_app, num_supernodes=CLIENTS)
