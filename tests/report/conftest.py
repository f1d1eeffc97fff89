from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from image_folders import save
from made_runs import NASTY
from PIL import Image

from fedssl import config
from fedssl.runs import loop

SMALL = (
    *("encoder.groups=8", "evaluate.baselines=[]", "rounds=3"),
    *("objective.projector=32,16", "engine.threads=1"),
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits with everything that a page can show."""
    out = tmp_path_factory.mktemp("report") / "first"
    words = (
        *("partition.name=dirichlet", "partition.clients=6", "cohort.size=4", "evaluate.every=1"),
        *("evaluate.protocols=knn,per-client", "evaluate.monitor=knn"),
    )
    settings = config.resolve(config.read_recipe(None), (*SMALL, *words))
    loop.run(settings, out)
    return out


@pytest.fixture(scope="session")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedEMA on a folder of colour images, with names that are markup."""
    root = tmp_path_factory.mktemp("named")
    generator = np.random.default_rng(0)
    for split, many in (("train", 4), ("test", 3)):
        for client in ("north", f"south{NASTY}"):
            for c, name in enumerate((NASTY, "plain", "third")):
                for k in range(many):
                    pixels = generator.integers(c * 80, c * 80 + 90, (16, 16, 3)).clip(0, 255)
                    image = Image.fromarray(pixels.astype(np.uint8))
                    save(root / "data" / split / client / name / f"{k}.png", image)
    tree = {
        "about": "</script><script>document.title='broken'</script><!--",
        "data": {
            "name": "folder",
            "root": str(root / "data"),
            "cache": str(root / "cache"),
            "levels": ["client", "class"],
        },
        "partition": {"name": "folder"},
        "encoder": {"name": "tiny", "groups": 8},
        "objective": {"name": "byol", "projector": [16, 8], "predictor": [16, 8]},
        "algorithm": {"name": "fedema", "local_epochs": 1, "batch": 6},
        "client": {"lr": 0.01},
        "server": {"optimizer": "sgd", "lr": 1.0},
        "rounds": 2,
        "evaluate": {"protocols": ["knn"], "k": 3},
        "engine": {"threads": 1},
    }
    loop.run(config.build(tree), root / "run")
    return root / "run"
