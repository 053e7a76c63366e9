"""Tokens replaced while the server runs: new files count at once, unusable ones change nothing."""

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cohabit.server.errors import Unauthenticated
from cohabit.server.frontend.access import Permission, TokenFiles, open_access
from tests.support.server.server_fakes import Running, config, identity, running, serving
from tests.support.server.server_http import ask

pytestmark = pytest.mark.process

OLD, NEW, CONTROL = "the-old-token-0123456789", "the-new-token-0123456789", "control-token-0123456789"

OLD_DIGEST = hashlib.sha256(OLD.encode()).digest()


@dataclass
class Guarded:
    server: Running
    tokens: Path
    control: Path

    def status(self, token: str, path: str = "/v2", method: str = "GET") -> int:
        return ask(self.server, method, path, None, {"Authorization": f"Bearer {token}"}).status

    def reread(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.server.tokens.reread(), self.server.loop).result(10)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    tokens, control = tmp_path / "tokens", tmp_path / "control"
    tokens.write_text(OLD)
    control.write_text(CONTROL)
    with running(serving(identity("one", "FP32")), token_files=(tokens,), control_token_files=(control,)) as server:
        yield Guarded(server, tokens, control)


def test_tokens_of_either_file_are_replaced(guarded: Guarded) -> None:
    assert (guarded.status(OLD), guarded.status(NEW), guarded.status(CONTROL)) == (200, 401, 200)
    guarded.tokens.write_text(NEW)
    guarded.reread()
    assert (guarded.status(OLD), guarded.status(NEW), guarded.status(CONTROL)) == (401, 200, 200)
    guarded.tokens.write_text(OLD)
    guarded.control.write_text(NEW)
    guarded.reread()
    statuses = [guarded.status(token, "/v2/logging") for token in (NEW, CONTROL, OLD)]
    assert statuses == [200, 401, 403]


def test_an_unusable_file_changes_nothing_and_is_logged_without_its_tokens(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.control.write_text(NEW)  # usable, but all files are reloaded together
    for broken in ("", "# a comment", "short", "a token with spaces in it", None):
        caplog.clear()
        if broken is None:
            guarded.tokens.unlink()
        else:
            guarded.tokens.write_text(broken)
        guarded.reread()
        assert (guarded.status(OLD), guarded.status(CONTROL), guarded.status(NEW)) == (200, 200, 401)
        (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
        assert "the tokens stay as they were" in record.message
        assert NEW not in str(vars(record))


async def test_files_are_reloaded_when_they_change(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(OLD)
    settings = config(token_files=(tokens,))
    access = open_access(settings)
    following = asyncio.create_task(TokenFiles(settings, access).watch(interval_s=0.01))
    replacement = tmp_path / "replacement"
    replacement.write_text(NEW)
    replacement.rename(tokens)
    while OLD_DIGEST in access.tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    access.require(f"Bearer {NEW}", Permission.INFERENCE)
    with pytest.raises(Unauthenticated):
        access.require(f"Bearer {OLD}", Permission.INFERENCE)
    following.cancel()


async def test_without_token_files_following_ends_at_once() -> None:
    following = asyncio.create_task(TokenFiles(config(), open_access(config())).watch())
    await asyncio.sleep(0)
    assert following.done()
