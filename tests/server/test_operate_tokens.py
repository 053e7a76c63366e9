"""Tokens exchanged while the server runs: new files count at once, broken ones change nothing."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_fakes import Running, config, identity, running, serving
from server_http import ask

from server.errors import Unauthenticated
from server.observe.access import Permission, open_access
from server.observe.tokens import TokenFiles

OLD, NEW, CONTROL = "the-old-token-0123456789", "the-new-token-0123456789", "control-token-0123456789"


@dataclass
class Guarded:
    server: Running
    tokens: Path
    control: Path

    def status(self, token: str, path: str = "/v2", method: str = "GET") -> int:
        return ask(self.server, method, path, None, {"Authorization": f"Bearer {token}"}).status

    def reread(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.server.reread_tokens(), self.server.loop).result(10)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    tokens, control = tmp_path / "tokens", tmp_path / "control"
    tokens.write_text(OLD)
    control.write_text(CONTROL)
    with running(serving(identity("one", "FP32")), token_files=(tokens,), control_token_files=(control,)) as server:
        yield Guarded(server, tokens, control)


def test_a_new_token_counts_and_an_old_one_does_not_any_more(guarded: Guarded) -> None:
    assert (guarded.status(OLD), guarded.status(NEW), guarded.status(CONTROL)) == (200, 401, 200)
    guarded.tokens.write_text(NEW)
    guarded.reread()
    assert (guarded.status(OLD), guarded.status(NEW), guarded.status(CONTROL)) == (401, 200, 200)


def test_a_token_for_control_can_be_exchanged_too(guarded: Guarded) -> None:
    guarded.control.write_text(NEW)
    guarded.reread()
    assert guarded.status(NEW, "/v2/logging") == 200
    assert guarded.status(CONTROL, "/v2/logging") == 401
    assert guarded.status(OLD, "/v2/logging") == 403


@pytest.mark.parametrize("broken", ["", "# nobody", "short", "a token with spaces in it", None])
def test_a_file_that_cannot_be_used_changes_nothing_and_is_logged_without_its_tokens(
    guarded: Guarded, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    guarded.control.write_text(NEW)  # sound by itself, but files count together
    if broken is None:
        guarded.tokens.unlink()
    else:
        guarded.tokens.write_text(broken)
    guarded.reread()
    assert (guarded.status(OLD), guarded.status(CONTROL), guarded.status(NEW)) == (200, 200, 401)
    (record,) = (r for r in caplog.records if r.levelno == logging.ERROR)
    assert "those so far stay valid" in record.message
    assert NEW not in str(vars(record))


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(OLD)
    settings = config(token_files=(tokens,))

    async def exchange() -> None:
        access = open_access(settings)
        following = asyncio.create_task(TokenFiles(settings, access).follow(interval_s=0.01))
        replacement = tmp_path / "replacement"
        replacement.write_text(NEW)
        replacement.rename(tokens)
        async with asyncio.timeout(10):
            while True:
                try:
                    access.require(f"Bearer {NEW}", Permission.INFERENCE)
                    break
                except Unauthenticated:
                    await asyncio.sleep(0.01)
        with pytest.raises(Unauthenticated):
            access.require(f"Bearer {OLD}", Permission.INFERENCE)
        following.cancel()

    asyncio.run(exchange())


def test_without_token_files_there_is_nothing_to_follow() -> None:
    async def follow() -> None:
        async with asyncio.timeout(10):
            await TokenFiles(config(), open_access(config())).follow()

    asyncio.run(follow())
