"""`python -m agent` in a clone. Kept empty of imports: processes that it starts import the main module again."""

if __name__ == "__main__":
    from openrecycle.cli import main

    main("agent")
