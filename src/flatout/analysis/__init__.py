"""Raw results of a trial to a Profile. Pure: no process, no torch."""
