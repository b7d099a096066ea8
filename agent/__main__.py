"""`python -m agent`. Kept empty of imports: worker processes import the main module again."""

if __name__ == "__main__":
    from agent.cli import main

    main()
