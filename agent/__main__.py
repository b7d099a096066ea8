"""`python -m agent`. Kept empty of imports: worker processes import the main module again."""

if __name__ == "__main__":
    import sys

    try:
        from agent.cli import main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("agent", "planner"):
            raise
        print(f"error: the command line needs {error.name}: pip install {error.name}", file=sys.stderr)
        sys.exit(2)
    main()
