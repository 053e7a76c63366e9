"""The pages in a real browser: a running server's, and a plan's."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cohabit.server.view.page import plan_page
from cohabit.server.view.plan_document import plan_document
from tests.server.test_plan_analysis import hand_written_analysis
from tests.support.e2e.browser import Page, browser
from tests.support.e2e.serving import Process, infer, process
from tests.support.e2e.stacks import Stacks, X

BROKEN = "<i>broken"
TOKEN = "control-token-0123456789"


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browser() as opened:
        yield opened
        assert opened.complaints == []


def row_of(model: str) -> str:
    rows = "[...document.querySelectorAll('.models tbody tr')]"
    return f"{rows}.find((row) => row.querySelector('b').textContent === '{model}')"


def state_of(model: str) -> str:
    return f"{row_of(model)}?.querySelector('.state').textContent"


async def ask_on(server: Process) -> None:
    """Send requests one after the other until cancelled: the page shows those of the last seconds."""
    while True:
        await asyncio.to_thread(infer, server.address, "a", {"x": X})
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def repository(stacks: Stacks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for seed, name in enumerate(("a", "b")):
        stacks.put(folder, name, seed)
    stacks.put(folder, BROKEN, 0)
    (folder / BROKEN / "1" / "model.pt2").write_bytes(b"no archive")
    return folder


FLAGS = ("--model-control", "explicit", "--load-model", "*", "--batch-sizes", "1", "--no-strict-readiness")


async def test_the_live_page_follows_a_server_through_an_unload_a_death_and_a_new_start(
    page: Page, repository: Path, plans: Path, tmp_path: Path
) -> None:
    tracing = ("--trace-config", f"file={tmp_path / 't.json'}", "--trace-config", "rate=1")
    with process(repository, "24MiB", plans, *FLAGS, *tracing) as server:
        server.until_ready()
        await page.open(f"http://{server.address}/")
        await page.until(f"{state_of('a')} === 'ready' && {state_of('b')} === 'ready'")
        assert await page.value(state_of(BROKEN)) == "not served", "its name is text, and no markup"
        assert await page.value(f"{row_of(BROKEN)}.querySelector('.reason').textContent")
        parts = "[...document.querySelectorAll('.part.partition span')].map((s) => s.textContent)"
        assert sorted(await page.value(parts)) == ["a", "b"]
        widths = await page.value(
            "[...document.querySelectorAll('.part')].reduce((n, p) => n + parseFloat(p.style.width), 0)"
        )
        assert widths == pytest.approx(100, abs=0.01), "the parts fill the arena"

        asking = asyncio.create_task(ask_on(server))
        await page.until("document.querySelectorAll('svg.lanes rect.compute').length > 0")
        await page.until(f"{row_of('a')}.querySelector('.latency').textContent.includes(' / ')")
        asking.cancel()

        await page.value(f"{row_of('b')}.querySelector('button').click()")
        assert "Unload b?" in await page.text()
        await page.value("document.querySelector('dialog button.strong').click()")
        await page.until(f"{state_of('b')} === 'not loaded'")
        assert await page.value(f"{row_of('b')}.querySelector('button').textContent") == "Load"
        await page.until(f"!{parts}.includes('b') && document.querySelector('.part.free') !== null")

        server.engine().kill()
        await page.until(
            "document.querySelector('.banner').textContent.startsWith('The engine is being restarted')"
        )
        await page.until(f"document.querySelector('.banner').textContent === '' && {state_of('a')} === 'ready'")
        assert "engine restarted once" in await page.value("document.querySelector('header').textContent")

        await page.value(f"{row_of('b')}.querySelector('button').click()")
        await page.until(f"{state_of('b')} === 'ready'")

        port = server.address.rpartition(":")[2]
        server.popen.terminate()
        server.popen.wait(60)
        await page.until("document.querySelector('.banner').textContent.includes('No connection to the server')")
    with process(repository, "24MiB", plans, *FLAGS, "--http-port", port) as server:
        server.until_ready()
        await page.until(f"document.querySelector('.banner').hidden && {state_of('a')} === 'ready'")
        assert "engine restarted" not in await page.value("document.querySelector('header').textContent")
        page.complaints.clear()  # those of the connections that were refused meanwhile


@pytest.fixture(scope="module")
def server(repository: Path, plans: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that controls models with a token."""
    control = tmp_path_factory.mktemp("tokens") / "control"
    control.write_text(TOKEN)
    with process(repository, "24MiB", plans, *FLAGS, "--control-token-file", str(control)) as server:
        server.until_ready()
        yield server


async def test_the_live_page_asks_for_the_token_where_one_is_needed(page: Page, server: Process) -> None:
    await page.open(f"http://{server.address}/")
    await page.until(f"{state_of('a')} === 'ready'")
    await page.value(f"{row_of('a')}.querySelector('button').click()")
    await page.value("document.querySelector('dialog button.strong').click()")
    await page.until("document.querySelector('dialog input') !== null")
    assert await page.value(state_of("a")) == "ready"
    await page.value(f"document.querySelector('dialog input').value = '{TOKEN}'")
    await page.press("Enter")
    await page.until(f"{state_of('a')} === 'not loaded'")
    page.complaints.clear()  # the browser notes the answer 401


async def test_the_live_page_is_readable_on_a_phone_and_in_the_dark(page: Page, server: Process) -> None:
    backgrounds = []
    for dark in (False, True):
        await page.looks(400, dark=dark)
        await page.open(f"http://{server.address}/")
        await page.until(f"{state_of('b')} === 'ready'")
        assert await page.value("document.documentElement.scrollWidth") <= 400
        backgrounds.append(await page.value("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds[0] != backgrounds[1]
    buttons = "[...document.querySelectorAll('button')]"
    assert await page.value(f"{buttons}.every((button) => (button.ariaLabel || button.textContent).trim())")
    assert "partitions" in await page.value("document.querySelector('.arena').ariaLabel")
    await page.value("document.querySelector('.arena').focus()")
    await page.press("ArrowRight")
    assert "workspace" in await page.value("document.getElementById('tip').textContent")


async def test_a_plan_is_drawn_and_tells_of_its_steps(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan_document(hand_written_analysis())))
    for width in (1280, 400):
        await page.looks(width)
        await page.open(path.as_uri())
        assert await page.value("document.querySelectorAll('svg.lanes rect.compute').length") == 3
        assert await page.value("document.querySelectorAll('svg.lanes rect.stall').length") == 1
        assert await page.value("document.documentElement.scrollWidth") <= width
        await page.value("document.querySelector('.plot').focus()")
        await page.press("ArrowRight")
        assert "op0" in await page.value("document.getElementById('tip').textContent")
        await page.press("ArrowRight")
        assert "op1" in await page.value("document.getElementById('tip').textContent")
        text = await page.text()
        assert "swap-in of W2" in text
        assert "Copied bytes by tensor" in text
