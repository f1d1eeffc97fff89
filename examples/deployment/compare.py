"""How far the weights of two runs are apart: a deployment and the same run without Flower.

    python compare.py RUN OTHER [--most 1e-5]

Prints the relative difference of the whole model and of the encoder; exits with 1 above --most.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def vector(path: Path, name: str | None = None) -> torch.Tensor:
    """One tensor of a file, or all of them one after another."""
    tensors = load_file(path)
    chosen = [tensors[name]] if name else [tensors[key] for key in sorted(tensors)]
    return torch.cat([tensor.double().flatten() for tensor in chosen])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("other", type=Path, metavar="OTHER", help="another's")
    parser.add_argument("--most", type=float, default=1e-5, help="the most that is allowed")
    options = parser.parse_args()
    good = True
    for file, name in (("checkpoint/state.safetensors", "weights"), ("encoder.safetensors", None)):
        ours, other = (vector(folder / file, name) for folder in (options.run, options.other))
        apart = float(torch.linalg.vector_norm(ours - other) / torch.linalg.vector_norm(other))
        good = good and apart <= options.most
        print(f"{name or 'encoder'}: {len(ours):,} numbers, relative difference {apart:.1e}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
