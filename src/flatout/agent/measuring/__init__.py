"""What a training process records about time, memory and operators."""
