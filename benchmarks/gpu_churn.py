"""`python -m benchmarks.gpu_churn`: a part of `weftune bench`, with all of its own options."""

from weftune.bench.gpu_churn import main

if __name__ == "__main__":
    main()
