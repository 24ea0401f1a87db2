"""Everything is in pyproject.toml; this file is for tools that still look for setup.py."""

from setuptools import setup

setup()
