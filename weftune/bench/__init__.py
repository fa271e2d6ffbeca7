"""Benchmarks that `weftune bench` runs: Weftune and the other ways to do the same work, on one GPU."""
