"""The suites on our targets."""

from kvpool_conformance.suites import CacheRoundTrip, Isolation, StoreConformance


class TestStore(StoreConformance):
    """The connector's store edge."""


class TestRoundTrip(CacheRoundTrip):
    """The connector's worker side."""


class TestIsolation(Isolation):
    """The connector's keys."""
