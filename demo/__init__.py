"""`nox -s demo`: one engine fills a pool, a second, fresh one answers from it."""
