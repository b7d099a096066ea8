"""`python -m openrecycle`."""

if __name__ == "__main__":
    from openrecycle.cli import main

    main()
