"""The precision that a trainer computes in."""

from __future__ import annotations

import torch
from helpers import encode, engine_of, groups_of, made_split, relative, settings

from fedssl import config
from fedssl.training.trainer import precision_on


def test_clients_side_by_side_share_no_cache_of_casts() -> None:
    """It is one for all threads, and empty for all when one of them is done."""
    engine, _ = engine_of(settings("precision=bf16"), made_split(), groups_of(4, 4))
    with engine.trainer.autocast():
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()


def test_bf16_is_computed_in_bf16() -> None:
    results = []
    for precision in ("fp32", "bf16"):
        engine, _ = engine_of(settings(f"precision={precision}"), made_split(), groups_of(4, 4))
        results.append(encode(engine, 0)[0])
        assert results[-1].dtype == torch.float32
    assert 1e-4 < relative(*results) < 0.2


def test_bf16_is_the_default_on_a_gpu_alone() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert (precision_on(gpu, "auto"), precision_on(cpu, "auto")) == ("bf16", "fp32")
    assert {precision_on(d, p) for d in (gpu, cpu) for p in ("fp32",)} == {"fp32"}
    assert config.build({}).precision == "auto"
    engine, _ = engine_of(settings("precision=auto"), made_split(), groups_of(4, 4))
    assert (engine.trainer.precision, engine.trainer.dtype) == ("fp32", torch.float32)
