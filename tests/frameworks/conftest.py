"""Fixtures for whole programs of frameworks."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))

import launch


@pytest.fixture
def launcher():
    launcher = launch.Launcher()
    yield launcher
    launcher.end()
