"""See the package's README."""

__version__ = "0.1.0"
