"""The commands, composed from what is below."""
