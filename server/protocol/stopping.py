"""Where a generated text stops: at one of some strings, which are no part of it."""

from collections.abc import Sequence


class StopStrings:
    """Passes a text on piece by piece, but for what may yet become a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False
        """Whether a stop string has come; nothing is passed on after it."""

    def passed(self, piece: str) -> str:
        """Return what is certain of the text, given its next piece."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((self._overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what was held back, once the text has ended."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """Return how much of a text's end is the beginning of a string."""
        return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if string.startswith(text[-n:])), 0)
