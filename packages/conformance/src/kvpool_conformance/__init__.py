"""Proves byte for byte that a store, or a connector's saving and loading, moves the right bytes.

An author supplies a backend (`kvpool_conformance.backend`) and subclasses a suite (`kvpool_conformance.suites`); see
`docs/write-a-backend.md`.
"""

__version__ = "0.1.0"
