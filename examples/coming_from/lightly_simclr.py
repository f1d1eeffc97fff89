"""SimCLR with lightly, on all digits in one place."""

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import resnet18
from torchvision.transforms.functional import to_pil_image

pixels, labels = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
images = nn.functional.interpolate(images, size=16)
transform = SimCLRTransform(input_size=16, gaussian_blur=0.0, hf_prob=0.0, min_scale=0.5)
views = [transform(to_pil_image(image)) for image in images[:700]]  # drawn once, to be short

encoder = resnet18()
encoder.fc = nn.Identity()
head = SimCLRProjectionHead(512, 512, 64)
criterion = NTXentLoss(temperature=0.1)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.05)
for _ in range(2):
    for first, second in DataLoader(views, batch_size=128, shuffle=True):
        loss = criterion(head(encoder(first)), head(encoder(second)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

encoder.eval()
with torch.no_grad():
    features = encoder(images)
knn = KNeighborsClassifier(20).fit(features[:700], labels[:700])
print(f"knn {100 * knn.score(features[700:], labels[700:]):.1f} %")
