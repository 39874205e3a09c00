"""The `kvpool` command line: is it set up right, was it stored, why did it miss, is it right.

Exit status: 0 all well, 1 an answer that somebody should look at, 2 an error (nothing was changed).
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of `kvpool`."""
    try:
        from kvpool_connector.cli.app import app
    except ImportError as error:
        print(
            f"kvpool: {error}. The command line needs the extra: pip install 'kvpool-connector[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from error
    app()
