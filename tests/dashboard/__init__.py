"""The dashboard over a real run."""
