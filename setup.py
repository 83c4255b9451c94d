"""Build hooks for what pyproject.toml cannot say; the metadata is all there."""

from setuptools import setup

setup()
