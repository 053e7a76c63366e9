"""Broken machines that only root can make: file systems that are full, and disks that fail."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def as_root(*command: str | Path) -> str:
    """Run a command, and return its output; skip the test where that is not allowed."""
    if os.geteuid():
        pytest.skip(f"{command[0]} needs root")
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode:
        pytest.skip(f"{command[0]} is not possible here: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A file system that has so much room."""
    folder.mkdir(exist_ok=True)
    as_root("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
