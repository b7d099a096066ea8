from planner.errors import say_missing

if __name__ == "__main__":
    try:
        from planner.cli import main
    except ModuleNotFoundError as error:
        say_missing(error, "openrecycle[planner]")
    main()
