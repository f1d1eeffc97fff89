"""How long exact noise takes, beside noise in floating point.

    python benchmarks/noise.py [NUMBERS ...]

NUMBERS is how many numbers a round releases; the default is 100,000, a million and ten millions.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from fedssl.privacy.gaussian import sample_gaussian
from fedssl.privacy.noise import STEPS
from fedssl.util.secrets import system_generator


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("numbers", type=int, nargs="*", default=[10**5, 10**6, 10**7])
    for count in parser.parse_args().numbers:
        seconds = []
        for draw in (
            lambda n: sample_gaussian(n, 4 * STEPS + 1),
            lambda n: system_generator().standard_normal(n),
        ):
            started = time.perf_counter()
            drawn = np.asarray(draw(count))
            seconds.append(time.perf_counter() - started)
            assert len(drawn) == count
        print(f"{count:,} numbers: exact {seconds[0]:.2f} s, floating point {seconds[1]:.2f} s")


if __name__ == "__main__":
    main()
