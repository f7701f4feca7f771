"""What flatout claims about itself, measured: `make bench`, `make bench-gpu`."""
