"""``python -m ortkv`` is the ``ortkv`` command."""

from ortkv.cli import main

main()
