"""Where the seconds go until the first step of a new shape is ready.

    python benchmarks/compiling.py [--work byol cco ccl] [--variants today pool] [--device cuda]

For each workload and variant one process with an empty cache (cold), then one with the same cache
(warm); ``--beside N`` starts so many at once. ``byol``: FedEMA's settings, ResNet-18, batches of
128. ``ccl``: CCL's, with the features of four other clients. ``cco``: DCCO's merged cohort of 512
images, ResNet-14. Printed per process: seconds until the step is ready (``ready``), of its parts in
the order in which they first ran, of each run before the capture, then what torch's compiler counts
itself, and hits and misses of its caches. Variants: ``today``; ``pool`` starts the compiler's
processes before, as a run could while it reads images; ``trials`` lets cuDNN try nothing;
``tuning`` lets Triton try one form of each kernel; ``mark`` tells torch that graphs with autocast
inside may be cached before they are differentiated, which 2.11 would not do by itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
WORK = ("byol", "cco", "ccl")
VARIANTS = ("today", "pool", "trials", "tuning", "mark")


def measure(work: str, variant: str, device: str) -> dict[str, Any]:
    """Make one step in this process, and time its parts."""
    import torch
    from common import engine_of, even, made

    from fedssl import config as configuration
    from fedssl.algorithms.ccl import CCL
    from fedssl.data.random import key, mix
    from fedssl.training import compiled

    spent: dict[str, float] = defaultdict(float)
    times: dict[str, float] = {"imports": time.perf_counter() - STARTED}

    def wait() -> float:
        if device == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = wait()
            try:
                return function(*arguments, **named)
            finally:
                spent[name] += wait() - start

        return call

    from torch._inductor import config as inductor

    if variant == "tuning":
        inductor.triton.autotune_pointwise = False
        inductor.max_autotune_pointwise = False
    if variant == "pool":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
        if hasattr(AsyncCompile, "wait_pool_ready"):  # since torch 2.12 or so
            AsyncCompile.wait_pool_ready(60)
        else:
            time.sleep(10)
        times["pool"] = time.perf_counter() - STARTED - times["imports"]
    if variant == "mark":
        names = [f"torch.amp.autocast_mode._{way}_autocast" for way in ("enter", "exit")]
        inductor.unsafe_marked_cacheable_functions = dict.fromkeys(names, torch.__version__)
    notes = Notes()
    for name in ("torch._functorch._aot_autograd.autograd_cache", "torch._inductor.codecache"):
        logging.getLogger(name).addHandler(notes)
        logging.getLogger(name).setLevel(logging.INFO)
    real = compiled.compile_function

    def compile_function(function: Any, *rest: Any, **named: Any) -> Any:
        name = getattr(function, "__name__", "encode").strip("_")
        return timed(name, real(function, *rest, **named))

    compiled.compile_function = compile_function
    backward = timed("backward", compiled.differentiate)  # type: ignore[attr-defined]
    compiled.differentiate = backward  # type: ignore[attr-defined]
    tree: dict[str, Any] = {
        "device": device,
        "precision": "bf16" if device == "cuda" else "fp32",
        "rounds": 1_000_000,
        "schedule": "constant",
        "augment": {"name": "dcco" if work == "cco" else "fedema"},
        "client": {"lr": 0.032, "momentum": 0.9, "weight_decay": 5e-4},
        "server": {"optimizer": "sgd", "lr": 1.0},
    }
    if work == "cco":
        tree |= {
            "encoder": {"name": "resnet14", "norm": "group"},
            "objective": {"name": "cco"},
            "algorithm": {"name": "dcco"},
            "client": {"lr": 1.0},
            "server": {"optimizer": "adam", "lr": 1e-3},
        }
    else:
        moco = {"name": "moco", "projector": [512, 128], "queue": 4096}
        tree |= {
            "encoder": {"name": "resnet18", "norm": "batch"},
            "objective": {"name": "byol"} if work == "byol" else moco,
            "algorithm": {
                "name": "fedavg" if work == "byol" else "ccl",
                "local_epochs": 1,
                "batch": 128 if device == "cuda" else 8,
            },
        }
    count = 512 if work == "cco" else 1280
    engine, _ = engine_of(configuration.build(tree), made(count, 3, 32), even(1, count))
    trainer, algorithm = engine.trainer, engine.algorithm
    times["setup"] = wait() - STARTED - sum(times.values())
    if variant == "trials":
        torch.backends.cudnn.flags = no_trials
    start = wait()
    if work == "cco":
        trainer.compile_passes()
        members = torch.arange(count, device=device)
        with trainer.tuned():
            for _ in range(2):
                before = wait()
                seen = trainer.encode_batch(members, mix(key(0, "augment", 0), members))
                loss = trainer.objective.loss(seen)
                trainer.differentiate(loss)
                float(loss.detach())
                times.setdefault("first step", wait() - before)
        times["second step"] = wait() - before
    else:
        step = compiled.CompiledStep._step
        number = 0

        def timed_step(self: Any) -> None:
            nonlocal number
            number += 1
            timed(f"step {number}", step)(self)

        compiled.CompiledStep._step = timed_step  # type: ignore[method-assign]
        batch = 128 if device == "cuda" else 8
        inputs: tuple[torch.Tensor, ...] = ()
        function = None
        if work == "ccl":
            assert isinstance(algorithm, CCL)
            function = algorithm.loss
            remote = torch.nn.functional.normalize(torch.randn(4 * 4096, 128, device=device), dim=1)
            inputs = remote, torch.arange(4096, device=device)
        compiled_step = compiled.CompiledStep(trainer, batch, None, function, inputs)
        if device == "cpu":
            compiled_step._step()
    ready = wait() - start
    from torch._dynamo.utils import calculate_time_spent, counters

    hits = {
        name: value
        for group in ("inductor", "aot_autograd")
        for name, value in counters[group].items()
        if "cache" in name
    }
    return {
        "ready": ready,
        **times,
        **spent,
        "torch": {k: round(v, 1) for k, v in calculate_time_spent().items()},
        "caches": hits,
        "bypassed": sorted(notes.bypassed),
    }


class Notes(logging.Handler):
    """Collect the reasons why a cache is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.bypassed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message about a cache that is bypassed."""
        if "ypass" in record.msg:
            self.bypassed.add(record.getMessage()[:200])


def no_trials(*_: Any, **__: Any) -> Any:
    """cuDNN's own guess, in place of trials."""
    import contextlib

    return contextlib.nullcontext()


def run(work: str, variant: str, device: str, cache: str) -> subprocess.Popen[str]:
    """Start a process that measures."""
    words = [sys.executable, __file__, "--one", "--work", work, "--variants", variant]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*words, "--device", device], env=env, stdout=pipe, text=True)


def show(title: str, numbers: dict[str, Any]) -> None:
    """A line of seconds, then two of the compiler's own."""
    seconds = ", ".join(f"{k} {v:.1f}" for k, v in numbers.items() if isinstance(v, float))
    print(f"{title:24} {seconds}")
    print(f"{'':24} torch: {numbers['torch']}  caches: {numbers['caches']}")
    print(f"{'':24} {numbers['bypassed'] or 'no cache bypassed'}", flush=True)


def main() -> None:
    """Three lines a process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--variants", nargs="+", default=["today"], choices=VARIANTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--beside", type=int, default=3, help="processes at once")
    parser.add_argument("--no-warm", action="store_true")
    parser.add_argument("--one", action="store_true", help="in this process; print JSON")
    o = parser.parse_args()
    if o.one:
        print("JSON" + json.dumps(measure(o.work[0], o.variants[0], o.device)))
        return
    pairs = [(work, variant) for variant in o.variants for work in o.work]
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(pairs), o.beside):
            wave = pairs[first : first + o.beside]
            for state in ("cold",) if o.no_warm else ("cold", "warm"):
                running = [
                    run(work, variant, o.device, str(Path(folder) / f"{work}-{variant}"))
                    for work, variant in wave
                ]
                for (work, variant), process in zip(wave, running, strict=True):
                    output = process.communicate()[0]
                    line = [text for text in output.splitlines() if text.startswith("JSON")]
                    title = f"{work} {variant} {state}"
                    if line:
                        show(title, json.loads(line[-1][4:]))
                    else:
                        print(f"{title:24} failed")


if __name__ == "__main__":
    main()
