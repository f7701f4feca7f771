"""`python -m flatout`: the same as `flatout`, for whoever has several Pythons."""

from flatout.cli import main

if __name__ == "__main__":
    main()
