"""Batches that leave the workers as bytes and become floats where they are used."""
