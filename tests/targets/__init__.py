"""What the conformance suite judges here: the connector on the simulated store, on real Mooncake, on an NPU."""
