"""What a run did: steps, warm-up, device time, memory; recorded in the child, summed up here."""
