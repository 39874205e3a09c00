"""A clock that tests move."""


class ManualClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time
