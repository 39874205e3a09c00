"""`python -m kvpool_connector.cli`."""

from kvpool_connector.cli import main

main()
