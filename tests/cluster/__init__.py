"""The simulated cluster: engines, ranks and a store from one seed, driving the connector's two sides."""
