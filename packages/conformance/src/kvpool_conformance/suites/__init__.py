"""The law, as test classes to subclass."""

from kvpool_conformance.suites.isolation import Isolation
from kvpool_conformance.suites.round_trip import CacheRoundTrip
from kvpool_conformance.suites.store import StoreConformance

__all__ = ["CacheRoundTrip", "Isolation", "StoreConformance"]
