"""Starts and ends the processes of trials, and undoes what they wrote."""
