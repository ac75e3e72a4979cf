"""The ``ortkv`` command's first lines, also as ``python -m ortkv``: from here Ctrl-C is quiet."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line; an interrupt ends it with exit code 130 and no word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)
    try:
        from ortkv import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _on_interrupt(_number: int, frame: FrameType | None) -> None:
    """Interrupt, as Python does; in the middle of an import, leave at once.

    An extension module that is interrupted while it starts may print it, or turn it into an
    ImportError.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
