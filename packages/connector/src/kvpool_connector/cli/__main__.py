"""`python -m kvpool_connector.cli`."""

from kvpool_connector.cli import main

if __name__ == "__main__":
    main()
