"""Centralized training: the upper bound of the papers' tables."""

from __future__ import annotations

from fedssl.algorithms.fedavg import FedAvg


class Centralized(FedAvg):
    """FedAvg with one client that holds everything: with one local step, a round is a step.

    ``algorithm.batch`` defaults to the samples of a cohort: like is compared with like.
    """

    pools_data = True
