"""What `doctor` looks at: each function takes a machine and returns one Check, or none."""
