"""What `weftune bench` runs: Weftune and the other ways to do the same work, measured on one GPU."""
