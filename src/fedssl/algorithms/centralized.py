"""Centralized training: the upper bound of the papers' tables."""

from __future__ import annotations

from fedssl.algorithms.fedavg import FedAvg


class Centralized(FedAvg):
    """FedAvg with one client that holds all images; with one local step, a round is one step.

    ``algorithm.batch`` defaults to the number of samples of a cohort, for a fair comparison.
    """

    pools_data = True
