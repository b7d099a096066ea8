"""`python -m agent`. Kept empty of imports: worker processes import the main module again."""

if __name__ == "__main__":
    from planner.errors import say_missing

    try:
        from agent.cli import main
    except ModuleNotFoundError as error:
        say_missing(error, "openrecycle")
    main()
