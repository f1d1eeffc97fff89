"""Check the files of a run and of its sites, for run_faults.sh.

    python check_faults.py RUN STATES [--lost SITE ROUND]

Every round is there exactly once; only SITE's reply in ROUND is missing, with the reason; it takes
part again from its own state, not as a newcomer. STATES is the sites' FEDSSL_STATE.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file


def check(good: bool, what: str) -> None:
    """Stop at what is not true."""
    if not good:
        raise SystemExit(f"failed: {what}")
    print(f"true: {what}")


def newest(states: Path, name: str, client: int) -> dict[str, Any]:
    """The state that a site kept last."""
    files = states.glob(f"{name}-*/*/{client}/*.safetensors")
    return load_file(max(files, key=lambda path: path.stat().st_mtime))


def check_returned(
    lines: list[dict[str, Any]], states: Path, name: str, client: int, lost: int, tau: float
) -> None:
    """FedEMA's μ is 0 where a client starts from the global model, and τ in its second round."""
    mu = [line["mu"].get(str(client)) for line in lines]
    print(f"μ of {name} by round: {', '.join('-' if m is None else f'{m:.3f}' for m in mu)}")
    check(
        mu[lost - 1] is None and mu[lost] == 0, f"round {lost + 1}: it starts from the global one"
    )
    later = mu[lost + 1 :]
    check(all(m > 0 for m in later) and later[0] != tau, "then with its own, not as a newcomer")
    state = newest(states, name, client)
    first, last = float(state["first"]), float(state["divergence"])
    print(f"its state: {len(state)} tensors, first divergence {first:.4f}, last {last:.4f}")
    wanted = min(tau * last / first, 1.0)
    check(abs(wanted - later[-1]) < 1e-6, "its last μ is τ · last / first of that state")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("states", type=Path, metavar="STATES")
    parser.add_argument("--lost", nargs=2, metavar=("SITE", "ROUND"), default=("", "0"))
    options = parser.parse_args()
    name, lost = options.lost[0], int(options.lost[1])
    settings = yaml.safe_load((options.run / "config.yaml").read_text(encoding="utf-8"))
    text = (options.run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    names = [row["name"] for row in json.loads((options.run / "clients.json").read_text())]
    rounds = [line["round"] for line in lines]
    check(rounds == list(range(1, settings["rounds"] + 1)), f"rounds {rounds}, each once")
    for line in lines:
        faults = {names[int(k)]: reason for k, reason in line.get("faults", {}).items()}
        if faults:
            print(f"round {line['round']}: missing {line['missing']}, faults {faults}")
        ours = [name] if line["round"] == lost else []
        if list(faults) != ours or line["missing"] != len(ours) or line["skipped"]:
            check(False, f"round {line['round']}: {ours or 'nobody'} is missing, and why is said")
    check(True, "nobody else is missing" if lost else "nobody is missing")
    if lost:
        tau = settings["algorithm"].get("tau", 0.7)
        check_returned(lines, options.states, name, names.index(name), lost, tau)


if __name__ == "__main__":
    main()
