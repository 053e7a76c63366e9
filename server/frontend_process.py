"""One of several front ends (`--frontends`): it shares the ports and the engine of the one that started it.

Started as `python -m cohabit.server.frontend_process ENGINE_SOCKET`, with an encoded `ServeConfig` on standard input.
"""

import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from cohabit.server.config.config import decode_config
from cohabit.server.log import configure_logging
from cohabit.server.process_rights import allow_connections, end_with_parent, no_new_privileges
from cohabit.server.serve import Server


async def _run(raw_config: bytes, engine_path: Path) -> None:
    config = decode_config(raw_config)
    configure_logging(config.log_format)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = Server(config, engine_path=engine_path)
    await server.start()
    await server.load()
    await stop.wait()
    await server.stop()


def main() -> None:
    end_with_parent()
    no_new_privileges()
    allow_connections()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(sys.stdin.buffer.read(), Path(sys.argv[1])))


if __name__ == "__main__":
    main()
