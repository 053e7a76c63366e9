"""Broken machines that only root can make: file systems that are full, and disks that fail."""

import os
import subprocess
import time
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


@contextmanager
def memory_cgroup() -> Iterator[Path]:
    """A cgroup (version 1) for the memory of some processes."""
    folder = Path(f"/sys/fs/cgroup/memory/cohabit-test-{os.getpid()}")
    as_root("mkdir", folder)
    try:
        yield folder
    finally:
        end_s = time.monotonic() + 20
        while (folder / "cgroup.procs").read_text() and time.monotonic() < end_s:
            time.sleep(0.05)  # processes that were killed are leaving
        folder.rmdir()


@contextmanager
def disk_in_a_file(folder: Path, size: str) -> Iterator[Path]:
    """A file system on a loop device over `FOLDER.img`, which a test can damage."""
    image = folder.with_suffix(".img")
    folder.mkdir()
    as_root("truncate", "-s", size, image)
    as_root("mkfs.ext4", "-q", image)
    as_root("mount", "-o", "loop", image, folder)
    try:
        yield image
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
