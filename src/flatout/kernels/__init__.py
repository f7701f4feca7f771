"""Fast operators, each alongside its plain reference."""
