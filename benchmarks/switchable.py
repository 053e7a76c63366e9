"""The command `cohabit`, whose server begins the next model's copies early or not, as signals say while it serves.

What two processes differ by anyway, such as where their memory lies, is as much as prefetching changes: so one process
is measured with it and without it.
"""

import asyncio
import signal
import sys

from server import cli, serve

ON, OFF = signal.SIGUSR1, signal.SIGUSR2


class Switchable(serve.Server):
    """A server that listens to the two signals."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for number, on in ((ON, True), (OFF, False)):
            loop.add_signal_handler(number, self.client.prefetch, on)
        await super().start()


if __name__ == "__main__":
    serve.Server = Switchable  # type: ignore[misc]
    sys.exit(cli.main())
