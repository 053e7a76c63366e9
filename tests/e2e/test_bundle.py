"""Bundles: exported by the command, served without archives, worker processes or searches, with the same bits."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from server.cli import main
from server.config.bundle import read_bundle
from server.config.config import ServeConfig
from server.config.sources import add_flags, read_settings
from server.errors import ConfigError
from tests.e2e.serving import infer, refused_start, repository_index, serving
from tests.e2e.stacks import Stacks

MODELS, BATCHES = "abc", "1,2"
MEMORY = "8MiB"


def settings(*flags: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_settings(parser.parse_args(flags), {}).config


@pytest.fixture(scope="module")
def repository(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundled") / "models"
    for seed, name in enumerate(MODELS):
        stacks.put(root, name, seed)
    (root / "a" / "config.pbtxt").write_text('name: "a" output [{name: "out" label_filename: "labels.txt"}]')
    return root


@pytest.fixture(scope="module")
def exported(repository: Path, plans: Path) -> Path:
    output = repository.parent / "bundle"
    flags = ("--memory", MEMORY, "-o", str(output), "--cache", str(plans), "--batch-sizes", BATCHES)
    assert main(["export-bundle", str(repository), *flags]) == 0
    return output


def test_print(exported: Path, repository: Path):
    print(subprocess.run(["find", str(exported)], capture_output=True, text=True).stdout)
    print((exported / "bundle.json").read_text())
