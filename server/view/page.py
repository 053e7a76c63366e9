"""The page: one self-contained HTML file with the script, which draws a plan or a running server."""

import base64
import hashlib
import html
from functools import cache
from importlib.resources import files
from string import Template

import msgspec

from cohabit.server.view.document import NoDocument, PlanDocument


def plan_page(document: PlanDocument) -> str:
    """Return a page that draws a plan, and may load nothing."""
    return _page(document, document.title, _policy("'none'"))


def live_page() -> str:
    """Return a page that follows its own server, and may reach no other.

    It has no data of the server; the script requests that, with a token if required.
    """
    return _page(NoDocument(), "Cohabit", live_policy())


def live_policy() -> str:
    """Return the Content-Security-Policy of the live page, also for its header."""
    return _policy("'self'")


def style_sheet() -> str:
    """Return the style of every page."""
    return _part("view.css")


def static_policy() -> str:
    """Return the Content-Security-Policy of a page without a script, which may load only this style."""
    return (
        f"default-src 'none'; style-src 'sha256-{_digest(style_sheet())}'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def _page(document: PlanDocument | NoDocument, title: str, policy: str) -> str:
    # Escaped, so that no name of a model can close the script's tag.
    data = msgspec.json.encode(document).decode().replace("<", "\\u003c")
    return Template(_part("view.html")).substitute(
        title=html.escape(title),
        policy=html.escape(policy, quote=True),
        style=style_sheet(),
        script=_part("view.js"),
        data=data,
    )


def _policy(reached: str) -> str:
    """Permit this page's own script and style, by their hashes, and connections to `reached`."""
    script, style = (f"'sha256-{_digest(_part(name))}'" for name in ("view.js", "view.css"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src {reached}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _part(name: str) -> str:
    return (files("cohabit.server.view") / name).read_text(encoding="utf-8")
