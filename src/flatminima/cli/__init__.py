"""The command ``flatminima``: parse, call, print.

Nothing heavy is imported before a command runs, so that ``flatminima --help`` answers at once.
"""

from flatminima.cli.entry import main

__all__ = ["main"]
