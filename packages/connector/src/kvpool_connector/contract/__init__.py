"""The contract between the connector and everything around it. Standard library only."""
