from __future__ import annotations

import pytest
from encoders import trained

from fedssl.config import Data
from fedssl.data.load import load_dataset


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="session")
def images():
    return load_dataset(Data(size=8)).test.images[0]


@pytest.fixture(scope="session")
def two_towers(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "two", "encoder.towers=2", "data.halves=true")
