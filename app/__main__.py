from planner.errors import say_missing

if __name__ == "__main__":
    try:
        from app.cli import cli
    except ModuleNotFoundError as error:
        say_missing(error, "openrecycle[console]")
    cli()
