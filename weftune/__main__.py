"""`python -m weftune` is `weftune`."""

from weftune.cli.main import main

if __name__ == "__main__":
    main()
