"""Benchmarks that `weftune bench` runs: Weftune and other tools on the same training, on one GPU."""
