"""Fixtures for the tests of deployments."""

from three_sites import sites as sites
